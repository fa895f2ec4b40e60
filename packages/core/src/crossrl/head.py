"""Log-probability and entropy of labels from hidden states, without ever holding the logits.

The logits of T tokens over V words are the peak of language-model RL: T V fp32 values, several times over in a naive
backward. Here only the rows that train are computed, in tiles of tokens x vocabulary whose size follows a budget of
bytes; the forward keeps two numbers a row and the backward computes the tiles again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from crossrl.errors import ConfigError

MIB = 1 << 20
TILE_ROWS, TILE_WORDS = 1024, 8192
"""Larger tiles were not faster (docs/peak-memory.md): a tile is read several times and should stay in a cache."""
LEAST_ROWS, LEAST_WORDS = 16, 256
FORBIDDEN = -1e30
"""The logit of a forbidden word. Not -inf: 0 x -inf would make the entropy NaN."""


@dataclass(frozen=True, slots=True)
class TilePlan:
    """A tile of `rows` x `words` logits, and the `bytes` that its buffers take at once (gradients not counted)."""

    rows: int
    words: int
    bytes: int


def plan_tiles(rows: int, words: int, width: int, dtype: torch.dtype, max_bytes: int) -> TilePlan:
    """The largest tile for `rows` tokens, `words` in the vocabulary and hidden `width` within `max_bytes`.

    Raises `ConfigError` if not even a tile of 16 x 256 fits.
    """
    low = dtype.itemsize < 4

    def size(r: int, w: int) -> int:
        logits = r * w * (8 + (dtype.itemsize if low else 0))  # logits, probabilities, and a copy in the weight's type
        return logits + r * (width * 4 + 24) + w * width * (4 if low else 0)  # the row's sums; dW's own tile if low

    r, w = max(1, min(rows, TILE_ROWS)), min(words, TILE_WORDS)
    while size(r, w) > max_bytes:
        if w > LEAST_WORDS and (w >= 2 * r or r <= LEAST_ROWS):
            w = max(LEAST_WORDS, w // 2)
        elif r > LEAST_ROWS:
            r = max(LEAST_ROWS, r // 2)
        else:
            raise ConfigError(
                f"the smallest tile of the log-prob head needs {size(r, w):,} bytes, more than {max_bytes:,}",
                where="max_head_bytes",
                fix=f"set it to {-(-size(r, w) // MIB)} MiB or more",
            )
    return TilePlan(r, w, size(r, w))


def linear_logprob(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    mask: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    entropy: bool = True,
    forbidden: Tensor | None = None,
    max_bytes: int = 256 * MIB,
    plan: TilePlan | None = None,
) -> tuple[Tensor, Tensor | None]:
    """log softmax(hidden weight^T / temperature)[label], and the entropy of that distribution: fp32, shaped as labels.

    hidden [..., H]; weight [V, H], also as FSDP2's DTensor (its gradient is then averaged over the mesh, as FSDP2
    does); labels [...] int64; mask [...] bool: where it is False both results are exactly 0, nothing is computed and
    no gradient flows. An empty mask gives a zero that is still connected to hidden and weight. temperature: a number
    or [...]; forbidden [n]: ids of words with probability 0. Products are in the weight's dtype (fp32 on a CPU),
    everything after them and the sum of the weight's gradient in fp32; the order of all sums is fixed. Without
    `entropy` the second result is None. Differentiable once, in hidden and weight.

    Raises `ValueError` for shapes that do not fit or a label outside the vocabulary, `ConfigError` from `plan_tiles`.
    """
    if hidden.shape[:-1] != labels.shape or hidden.shape[-1] != weight.shape[-1]:
        raise ValueError(f"hidden {tuple(hidden.shape)}, weight {tuple(weight.shape)}, labels {tuple(labels.shape)}")
    weight = _whole(weight)
    flat, targets = hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1)
    scale = torch.as_tensor(temperature, dtype=torch.float32, device=hidden.device).reciprocal().expand(labels.shape)
    scale = scale.reshape(-1)
    chosen = None
    if mask is not None:
        chosen = mask.reshape(-1).nonzero().squeeze(1)
        flat, targets, scale = flat.index_select(0, chosen), targets[chosen], scale[chosen]
    if not bool(((targets >= 0) & (targets < len(weight))).all()):
        raise ValueError(f"a label lies outside the vocabulary of {len(weight)}; mask it out")
    plan = plan or plan_tiles(len(flat), *weight.shape, weight.dtype, max_bytes)
    found = _LinearLogprob.apply(flat, weight, targets, scale, forbidden, plan, entropy)
    out = [_scatter(value, chosen, labels) for value in (found if entropy else found[:1])]
    return out[0], out[1] if entropy else None


def _scatter(values: Tensor, chosen: Tensor | None, like: Tensor) -> Tensor:
    if chosen is None:
        return values.view(like.shape)
    return values.new_zeros(like.numel()).index_put((chosen,), values).view(like.shape)


def _whole(weight: Tensor) -> Tensor:
    """An FSDP2 shard as the full tensor, gathered once; its gradient comes back averaged, in shards."""
    from torch.distributed.tensor import DTensor, Partial

    if not isinstance(weight, DTensor):
        return weight
    mesh = weight.device_mesh
    # summed and divided, not Partial("avg"): gloo has no average
    whole = weight.full_tensor(grad_placements=[Partial()] * mesh.ndim)
    if whole.requires_grad:
        whole.register_hook(lambda grad: grad / mesh.size())
    return whole


class _LinearLogprob(torch.autograd.Function):
    """hidden [T, H], weight [V, H], labels [T], scale [T] -> log-prob [T] and entropy [T] (empty if not wanted)."""

    @staticmethod
    def forward(ctx: Any, hidden, weight, labels, scale, forbidden, plan, entropy):
        tiles = _Tiles(hidden, weight, labels, scale, forbidden, plan, entropy)
        logp, logsum, mean = tiles.reduce()
        ctx.save_for_backward(hidden, weight, labels, scale, forbidden, logsum, mean)
        ctx.plan, ctx.entropy = plan, entropy
        ctx.set_materialize_grads(False)
        return logp, logsum - mean if entropy else mean

    @staticmethod
    def backward(ctx: Any, d_logp: Tensor | None, d_entropy: Tensor | None):
        if torch.is_grad_enabled():  # create_graph=True: our result would pass for a constant
            raise RuntimeError("linear_logprob has no second derivative: take its gradient without create_graph")
        hidden, weight, labels, scale, forbidden, logsum, mean = ctx.saved_tensors
        if d_logp is None and (d_entropy is None or not ctx.entropy):
            return (None,) * 7
        tiles = _Tiles(hidden, weight, labels, scale, forbidden, ctx.plan, ctx.entropy and d_entropy is not None)
        d_logp = torch.zeros_like(logsum) if d_logp is None else d_logp
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        return *tiles.gradients(d_logp, d_entropy, logsum, mean, needs_hidden, needs_weight), *(None,) * 5


class _Tiles:
    """The passes over tiles of logits z = scale hidden weight^T. Two buffers, reused by every tile."""

    def __init__(self, hidden, weight, labels, scale, forbidden, plan: TilePlan, entropy: bool) -> None:
        self.weight, self.labels, self.scale, self.forbidden = weight, labels, scale, forbidden
        self.plan, self.entropy = plan, entropy
        self.upcast = weight.dtype.itemsize < 4 and weight.device.type == "cpu"  # no fast low-precision product there
        self.dtype = torch.float32 if self.upcast else weight.dtype
        self.accumulator = torch.promote_types(torch.float32, weight.dtype)
        self.hidden, self.hidden_dtype = hidden.to(self.dtype), hidden.dtype
        area = plan.rows * plan.words
        self.buffers = [torch.empty(area, dtype=self.accumulator, device=hidden.device) for _ in range(1 + entropy)]

    def words(self):
        """(first word, weight tile) over the vocabulary."""
        for start in range(0, len(self.weight), self.plan.words):
            tile = self.weight[start : start + self.plan.words]
            yield start, tile.float() if self.upcast else tile

    def rows(self):
        """Slices of rows."""
        for start in range(0, len(self.labels), self.plan.rows):
            yield slice(start, min(start + self.plan.rows, len(self.labels)))

    def logits(self, rows: slice, start: int, tile: Tensor) -> Tensor:
        """z of a tile [r, w], in the first buffer."""
        hidden = self.hidden[rows]
        z = self.buffers[0][: len(hidden) * len(tile)].view(len(hidden), len(tile))
        if self.dtype == z.dtype:
            torch.mm(hidden, tile.t(), out=z)
        else:
            z.copy_(torch.mm(hidden, tile.t()))
        z.mul_(self.scale[rows, None])
        if self.forbidden is not None:
            z.index_fill_(1, self._forbidden_columns(start, tile), FORBIDDEN)
        return z

    def _forbidden_columns(self, start: int, tile: Tensor) -> Tensor:
        return self.forbidden[(self.forbidden >= start) & (self.forbidden < start + len(tile))] - start

    def other(self, like: Tensor) -> Tensor:
        """The second buffer, shaped like a tile."""
        return self.buffers[1][: like.numel()].view(like.shape)

    def label_column(self, rows: slice, start: int, tile: Tensor) -> tuple[Tensor, Tensor]:
        """(rows of the slice whose label is in the tile as 0/1 [r], its column, 0 for the others [r])."""
        column = self.labels[rows] - start
        inside = (column >= 0) & (column < len(tile))
        return inside, column.clamp(0, len(tile) - 1)

    @torch.no_grad()
    def reduce(self) -> tuple[Tensor, Tensor, Tensor]:
        """log-prob of the labels, log-sum-exp, and mean logit (empty without entropy), all [T]; online over words."""
        count, new = len(self.labels), self.buffers[0].new_empty
        top, total = new(count).fill_(-torch.inf), new(count).zero_()
        picked, weighted = new(count).zero_(), new(count if self.entropy else 0).zero_()
        with torch.autocast(self.weight.device.type, enabled=False):
            for rows in self.rows():
                for start, tile in self.words():
                    z = self.logits(rows, start, tile)
                    inside, column = self.label_column(rows, start, tile)
                    picked[rows] += z.gather(1, column[:, None]).squeeze(1) * inside
                    higher = torch.maximum(top[rows], z.amax(1))
                    shrink = (top[rows] - higher).exp_()
                    if self.entropy:
                        p = torch.sub(z, higher[:, None], out=self.other(z)).exp_()
                        total[rows] = total[rows] * shrink + p.sum(1)
                        weighted[rows] = weighted[rows] * shrink + p.mul_(z).sum(1)
                    else:
                        total[rows] = total[rows] * shrink + z.sub_(higher[:, None]).exp_().sum(1)
                    top[rows] = higher
        logsum = top + total.log()
        return picked - logsum, logsum, weighted / total if self.entropy else weighted

    @torch.no_grad()
    def gradients(self, d_logp, d_entropy, logsum, mean, needs_hidden, needs_weight):
        """Gradients of hidden and weight: dz = d_logp (1[label] - p) - d_entropy p (z - E z)."""
        d_hidden = torch.zeros_like(self.hidden, dtype=self.accumulator) if needs_hidden else None
        d_weight = torch.zeros_like(self.weight, dtype=self.accumulator) if needs_weight else None
        with torch.autocast(self.weight.device.type, enabled=False):
            for rows in self.rows():
                for start, tile in self.words():
                    dz = self._logit_gradient(rows, start, tile, d_logp, d_entropy, logsum, mean)
                    if d_hidden is not None:
                        _add_product(d_hidden[rows], dz, tile)
                    if d_weight is not None:
                        _add_product(d_weight[start : start + len(tile)], dz.t(), self.hidden[rows])
        return (
            None if d_hidden is None else d_hidden.to(self.hidden_dtype),
            None if d_weight is None else d_weight.to(self.weight.dtype),
        )

    def _logit_gradient(self, rows, start, tile, d_logp, d_entropy, logsum, mean) -> Tensor:
        z = self.logits(rows, start, tile)
        inside, column = self.label_column(rows, start, tile)
        if self.entropy:
            pull = torch.sub(z, mean[rows, None], out=self.other(z)).mul_(d_entropy[rows, None])
            pull.add_(d_logp[rows, None])
            dz = z.sub_(logsum[rows, None]).exp_().mul_(pull).neg_()
        else:
            dz = z.sub_(logsum[rows, None]).exp_().mul_(-d_logp[rows, None])
        dz.scatter_add_(1, column[:, None], (d_logp[rows] * inside)[:, None])
        if self.forbidden is not None:
            dz.index_fill_(1, self._forbidden_columns(start, tile), 0.0)
        return dz.mul_(self.scale[rows, None]).to(self.dtype)


def _add_product(into: Tensor, left: Tensor, right: Tensor) -> None:
    """into += left right, in `into`'s dtype."""
    if into.dtype == left.dtype:
        into.addmm_(left, right)
    else:
        into.add_(left @ right)
