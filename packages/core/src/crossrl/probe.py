"""One rank's part of the start-up gate: try the real engine on a few samples, and leave it exactly as it was.

Nothing here knows an algorithm's options: a `Spy` in the algorithm's place records what passes between it and the
engine. All ranks run the same calls in the same order whatever they find, since the calls hold collectives.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from crossrl.engine import DiffusionEngine
from crossrl.spy import Bench, Draw, undisturbed
from crossrl.types import (
    Check,
    Media,
    Metrics,
    Prompt,
    RankReport,
    RolloutRequest,
    Rows,
    SampleKey,
    Sampling,
    UpdatePlan,
)

ODE_STEPS = 4  # of the deterministic sampler, at most
COMPARED_ROWS = 8  # trained again in another micro-batch, at most; `Algorithm.rows_together` of them or 1


@dataclass(frozen=True, slots=True)
class Limits:
    """What rounding may do; relative root mean squares, but `ratio` and `bias` absolute. About 10 times what it does.

    The ratio's are what a clip range of 1e-4 can bear: a bias of 1e-4 would clip every sample on one side.
    """

    ratio: float  # |rho - 1|
    bias: float  # |mean log rho| of a noise level
    velocity: float  # training against rollout
    sample: float  # after all steps
    loss: float  # of a row, against the largest
    gradient: float  # its norm


LIMITS = {
    "float32": Limits(ratio=1e-5, bias=5e-6, velocity=1e-5, sample=1e-4, loss=1e-4, gradient=1e-4),
    "bfloat16": Limits(ratio=1e-4, bias=5e-5, velocity=2e-2, sample=1e-1, loss=2e-2, gradient=1e-1),
}
TRAIN_IS_ROLLOUT = (
    "equal batch.rollout_micro and batch.update_micro, or model.dtype=float32; a backend must draw and train through "
    "the same predict, with the timestep 1000 sigma as a float"
)
KERNELS = "a kernel whose result depends on its neighbours in the batch: try another model.attention, or model.dtype"


def examine(engine: DiffusionEngine, request: RolloutRequest) -> RankReport:
    """Check this rank's engine on the samples of `request` (a few); all ranks must call it together."""
    start = time.monotonic()
    with undisturbed(engine):
        probe = _Probe(engine, request)
        videos = probe.run()
        forwards = float(engine.take_forwards())
    media = Media(request.keys, videos, engine.config.video.fps, {}) if engine.data_parallel.primary else None
    return RankReport(probe.checks, probe.by_sigma, media, forwards, time.monotonic() - start)


