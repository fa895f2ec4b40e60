"""`eval`, `export` and `check --gate`: one engine in this process, no Ray."""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path
from typing import Any

import torch

from crossrl import env
from crossrl.build import build_algorithm, build_engine
from crossrl.checkpoint import Checkpoints
from crossrl.config import RunConfig
from crossrl.data import PromptCursor, load_prompts
from crossrl.errors import ConfigError
from crossrl.evaluate import evaluate
from crossrl.gate import pass_gate
from crossrl.launch import prepare
from crossrl.layouts import DIFFUSERS, check_layout, convert
from crossrl.local import LocalWorkers
from crossrl.loop import Run
from crossrl.rewards import InlineRewards, RewardSet


def evaluate_config(config: str, overrides: list[str]) -> dict[str, Any]:
    """Held-out evaluation of the configured model or of the checkpoint that `resume` names."""
    run = _diffusion(config, overrides)
    workers, source = _open(run)
    prompts = load_prompts(run.data.heldout or run.data.train, run.data.bad_rows)
    weights = "ema" if run.model.ema is not None else "policy"
    result = evaluate(run, workers, InlineRewards(RewardSet.from_config(run)), prompts, weights)
    return {"weights": source, **dataclasses.asdict(result)}


def export_config(config: str, overrides: list[str], layout: str, out: Path, slot: str) -> None:
    """Write the weights that `resume` names as a pipeline in `layout`."""
    check_layout(layout)
    run = _diffusion(config, overrides)
    workers, _ = _open(run)
    if layout == DIFFUSERS:
        workers.export(out, slot)
        return
    with tempfile.TemporaryDirectory() as scratch:
        workers.export(Path(scratch), slot)
        convert(Path(scratch), out, layout)


def gate_config(run: RunConfig) -> None:
    """The start-up gate on the weights that `resume` names; raises `GateError`."""
    workers, _ = _open(run)
    algorithm, data = build_algorithm(run), None
    if not algorithm.needs.clips:
        data = PromptCursor(load_prompts(run.data.train, run.data.bad_rows), run.batch.prompts, run.seed)
    pass_gate(Run(run, data, workers, InlineRewards(RewardSet.from_config(run)), algorithm))


def _diffusion(config: str, overrides: list[str]) -> RunConfig:
    job = prepare(config, overrides)
    if not isinstance(job.run, RunConfig):
        raise ConfigError(
            f"{job.title} is no diffusion job",
            where=config,
            fix="evaluate it with `crossrl run CONFIG trainer.val_only=true`, export it with verl's model merger",
        )
    return job.run


def _open(run: RunConfig) -> tuple[LocalWorkers, str]:
    with tempfile.NamedTemporaryFile() as store:
        torch.distributed.init_process_group("gloo", init_method=f"file://{store.name}", rank=0, world_size=1)
    workers = LocalWorkers(build_engine(run, env.device()))
    checkpoints = Checkpoints(Path(run.run_dir), run.checkpoint.keep)
    folder = checkpoints.resolve(run.resume)
    if folder is None:
        return workers, run.model.path
    workers.load(folder)
    return workers, str(folder)
