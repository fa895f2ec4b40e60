"""The Ray worker: verl's TrainingWorker with a rollout, and gloo where there is no accelerator."""

from __future__ import annotations

import resource
from pathlib import Path

import ray
import torch
from verl.single_controller.base.decorator import Dispatch, register
from verl.utils.device import get_device_name
from verl.workers.config import TrainingWorkerConfig
from verl.workers.engine_workers import TrainingWorker

from crossrl import env
from crossrl.local import draw
from crossrl.probe import examine
from crossrl.types import Media, RankReport, RankStats, RolloutRequest, UpdatePlan


class RLWorker(TrainingWorker):
    """One rank of the policy: draws samples, keeps their trajectories, trains on them."""

    def __init__(self, config: TrainingWorkerConfig) -> None:
        if get_device_name() == "cpu":  # verl would ask for "cpu:gloo,cpu:gloo", which torch refuses
            share = max(1, env.cpu_count() // env.local_world_size())
            torch.set_num_threads(config.engine_config.run.parallel.cpu_threads or share)
            torch.distributed.init_process_group("gloo")
        super().__init__(config)
        self.inner = self.engine.engine

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def place(self) -> tuple[int, bool]:
        """(data-parallel rank, whether this rank answers for its sequence-parallel group)."""
        return self.inner.data_parallel.rank, self.inner.data_parallel.primary

    @register(dispatch_mode=Dispatch.ALL_TO_ALL, blocking=False)
    def rollout(self, request: RolloutRequest) -> Media:
        """Draw samples; the videos stay in the object store until a reward asks for them."""
        media = draw(self.inner, request)
        media.stats["peak_rss_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0
        return media

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def update(self, plan: UpdatePlan) -> RankStats:
        """One optimizer step."""
        return self.inner.update(plan)

    @register(dispatch_mode=Dispatch.ALL_TO_ALL, blocking=False)
    def gate(self, request: RolloutRequest) -> RankReport:
        """Try the engine; the videos stay in the object store, the report has a reference to them."""
        report = examine(self.inner, request)
        report.media = None if report.media is None else ray.put(report.media)
        return report

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def load_clips(self, step: int, source: str, indices: tuple[int, ...]) -> None:
        """Hold this rank's share of captioned clips."""
        place = self.inner.data_parallel
        share = len(indices) // place.size
        self.inner.load_clips(step, source, indices[place.rank * share : (place.rank + 1) * share])

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def save(self, folder: str) -> None:
        """Write this rank's part of a checkpoint."""
        self.inner.save_checkpoint(Path(folder))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def load(self, folder: str) -> None:
        """Read a checkpoint."""
        self.inner.load_checkpoint(Path(folder))
