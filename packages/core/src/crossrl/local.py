"""The loop's workers and job in one process: for tests, benchmarks and notebooks. A cluster runs `crossrl.verl`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from crossrl.engine import DiffusionEngine
from crossrl.probe import examine
from crossrl.types import Media, RankReport, RankStats, RolloutRequest, UpdatePlan


class LocalWorkers:
    """A `WorkerGroup` of this process's engine."""

    dp_size = 1

    def __init__(self, engine: DiffusionEngine) -> None:
        self.engine = engine

    def rollout(self, requests: Sequence[RolloutRequest]) -> list[Media]:
        """Draw now."""
        return [draw(self.engine, request) for request in requests]

    def update(self, plan: UpdatePlan) -> list[RankStats]:
        """One optimizer step."""
        return [self.engine.update(plan)]

    def fetch(self, handle: Media) -> Media:
        """It is here."""
        return handle

    def gate(self, requests: Sequence[RolloutRequest]) -> list[RankReport]:
        """Try the engine."""
        return [examine(self.engine, request) for request in requests]

    def load_clips(self, step: int, source: str, indices: Sequence[int]) -> None:
        """Hold captioned clips as samples of `step` (SFT)."""
        self.engine.load_clips(step, source, indices)

    def save(self, folder: Path) -> None:
        """Write the engine's checkpoint."""
        self.engine.save_checkpoint(folder)

    def load(self, folder: Path) -> None:
        """Read the engine's checkpoint."""
        self.engine.load_checkpoint(folder)

    def export(self, folder: Path, slot: str) -> None:
        """Write weights for diffusers."""
        self.engine.export(folder, slot)


def draw(engine: DiffusionEngine, request: RolloutRequest) -> Media:
    """One request as media with the engine's stage seconds and counts."""
    videos = engine.rollout(request)
    stats = {f"{k}_s": v for k, v in engine.take_seconds().items()} | {"forwards": float(engine.take_forwards())}
    return Media(request.keys, videos, engine.config.video.fps, stats)