class _Probe(Bench):
    """The checks of one rank, in the order of what causes what."""

    def __init__(self, engine: DiffusionEngine, request: RolloutRequest) -> None:
        super().__init__(engine)
        self.request, self.limits = request, LIMITS[engine.config.model.dtype]
        self.checks: list[Check] = []
        self.by_sigma: list[Metrics] = []

    def run(self) -> np.ndarray:
        """All checks; the videos of the request."""
        self._parameters()
        videos = self.draw(self.request)
        self.drawn = self.spy.draws
        self.latents = torch.cat([draw.latents for draw in self.drawn])
        self._training()
        self._groups()
        self._sampler()
        self._decoder(videos)
        return videos

    def _add(self, name: str, value: float | str, limit: float | str, ok: bool, cause: str, bad: str = "fail") -> None:
        self.checks.append(Check(name, value, limit, "ok" if ok else bad, "" if ok else cause))

    def _skip(self, name: str, why: str) -> None:
        self.checks.append(Check(name, "-", "-", "skip", why))

    def _parameters(self) -> None:
        named = list(self.engine.module.named_parameters())
        bad = self.anywhere([~_local(p).isfinite().all() for _, p in named])
        names = [name for (name, _), is_bad in zip(named, bad, strict=True) if is_bad]
        cause = f"{_some(names)}: the weights of model.path (or of the checkpoint in resume) are damaged"
        self._add("weights are finite", f"{len(names)} of {len(named)} not", "0", not names, cause)

    def _rows(self) -> tuple[Rows, tuple[SampleKey, ...]]:
        """The training rows of the request's samples with advantages +1 and -1 in turn, or of as many clips."""
        request, place, algorithm = self.request, self.engine.data_parallel, self.spy
        keys, more = request.keys, ()
        if algorithm.needs.clips:
            n = min(len(keys), self.config.data.sft_clips // place.size)
            indices = range(place.rank * n, place.rank * n + n)
            self.engine.load_clips(request.step, self.config.data.sft, indices)
            keys = tuple(SampleKey(Prompt(f"clip/{i}", ""), 0) for i in indices)
        else:
            scores = np.random.default_rng(0).random((1, self.config.batch.samples, len(self.config.rewards)))
            more = algorithm.advantages(scores, np.ones(scores.shape[:2], bool)).values.shape[2:]
        signs = [1.0 - 2.0 * (key.index % 2) for key in keys]
        advantages = tuple((sign,) * more[0] if more else sign for sign in signs)
        plan = UpdatePlan(request.step, request.seed, keys, advantages, len(keys))
        trajectory, values, _ = self.engine.held.share(plan)
        return algorithm.rows(trajectory, values, request.seed, request.step), trajectory.keys

    def _training(self) -> None:
        rows, keys = self._rows()
        together = getattr(self.spy, "rows_together", 1)
        few = rows.take(_spread(rows.sigma, together))
        with self.engine._on_device(optimizer=False):
            seen = self.train(rows, keys)
            self._finite(seen, rows, keys)
            as_configured = self.train(few, keys)
            norm = self.engine.clip_grad_norm(self.config.optimizer.max_grad_norm)
            alone = self.train(few, keys, micro=together)
            norm_alone = self.engine.clip_grad_norm(self.config.optimizer.max_grad_norm)
            self.engine.optimizer.zero_grad()
            drawn = self._velocity_of_a_rollout(few, keys)
        self._ratio(rows, seen)
        apart, limit = _apart(as_configured["velocity"], drawn), self.limits.velocity
        self._add("velocity: training = rollout", apart, limit, apart <= limit, TRAIN_IS_ROLLOUT)
        loss = as_configured["loss"]
        apart = float((alone["loss"] - loss).abs().max() / loss.abs().max().clamp(min=1e-30))
        cause = f"losses depend on batch.update_micro: {KERNELS}"
        self._add("loss: micro-batch 1 = update_micro", apart, self.limits.loss, apart <= self.limits.loss, cause)
        apart, limit = abs(norm_alone - norm) / max(norm, 1e-30), self.limits.gradient
        cause = f"gradients depend on batch.update_micro: {KERNELS}"
        self._add("gradient: micro-batch 1 = update_micro", apart, limit, apart <= limit, cause)

    @torch.no_grad()
    def _velocity_of_a_rollout(self, rows: Rows, keys: Sequence[SampleKey]) -> torch.Tensor:
        """The policy's velocity at `rows` as a rollout would call for it."""
        owners, micro = [keys[i] for i in rows.owner.tolist()], self.config.batch.rollout_micro
        guidance = self.config.sampling.guidance
        return torch.cat(
            [
                self.engine.velocity(
                    rows.x[i : i + micro], rows.sigma[i : i + micro], keys=owners[i : i + micro], guidance=guidance
                )
                for i in range(0, len(rows), micro)
            ]
        )

    def _finite(self, seen: dict[str, torch.Tensor], rows: Rows, keys: Sequence[SampleKey]) -> None:
        """Loss and gradients are finite and reach what trains; must follow the backward."""
        named = [(name, p) for name, p in self.engine.module.named_parameters() if p.requires_grad]
        grads = [torch.zeros(1) if p.grad is None else _local(p.grad) for _, p in named]
        flags = [
            ~seen["loss"].isfinite().all(),
            *[~g.isfinite().all() for g in grads],
            *[(g != 0).any() for g in grads],
        ]
        bad_loss, *both = self.anywhere(flags)
        bad, alive = both[: len(named)], both[len(named) :]
        names = [name for (name, _), is_bad in zip(named, bad, strict=True) if is_bad]
        where = ""
        if bad_loss or names:
            found = self._first_bad_module(rows, keys, seen["loss"])
            where = f"; first not finite in the forward: {found}" if found else "; the forward itself is finite"
        dtype = "activations overflow or the weights are damaged: model.dtype=float32, or check model.path"
        self._add("loss is finite", "no" if bad_loss else "yes", "yes", not bad_loss, dtype + where)
        value = f"{len(names)} of {len(named)} not"
        self._add("gradients are finite", value, "0", not names, f"{_some(names)}{where}; {dtype}")
        self._reached([name for name, _ in named], alive)

    def _first_bad_module(self, rows: Rows, keys: Sequence[SampleKey], loss: torch.Tensor) -> str | None:
        """The module whose output is the first that is not finite, in the order of execution, on a finite input."""
        row = (rows.x.flatten(1).isfinite().all(1) & ~loss.isfinite().cpu()).nonzero().flatten()[:1]
        x, sigma = (rows.x[row], rows.sigma[row]) if len(row) else (t[:1] for t in self.drawn[0].calls[0][:2])
        key = keys[rows.owner[row]] if len(row) else self.request.keys[0]
        found: list[str] = []

        def look(name: str) -> Any:
            def hook(_module: torch.nn.Module, _inputs: Any, output: Any) -> None:
                outputs = output if isinstance(output, tuple | list) else (output,)
                if not found and any(torch.is_tensor(t) and not bool(t.isfinite().all()) for t in outputs):
                    found.append(name or type(_module).__name__)

            return hook

        hooks = [module.register_forward_hook(look(name)) for name, module in self.engine.module.named_modules()]
        try:
            with torch.no_grad():
                self.engine.velocity(x, sigma, keys=[key])
        finally:
            for hook in hooks:
                hook.remove()
        return found[0] if found else None

    def _reached(self, names: list[str], alive: list[bool]) -> None:
        lora = self.config.model.lora
        reached = {_pair(name) for name, is_alive in zip(names, alive, strict=True) if is_alive}
        # a fresh adapter's B is zero, hence so is the gradient of its A: one of the two must be reached
        dead = [n for n, is_alive in zip(names, alive, strict=True) if not is_alive and _pair(n) not in reached]
        value = f"{len(names) - len(dead)} of {len(names)}"
        if lora is not None:
            cause = f"no gradient reaches {_some(dead)}" if names else "no adapter was bound"
            cause += f": model.lora.targets={list(lora.targets)} must name layers that the forward uses"
            self._add("adapters are bound", value, "all", bool(names) and not dead, cause)
            return
        cause = f"no gradient reaches {_some(dead)} ({len(dead) / max(1, len(names)):.0%} of the parameters)"
        bad = "fail" if len(dead) == len(names) else "warn"
        self._add("gradients reach the weights", value, "all", not dead, cause, bad=bad)

    def _ratio(self, rows: Rows, seen: dict[str, torch.Tensor]) -> None:
        names = ("ratio is 1", "log-ratio has no bias", "kappa is below its spread")
        stale = self.spy.needs.old is not None and self.engine.updates > 0
        if "log_ratio" not in seen or stale:
            why = "drawn by an older policy" if stale else "the loss of this algorithm has no log_ratio"
            for name in names:
                self._skip(name, why)
            return
        log_ratio, sigma = seen["log_ratio"].cpu(), rows.sigma
        for level in sigma.unique().flip(0):
            here = log_ratio[sigma == level]
            bias = float(here.mean())
            self.by_sigma.append(
                {
                    "sigma": float(level),
                    "rows": float(len(here)),
                    "ratio_deviation": float((here.exp() - 1).abs().max()),
                    "bias": bias,
                    "kappa": math.sqrt(max(0.0, -2 * bias)) if math.isfinite(bias) else bias,
                }
            )
        spread = 2 / math.sqrt(rows.x[0].numel())  # of kappa: above it, a bias exceeds the scatter of log rho
        limits = (self.limits.ratio, self.limits.bias, spread)
        for name, key, limit in zip(names, ("ratio_deviation", "bias", "kappa"), limits, strict=True):
            worst = max(self.by_sigma, key=lambda row: math.inf if math.isnan(row[key]) else abs(row[key]))
            ok = abs(worst[key]) <= limit
            cause = f"rollout and training disagree, most at sigma {worst['sigma']:.3g}: {TRAIN_IS_ROLLOUT}"
            self._add(name, worst[key], limit, ok, cause, bad="warn" if key == "kappa" else "fail")

    @torch.no_grad()
    def _groups(self) -> None:
        """Samples of a group differ, begin as the algorithm asked, and listen to their prompt."""
        keys = self.request.keys
        starts = torch.cat([draw.calls[0][0] for draw in self.drawn])
        shared = bool(self.drawn[0].noise) and self.drawn[0].noise[0][1]
        pairs = [(i, j) for j in range(len(keys)) for i in range(j) if keys[i].prompt == keys[j].prompt]
        if not pairs:
            self._skip("samples of a group differ", "a group has one sample")
        else:
            spread = float(np.min([_apart(self.latents[i], self.latents[j]) for i, j in pairs]))
            cause = (
                "the samples of a group are the same: no advantage can come of it. Raise the sampler's noise level "
                "(algorithm.*), or the algorithm ignores the sample's index in its noise"
            )
            self._add("samples of a group differ", spread, "> 1e-3", spread > 1e-3, cause)
            begin = {bool(torch.equal(starts[i], starts[j])) for i, j in pairs}
            value = "mixed" if len(begin) > 1 else "one" if begin == {True} else "own"
            wanted = "one" if shared else "own"
            cause = "the noise of the first step is not that which the algorithm asked for"
            self._add("initial state of a group", value, wanted, value == wanted, cause)
        other = next((k for k in keys if k.prompt.text != keys[0].prompt.text), None)
        if other is None:
            self._skip("the prompt is heard", "a rank has one prompt")
            return
        with self.engine._on_device(optimizer=False):
            x, sigma, _ = (t[:1] for t in self.drawn[0].calls[0])
            mine, theirs = (self.engine.velocity(x, sigma, keys=[key]) for key in (keys[0], other))
        heard = _apart(mine, theirs)
        cause = "two prompts give the same velocity: text encoder or cross-attention are broken; check model.path"
        self._add("the prompt is heard", heard, "> 1e-6", heard > 1e-6, cause, bad="warn")

    def _sampler(self) -> None:
        """Micro-batch 1 draws the same samples; without noise the sampler integrates the ODE, each time alike."""
        limit, request = self.limits.sample, self.request
        pair = request.keys[:2]
        self.draw(dataclasses.replace(request, keys=pair, keep_trajectory=False), micro=1)
        apart = _apart(torch.cat([draw.latents for draw in self.spy.draws]), self.latents[: len(pair)])
        cause = f"samples depend on batch.rollout_micro or on when they are drawn: {KERNELS}"
        self._add("samples: micro-batch 1 = rollout_micro", apart, limit, apart <= limit, cause)

        ends = (request.keys[0], request.keys[-1]) if len(request.keys) > 1 else request.keys
        how = dataclasses.replace(request.sampling, stochastic=False, steps=min(ODE_STEPS, request.sampling.steps))
        plain = dataclasses.replace(request, keys=ends, sampling=how, keep_trajectory=False, weights="policy")
        self.draw(plain)
        first = self.spy.draws
        latents = torch.cat([draw.latents for draw in first])
        self.draw(dataclasses.replace(plain, keys=ends[::-1]), micro=1)
        again = torch.cat([draw.latents for draw in self.spy.draws[::-1]])
        apart, tags = _apart(again, latents), max(len(draw.noise) for draw in first)
        cause = f"the sampler draws at random with stochastic=False ({tags} noises), or {KERNELS}"
        self._add("without noise: repeats", apart, limit, apart <= limit and tags <= 1, cause)
        apart = float(np.max([_off_the_ode(draw, how) for draw in first]))
        cause = "with stochastic=False the sampler is not Euler's on sigma = s u / (1 + (s - 1) u): evaluation differs"
        limit = self.limits.velocity
        self._add("without noise: is the ODE", apart, limit, apart <= limit, cause, bad="warn")

    @torch.no_grad()
    def _decoder(self, videos: np.ndarray) -> None:
        pair = self.latents[[0, -1]]
        alone = np.concatenate([self.engine.family.decode(part) for part in pair.split(1)])
        apart = float(np.abs(alone.astype(int) - videos[[0, -1]].astype(int)).max())
        cause = "videos depend on batch.decode_micro: the family's decoder mixes the videos of a call"
        self._add("decoding: one by one = decode_micro", apart, 1.0, apart <= 1, cause)


def _spread(sigma: torch.Tensor, together: int) -> torch.Tensor:
    """Indices of at most COMPARED_ROWS rows, of all noise levels; `together` neighbours stay neighbours."""
    blocks = sigma[: len(sigma) // together * together : together].argsort()
    chosen = blocks[torch.linspace(0, len(blocks) - 1, min(len(blocks), COMPARED_ROWS // together)).long()]
    return (chosen[:, None] * together + torch.arange(together)).flatten()


def _off_the_ode(draw: Draw, how: Sampling) -> float:
    """How far the recorded states are from Euler's steps over the recorded velocities; inf for another grid."""
    u = torch.linspace(1, 0, how.steps + 1, dtype=torch.float64)
    grid = how.shift * u / (1 + (how.shift - 1) * u)
    if len(draw.calls) != how.steps:
        return math.inf
    after = [x for x, _, _ in draw.calls[1:]] + [draw.latents]
    apart = []
    for k, ((x, sigma, velocity), state) in enumerate(zip(draw.calls, after, strict=True)):
        if not torch.allclose(sigma.double().cpu(), grid[k], rtol=1e-5, atol=0):
            return math.inf
        apart.append(_apart(x.to(velocity) - float(grid[k] - grid[k + 1]) * velocity, state.to(velocity)))
    return float(np.max(apart))  # NaN if one is


def _apart(a: torch.Tensor, b: torch.Tensor) -> float:
    """Root mean square of a - b over that of b; NaN if either is not finite."""
    a, b = a.double().cpu(), b.double().cpu()
    return float((a - b).square().mean().sqrt() / b.square().mean().sqrt().clamp(min=1e-30))


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor that may be sharded."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _pair(name: str) -> str:
    """One name for both matrices of an adapter."""
    return name.replace("lora_A", "lora_*").replace("lora_B", "lora_*")


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
