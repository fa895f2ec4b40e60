"""verl's synchronous trainer for episodes on screens: `trainer.v1.trainer_mode=crossrl_gui`."""

from __future__ import annotations

import logging
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
import transfer_queue as tq
from omegaconf import DictConfig, open_dict
from tensordict import TensorDict
from verl.trainer.ppo.v1 import register_trainer
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.utils.device import get_device_name
from verl.workers.rollout.replica import RolloutReplicaRegistry

from crossrl import env
from crossrl.console import mark_logs
from crossrl.errors import ConfigError
from crossrl_gui_agent.config import GuiConfig
from crossrl_gui_agent.credit import Steps
from crossrl_gui_agent.envs import StopReason
from crossrl_gui_agent.job import build_algorithm, load_config, model_path
from crossrl_gui_agent.report import Report
from crossrl_gui_agent.verl.worker import CpuPools, GuiWorker

log = logging.getLogger("crossrl.gui")


POLL_S = 0.1
"""How often a finished rollout is looked for; verl's 2 s are long beside a step of the tiny model."""


def _transformers_replica() -> type:
    from crossrl_gui_agent.verl.rollout import TransformersReplica

    return TransformersReplica


RolloutReplicaRegistry.register("transformers", _transformers_replica)


@register_trainer("crossrl_gui")
class GuiTrainer(PPOTrainerSync):
    """verl's trainer; credit is given to steps, a group filter gives up in time, and people see what happens."""

    def __init__(self, config: DictConfig) -> None:
        mark_logs()
        if config.algorithm.use_kl_in_reward:
            raise ConfigError("rewards here belong to episodes, not tokens", where="algorithm.use_kl_in_reward",
                              fix="use actor_rollout_ref.actor.use_kl_loss=true")  # fmt: skip
        with open_dict(config):
            config.trainer.v1.trainer_mode = "sync"  # verl looks its options up under this name
            config.actor_rollout_ref.model.path = model_path(config)
        self.gui: GuiConfig = load_config(config, "gui")
        self.algorithm = build_algorithm(self.gui)
        self.refilled = 0
        env.direct_tracking(self.gui.run_dir)
        self.report = Report(Path(self.gui.run_dir), resumed=config.trainer.resume_mode != "disable")
        super().__init__(config)
        self.replay_buffer.poll_interval = POLL_S

    def _init_resource_pool_mgr(self) -> None:
        super()._init_resource_pool_mgr()
        self.role_worker_mapping = {role: ray.remote(GuiWorker) for role in self.role_worker_mapping}
        if get_device_name() == "cpu":
            pools = self.resource_pool_manager
            self.resource_pool_manager = CpuPools(pools.resource_pool_spec, pools.mapping)

    def _add_prompts_to_generate(self, num_prompts: int) -> int:
        """verl's refill of filtered groups, until the step has had its share: then it takes groups as they are."""
        self.refilled += num_prompts
        if self.refilled > self.gui.max_refill * self.config.data.train_batch_size:
            self.replay_buffer.filter_groups_metric = None
        return super()._add_prompts_to_generate(num_prompts)

    def on_sample_begin(self) -> None:
        """Begin a step's rollout."""
        self.refilled = 0
        self.replay_buffer.filter_groups_metric = self._resolve_filter_groups_metric()
        super().on_sample_begin()

    def _compute_advantage(self, batch: Any, metrics: dict[str, Any]) -> Any:
        """verl's, for rollout correction; then the advantages of `gui.algorithm` in place of its own."""
        batch = super()._compute_advantage(batch, metrics)
        data = tq.kv_batch_get(
            keys=batch.keys, partition_id=batch.partition_id, select_fields=["extra_fields", "response_mask"]
        )
        real = [not tag.get("is_padding", False) for tag in batch.tags]
        extra = [getattr(fields, "data", fields) for fields in data["extra_fields"]]
        steps = steps_of(batch.keys, extra, real)
        metrics.update(rollout_metrics(steps, extra, real))
        advantage = self.algorithm.advantages(steps)
        metrics["gui/groups_with_signal"] = len(set(steps.group[advantage != 0])) / len(set(steps.group[real]))
        rows = [
            torch.full((len(mask),), float(value)) * mask
            for value, mask in zip(advantage, data["response_mask"].unbind(), strict=True)
        ]
        nested = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
        fields = TensorDict({"advantages": nested, "returns": nested.clone()}, batch_size=len(batch))
        return tq.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=fields)

    def _compute_metrics(self, batch: Any, metrics: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        super()._compute_metrics(batch, metrics, *args, **kwargs)
        self.report.step(self.global_steps, self.total_training_steps, metrics)

    def _validate(self) -> dict[str, float]:
        metrics = super()._validate()
        self.report.evaluation(self.global_steps, metrics, self.gui.swap_screenshots)
        return metrics

    def on_step_end(self) -> None:
        """Send the weights to the rollout; stop and save if a file STOP asks for it."""
        super().on_step_end()
        if (self.report.folder / "STOP").exists() and self.global_steps < self.total_training_steps:
            log.info("stopping after step %d as asked", self.global_steps)
            self._save_checkpoint()
            self.total_training_steps = self.global_steps


def steps_of(keys: list[str], extra: list[dict[str, Any]], real: list[bool]) -> Steps:
    """The batch's samples (keys "PROMPT_SESSION_STEP") as steps; padding is not valid."""
    broken = {str(reason) for reason in StopReason if reason.blameless}
    return Steps(
        group=np.array([key.rsplit("_", 2)[0] for key in keys]),
        episode=np.array([key.rsplit("_", 1)[0] for key in keys]),
        turn=np.array([fields["turn"] for fields in extra]),
        anchor=np.array([fields["anchor"] for fields in extra]),
        reward=np.array([fields["step_reward"] for fields in extra], dtype=np.float64),
        episode_return=np.array([fields["episode_return"] for fields in extra], dtype=np.float64),
        valid=np.array([ok and fields["stop"] not in broken for ok, fields in zip(real, extra, strict=True)]),
    )


def rollout_metrics(steps: Steps, extra: list[dict[str, Any]], real: list[bool]) -> dict[str, float]:
    """Fractions of the batch's episodes (`gui/...`): success, stop reasons, replayed; and of its steps: clamped."""
    first = [i for i in np.unique(steps.episode, return_index=True)[1] if real[i]]
    extra = [fields if ok else None for fields, ok in zip(extra, real, strict=True)]
    stops = Counter(extra[i]["stop"] for i in first)
    found = {f"gui/stop/{reason}": stops[str(reason)] / len(first) for reason in StopReason}
    found["gui/success"] = found["gui/stop/success"]
    found["gui/steps"] = float(np.mean([extra[i]["reward_extra_info"]["steps"] for i in first]))
    found["gui/env_s"] = float(np.mean([extra[i]["reward_extra_info"]["env_s"] for i in first]))
    found["gui/replayed"] = float(np.mean([extra[i]["replayed"] for i in first]))
    found["gui/clamped"] = float(np.mean([fields["clamped"] for fields in extra if fields]))
    found["gui/distinct_actions"] = float(len({fields["action"] for fields in extra if fields}))
    return found
