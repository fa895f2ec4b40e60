"""From a config to live objects: the one place that turns names into an algorithm, rewards, data and an engine."""

from __future__ import annotations

from pathlib import Path

from crossrl.checkpoint import Checkpoints
from crossrl.config import RunConfig
from crossrl.data import PromptCursor, load_prompts
from crossrl.engine import DiffusionEngine
from crossrl.errors import ConfigError
from crossrl.linter import advise
from crossrl.protocols import Algorithm
from crossrl.registry import require, select
from crossrl.rewards import RewardSet
from crossrl.types import Advice
from crossrl.validation import validated


def build_algorithm(config: RunConfig) -> Algorithm:
    """The algorithm that the config names, with its options checked by its own Config."""
    cls = select("crossrl.algorithms", config.algorithm["name"])
    options = validated(cls.Config, config.algorithm, source="crossrl", prefix="crossrl.algorithm.")
    return cls(options, tuple(r.weight for r in config.rewards))


def build_engine(config: RunConfig, device: str) -> DiffusionEngine:
    """This rank's engine, built. A process group must exist."""
    family = select("crossrl.models", config.model.family).open(config.model.path, config.model.dtype)
    engine_class = select("crossrl.backends", config.backend).engine("diffusion")
    engine = engine_class(config, family, build_algorithm(config), device)
    family.to(device)
    engine.build()
    return engine


def check_resume(config: RunConfig) -> None:
    """Raise `ConfigError` if the checkpoint that `resume` names is of another model than the config's."""
    folder = Checkpoints(config.run_dir).latest() if config.resume in ("auto", "latest_valid") else Path(config.resume)
    if config.resume == "never" or folder is None:
        return
    saved, model = Checkpoints(config.run_dir).state(folder)["config"]["model"], config.model.model_dump(mode="json")
    for key in ("family", "layers", "lora", "ema"):
        if saved[key] != model[key] and (key != "ema" or None in (saved[key], model[key])):
            raise ConfigError(
                f"the checkpoint {folder} has model.{key}={saved[key]}, this job {model[key]}",
                where=f"model.{key}",
                fix="set it as it was, or start anew in another run_dir",
            )


def check_parts(config: RunConfig) -> list[Advice]:
    """Raise before any worker starts for what would fail in one: plug-ins, their options, capabilities, data files.

    Returns advice on settings that can run but work badly.
    """
    backend = require("crossrl.backends", config.backend)
    select("crossrl.backends", config.backend)
    select("crossrl.models", config.model.family).check(config.model, config.video)
    algorithm = build_algorithm(config)
    advice = advise(config, algorithm)
    if not algorithm.needs.clips:
        PromptCursor(load_prompts(config.data.train, config.data.bad_rows), config.batch.prompts, config.seed)
    elif config.data.sft is None:
        raise ConfigError(f"{config.algorithm['name']} trains on captioned clips", where="data.sft", fix="set data.sft")
    check_resume(config)
    RewardSet.from_config(config)
    load_prompts(config.data.heldout or config.data.train, config.data.bad_rows)
    can = backend.capabilities
    if can is None:
        return advice
    wanted = (
        ("model.family", config.model.family, can.families),
        ("parallel.ulysses", "ulysses" if config.parallel.ulysses > 1 else None, can.parallelism),
        ("model.lora", True if config.model.lora else None, (can.lora,)),
    )
    for key, value, offered in wanted:
        if value is not None and value not in offered:
            raise ConfigError(
                f"backend {config.backend!r} does not support {key}={getattr(config.model, 'family', value)}",
                where=key,
                fix=f"it offers {', '.join(map(str, offered)) or 'none'}; see `crossrl list`",
            )
    return advice
