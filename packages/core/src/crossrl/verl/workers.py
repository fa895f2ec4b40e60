"""The loop's workers and rewards as Ray actors; every edge is checked for stray tensors and every wait has an end."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.utils.device import get_device_name

from crossrl.config import RunConfig
from crossrl.errors import WorkerError
from crossrl.leaks import refuse_tensors
from crossrl.rewards import RewardSet, Scored
from crossrl.types import Media, RankReport, RankStats, RolloutRequest, UpdatePlan
from crossrl.verl.config import CrossRLEngineConfig, CrossRLModelConfig
from crossrl.verl.worker import RLWorker, TrainingWorkerConfig


class RayWorkers:
    """A `WorkerGroup` over verl's RayWorkerGroup of `RLWorker`s."""

    def __init__(self, engine_config: CrossRLEngineConfig) -> None:
        self.timeout_s = engine_config.run.step_timeout_s
        on_cpu = get_device_name() == "cpu"
        pool = RayResourcePool(
            [engine_config.workers_per_node] * engine_config.nodes, use_gpu=not on_cpu, max_colocate_count=1
        )
        worker_config = TrainingWorkerConfig(
            model_type="diffusion", model_config=CrossRLModelConfig(), engine_config=engine_config
        )
        actor = RayClassWithInitArgs(ray.remote(RLWorker), config=worker_config)
        self.group = RayWorkerGroup(pool, actor, device_name=get_device_name())
        places = self.group.place()
        self.primary = [primary for _, primary in places]
        self.dp_ranks = [rank for rank, _ in places]
        self.dp_size = max(self.dp_ranks) + 1

    def rollout(self, requests: Sequence[RolloutRequest]) -> list[ray.ObjectRef]:
        """Start the requests; a reference to each data-parallel rank's media."""
        refuse_tensors(requests, "rollout request")
        refs = self.group.rollout([requests[rank] for rank in self.dp_ranks])
        return [ref for ref, primary in zip(refs, self.primary, strict=True) if primary]

    def update(self, plan: UpdatePlan) -> list[RankStats]:
        """One optimizer step."""
        refuse_tensors(plan, "update plan")
        stats = self._wait(self.group.update(plan), "update")
        return [s for s, primary in zip(stats, self.primary, strict=True) if primary]

    def fetch(self, handle: ray.ObjectRef) -> Media:
        """Bring media to the driver."""
        return self._wait([handle], "rollout")[0]

    def gate(self, requests: Sequence[RolloutRequest]) -> list[RankReport]:
        """Try all ranks' engines together; a report of every rank."""
        refuse_tensors(requests, "gate request")
        return self._wait(self.group.gate([requests[rank] for rank in self.dp_ranks]), "start-up gate")

    def load_clips(self, step: int, source: str, indices: Sequence[int]) -> None:
        """Each data-parallel rank holds its share."""
        self._wait(self.group.load_clips(step, source, tuple(indices)), "load_clips")

    def save(self, folder: Path) -> None:
        """All ranks write."""
        self._wait(self.group.save(str(folder)), "save")

    def load(self, folder: Path) -> None:
        """All ranks read."""
        self._wait(self.group.load(str(folder)), "load")

    def _wait(self, refs: list[ray.ObjectRef], what: str) -> list[Any]:
        return wait(refs, self.timeout_s, what)


def wait(refs: list[ray.ObjectRef], timeout_s: float, what: str) -> list[Any]:
    """`ray.get` with an end and an error that says which stage hung or which worker died."""
    try:
        return ray.get(refs, timeout=timeout_s)
    except ray.exceptions.GetTimeoutError as error:
        raise WorkerError(f"{what} did not finish within step_timeout_s={timeout_s:g}", where=what) from error
    except ray.exceptions.RayActorError as error:
        raise WorkerError(
            _casualty(str(error)),
            where=what,
            fix="look for an out-of-memory kill in the log; resume=auto goes on from the last checkpoint",
        ) from error


def _casualty(text: str) -> str:
    """Ray's report of a dead actor in a line: who, where, why."""
    facts = dict(re.findall(r"^\s*(class_name|pid|ip): (.+)$", text, re.MULTILINE))
    who = "worker {class_name} (pid {pid} on {ip}) died".format_map({"class_name": "?", "pid": "?", "ip": "?"} | facts)
    why = re.search(r"Worker exit detail: ([^.]*\.)", text)
    return f"{who}: {why[1] if why else ' '.join(text.split())}"


@ray.remote
class _RewardActor:
    """Scores media in a process of its own."""

    def __init__(self, config: RunConfig) -> None:
        self.rewards = RewardSet.from_config(config)

    def score(self, media: Media) -> Scored:
        """Score; Ray has fetched the media from where they were made."""
        return self.rewards.score(media)


class RayRewards:
    """A `RewardRuntime` of Ray actors, fed by reference in turn: scoring overlaps the rollout."""

    def __init__(self, config: RunConfig) -> None:
        self.timeout_s = config.reward_runtime.timeout_s + config.step_timeout_s
        actors = [_RewardActor.options(num_cpus=0).remote(config) for _ in range(config.reward_runtime.workers)]
        self.turn = itertools.cycle(actors)

    def submit(self, handle: ray.ObjectRef) -> ray.ObjectRef:
        """Start scoring as soon as the media exist."""
        return next(self.turn).score.remote(handle)

    def collect(self, futures: Sequence[ray.ObjectRef]) -> list[Scored]:
        """Wait for all."""
        return wait(list(futures), self.timeout_s, "rollout and rewards")
