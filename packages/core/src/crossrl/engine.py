"""The engine that every diffusion backend shares: rollout and update on one module, in one precision, on one code path.

A backend supplies the abstract methods at the top (build, predict, weight slots, backward, clip, move, save, load,
export, data-parallel place); this class owns micro-batching, accumulation, normalisation, text cache and metrics.
"""

from __future__ import annotations

import json
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch

from crossrl.cache import ClipCache, Condition, HeldSamples, TextCache
from crossrl.config import RunConfig
from crossrl.errors import CheckpointError
from crossrl.noise import Noise
from crossrl.protocols import Algorithm, ModelFamily
from crossrl.schedule import lr_at
from crossrl.types import Metrics, RankStats, RolloutRequest, Rows, SampleKey, Trajectory, UpdatePlan


@dataclass(frozen=True, slots=True)
class DataParallel:
    """This rank's place among those that see different samples."""

    rank: int = 0
    size: int = 1
    group: torch.distributed.ProcessGroup | None = None
    primary: bool = True  # False on the further ranks of a sequence-parallel group: same samples, same results


class DiffusionEngine(ABC):
    """One rank's model, optimizer and held trajectories."""

    module: torch.nn.Module
    optimizer: torch.optim.Optimizer

    def __init__(self, config: RunConfig, family: ModelFamily, algorithm: Algorithm, device: str) -> None:
        self.config, self.family, self.algorithm, self.device = config, family, algorithm, device
        self.updates = 0  # optimizer steps done
        self.forwards = 0  # network evaluations of single samples, backward ones included
        self.seconds: Metrics = {}  # by stage, since the last `take_seconds`
        self.held = HeldSamples()
        self._texts = TextCache(family)
        self._clips = ClipCache(family, config.batch.decode_micro)
        self._offloaded = False

    @property
    def slots(self) -> tuple[str, ...]:
        """The weight slots this run needs besides the policy's; `build` makes each a copy of the policy."""
        needs, ema = self.algorithm.needs, self.config.model.ema is not None
        return tuple(n for n, wanted in (("ema", ema), ("old", needs.old), ("reference", needs.reference)) if wanted)

    # ---- what a backend supplies -------------------------------------------------------------------------------

    @abstractmethod
    def build(self) -> None:
        """Make `module` (sharded, weights loaded, on `device`) and `optimizer`, with a slot for all that is needed."""

    @property
    @abstractmethod
    def data_parallel(self) -> DataParallel:
        """Rank, size and group of data parallelism."""

    @abstractmethod
    def predict(self, x: torch.Tensor, sigma: torch.Tensor, condition: Condition) -> torch.Tensor:
        """Velocity [n, C, F, H, W] fp32 at x fp32, sigma [n] fp32 and condition tensors [n, ...], all on `device`."""

    @abstractmethod
    def slot(self, name: str) -> AbstractContextManager[None]:
        """Within it, `predict` uses the weights called "policy", "ema", "old" or "reference"."""

    @abstractmethod
    def blend_slot(self, name: str, decay: float) -> None:
        """slot <- decay * slot + (1 - decay) * policy."""

    @abstractmethod
    def backward(self, loss: torch.Tensor, last: bool) -> None:
        """Accumulate gradients; reduce them over ranks (mean) at the `last` micro-batch of a step."""

    @abstractmethod
    def clip_grad_norm(self, max_norm: float) -> float:
        """Clip; the global norm before clipping, the same on every rank."""

    @abstractmethod
    def move(self, device: str, optimizer: bool) -> None:
        """Move the module, and the optimizer state if `optimizer`, to "cpu" or to `self.device`."""

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Write all slots and the optimizer, sharded, all ranks together."""

    @abstractmethod
    def load(self, folder: Path) -> None:
        """Read what `save` wrote, at this or another world size."""

    @abstractmethod
    def export(self, folder: Path, slot: str = "policy") -> None:
        """Write a slot's full weights for diffusers: `transformer/` of the pipeline (or a PEFT folder for LoRA)."""

    # ---- rollout -----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def rollout(self, request: RolloutRequest) -> np.ndarray:
        """Draw the request's samples; uint8 videos [n, frames, height, width, 3]. Trajectories stay here."""
        batch, video = self.config.batch, self.config.video
        shape = self.family.latent_shape(video.frames, video.height, video.width)
        videos = []
        with self._on_device(optimizer=False), self.slot(request.weights):
            for start in range(0, len(request.keys), batch.rollout_micro):
                keys = request.keys[start : start + batch.rollout_micro]
                with self._timed("denoise"):
                    predict = partial(self.velocity, keys=keys, guidance=request.sampling.guidance)
                    noise = Noise(request.seed, request.step, keys, shape)
                    latents, trajectory = self.algorithm.sample(
                        predict, noise, keys, request.sampling, request.keep_trajectory
                    )
                if trajectory is not None:
                    self.held.add(trajectory, request.step)
                with self._timed("decode"):
                    videos += [self.family.decode(part) for part in latents.split(batch.decode_micro)]
        return np.concatenate(videos)

    @torch.no_grad()
    def load_clips(self, step: int, source: str, indices: Sequence[int]) -> None:
        """Hold captioned clips as clean samples of `step`; their prompts name the clips."""
        with self._on_device(optimizer=False), self._timed("encode"):
            clips = self._clips.rows(source, indices)
        keys = tuple(SampleKey(prompt, 0) for prompt, _ in clips)
        latents = torch.stack([latents for _, latents in clips])[:, None]
        self.held.add(Trajectory(keys, torch.empty(0), latents, {}), step)

    def velocity(
        self, x: torch.Tensor, sigma: torch.Tensor, *, keys: Sequence[SampleKey], guidance: float = 1.0
    ) -> torch.Tensor:
        """Velocity at (x [n, ...], sigma [n]) for the prompts of `keys` (n), with classifier-free guidance if not 1."""
        x, sigma = x.to(self.device), sigma.to(self.device)
        self.forwards += len(keys)
        conditional = self.predict(x, sigma, self.condition([k.prompt.text for k in keys]))
        if guidance == 1.0:
            return conditional
        self.forwards += len(keys)
        unconditional = self.predict(x, sigma, self.condition([""] * len(keys)))
        return unconditional + guidance * (conditional - unconditional)

    def condition(self, texts: Sequence[str]) -> Condition:
        """Condition tensors [n, ...] on the device."""
        return {name: t.to(self.device) for name, t in self._texts.rows(texts).items()}

    # ---- update ------------------------------------------------------------------------------------------------

    def update(self, plan: UpdatePlan) -> RankStats:
        """One optimizer step on the samples of `plan` that this rank holds (padded with zero weight)."""
        trajectory, advantages, real = self.held.share(plan)
        rows = self.algorithm.rows(trajectory, advantages, plan.seed, plan.step)
        rows_per_sample = len(rows) / len(trajectory.keys)
        weights = real[rows.owner] / (len(plan.keys) * rows_per_sample)
        stats = self.train_rows(rows, trajectory.keys, weights, plan.lr_scale, plan.skip_above)
        if plan.last and (decay := self.algorithm.needs.old) is not None:
            self.blend_slot("old", decay(plan.step))
        return stats

    def train_rows(
        self,
        rows: Rows,
        keys: Sequence[SampleKey],
        weights: torch.Tensor,
        lr_scale: float = 1.0,
        skip_above: float | None = None,
    ) -> RankStats:
        """Forward and backward over `rows` in micro-batches, then one optimizer step; see the methods for both."""
        with self._on_device(optimizer=True):
            with self._timed("forward_backward"):
                stats = self.accumulate(rows, keys, weights)
            with self._timed("optimizer"):
                stats.scalars |= self.optimizer_step(lr_scale, skip_above)
        stats.scalars |= {f"{stage}_s": seconds for stage, seconds in self.take_seconds().items()}
        stats.scalars["forwards"] = float(self.take_forwards())
        return stats

    def accumulate(
        self, rows: Rows, keys: Sequence[SampleKey], weights: torch.Tensor, backward: bool = True
    ) -> RankStats:
        """The weighted mean loss of `rows` and, if `backward`, its gradients; `rows.owner` points into `keys`.

        `weights` [n] sum to 1 over the rows of all ranks: the loss is their weighted mean, whatever the micro-batch.
        """
        stats, micro = RankStats(), self.config.batch.update_micro
        self.optimizer.zero_grad()
        for start in range(0, len(rows), micro):
            part, weight = rows.take(slice(start, start + micro)), weights[start : start + micro]
            velocity = self._velocities(part, keys)
            out = self.algorithm.loss(velocity, part)
            weight = weight.to(out.loss.device)
            if backward:  # FSDP averages gradients over ranks, the loss is a sum over ranks
                velocity["policy"].retain_grad()
                loss = (out.loss * weight).sum() * self.data_parallel.size
                self.backward(loss, last=start + micro >= len(rows))
                _add_pull(stats, velocity["policy"].grad, part.sigma)
            _gather(stats, {"loss": out.loss.detach(), **out.metrics}, weight)
        return stats

    def _velocities(self, part: Rows, keys: Sequence[SampleKey]) -> dict[str, torch.Tensor]:
        owners = [keys[i] for i in part.owner.tolist()]
        predict = partial(self.velocity, part.x, part.sigma, keys=owners, guidance=self.config.sampling.guidance)
        out = {}
        for name in ("old", "reference"):  # before the policy: its graph must be the last thing to touch the weights
            if getattr(self.algorithm.needs, name):
                with torch.no_grad(), self.slot(name):
                    out[name] = predict()
        out["policy"] = predict()
        return out

    def optimizer_step(self, lr_scale: float = 1.0, skip_above: float | None = None) -> Metrics:
        """Clip and step: grad_norm (before clipping), lr, skipped.

        The step is skipped, on all ranks, if the norm is not finite or larger than `skip_above`.
        """
        settings = self.config.optimizer
        norm = self.clip_grad_norm(settings.max_grad_norm)
        good = math.isfinite(norm) and (skip_above is None or norm <= skip_above)
        lr = lr_at(self.updates, settings) * lr_scale
        if good:
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            self.optimizer.step()
            self.updates += 1
            if self.config.model.ema is not None:
                self.blend_slot("ema", self.config.model.ema)
        self.optimizer.zero_grad()
        return {"grad_norm": norm, "lr": lr, "skipped": float(not good)}

    # ---- state -------------------------------------------------------------------------------------------------

    def save_checkpoint(self, folder: Path) -> None:
        """All that this rank must restore to go on bit for bit: backend state, update count, torch RNG."""
        self.save(folder)
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        state = {"updates": self.updates, "torch_rng": torch.get_rng_state().numpy().tobytes().hex()}
        (folder / f"engine-{rank:05d}.json").write_text(json.dumps(state))

    def load_checkpoint(self, folder: Path) -> None:
        """Restore `save_checkpoint`; a rank beyond the saved world size takes rank 0's counters."""
        self.load(folder)
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        path = folder / f"engine-{rank:05d}.json"
        path = path if path.exists() else folder / "engine-00000.json"
        if not path.exists():
            raise CheckpointError("engine state is missing", where=str(path))
        state = json.loads(path.read_text())
        self.updates = state["updates"]
        torch.set_rng_state(torch.frombuffer(bytearray.fromhex(state["torch_rng"]), dtype=torch.uint8))

    def take_seconds(self) -> Metrics:
        """Seconds by stage since the last call."""
        seconds, self.seconds = self.seconds, {}
        return seconds

    def take_forwards(self) -> int:
        """Network evaluations of single samples since the last call."""
        forwards, self.forwards = self.forwards, 0
        return forwards

    @contextmanager
    def _timed(self, stage: str) -> Iterator[None]:
        start = time.monotonic()
        yield
        self.seconds[stage] = self.seconds.get(stage, 0.0) + time.monotonic() - start

    @contextmanager
    def _on_device(self, optimizer: bool) -> Iterator[None]:
        """Bring what was offloaded to the device for the time of a phase."""
        offload = self.config.parallel.offload
        if offload == "none":
            yield
            return
        self.move(self.device, optimizer=optimizer and offload == "all")
        try:
            yield
        finally:
            self.move("cpu", optimizer=optimizer and offload == "all")


