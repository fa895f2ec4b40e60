"""Verl's view of a run: one EngineConfig dataclass that validates the whole `crossrl` node in the driver."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

import ray
from omegaconf import DictConfig, OmegaConf
from verl.base_config import BaseConfig
from verl.workers.config import EngineConfig

from crossrl import env
from crossrl.build import check_parts
from crossrl.config import RunConfig
from crossrl.errors import ConfigError
from crossrl.validation import validated

log = logging.getLogger(__name__)

STRATEGY_PREFIX = "crossrl_"


@dataclass
class CrossRLEngineConfig(EngineConfig):
    """`settings` is the `crossrl` node. Built in the driver before Ray starts, so every config error shows there."""

    settings: Any = field(default_factory=dict)
    nodes: int = 1
    workers_per_node: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        settings = self.settings
        if isinstance(settings, DictConfig):
            settings = OmegaConf.to_container(settings, resolve=True)
        backend = self.strategy.removeprefix(STRATEGY_PREFIX)
        if settings.get("backend", backend) != backend:
            raise ConfigError(
                f"model_engine={self.strategy} and crossrl.backend={settings['backend']} disagree",
                where="crossrl.backend",
                fix="set model_engine only",
            )
        run = validated(RunConfig, {**settings, "backend": backend}, source="crossrl", prefix="crossrl.")
        run.check_world_size(self.nodes * self.workers_per_node)
        if not (ray.is_initialized() or env.checked()):
            for advice in check_parts(run):
                log.warning("%s", advice)
        object.__setattr__(self, "settings", run.model_dump(mode="json"))

    @property
    def run(self) -> RunConfig:
        """The validated run."""
        return RunConfig.model_validate(self.settings)


@dataclass
class CrossRLModelConfig(BaseConfig):
    """The little that verl's TrainingWorker asks of a model config."""

    _mutable_fields = {"model_type"}

    model_type: str = "diffusion"