PULL_BINS = 4  # equal parts of sigma in [0, 1]


def _add_pull(stats: RankStats, gradient: torch.Tensor, sigma: torch.Tensor) -> None:
    """Add the norm of each row's d loss / d velocity to its bin of sigma: where in time the training signal acts."""
    norms = torch.linalg.vector_norm(gradient.flatten(1).float(), dim=1).cpu()
    bins = (sigma * PULL_BINS).long().clamp(max=PULL_BINS - 1)
    for i, total in enumerate(torch.zeros(PULL_BINS).index_add(0, bins, norms).tolist()):
        name = f"pull_{i / PULL_BINS:.2f}"
        stats.sums[name] = stats.sums.get(name, 0.0) + total


def _gather(stats: RankStats, per_row: dict[str, torch.Tensor], weight: torch.Tensor) -> None:
    """Add a micro-batch: weighted sums, and plain maxima (over rows that count) for names ending in `_max`."""
    for name, values in per_row.items():
        if name.endswith("_max"):
            value = float(values[weight > 0].max()) if bool((weight > 0).any()) else -math.inf
            stats.maxima[name] = max(stats.maxima.get(name, -math.inf), value)
        else:
            stats.sums[name] = stats.sums.get(name, 0.0) + float((values.double() * weight.double()).sum())
