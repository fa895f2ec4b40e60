"""CrossRL's trainer in verl's registry: `trainer.v1.trainer_mode=crossrl` on verl's own `main_ppo`."""

from __future__ import annotations

from typing import Any

from omegaconf import DictConfig
from verl.trainer.ppo.v1 import PPOTrainer, register_trainer
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.tracking import Tracking

from crossrl import env, job
from crossrl.build import build_algorithm
from crossrl.console import mark_logs
from crossrl.verl.workers import RayRewards, RayWorkers


class NoAgentLoop:
    """A diffusion job has no agent loop; verl asks for one all the same."""

    @classmethod
    def create(cls, **_: Any) -> NoAgentLoop:
        """Nothing to set up."""
        return cls()


@register_trainer("crossrl")
class CrossRLTrainer(PPOTrainer):
    """The shell that verl drives; all that happens is in `crossrl.job`."""

    def __init__(self, config: DictConfig) -> None:
        mark_logs()
        self.config = config
        self.engine_config = omega_conf_to_dataclass(config.actor_rollout_ref.actor.engine)
        self.run = self.engine_config.run
        self.logger: Tracking | None = None

    def init(self) -> None:
        """Start workers and rewards."""
        self.rewards = RayRewards(self.run)
        self.workers = RayWorkers(self.engine_config)

    def fit(self, agent_loop_manager: NoAgentLoop) -> None:
        """Train from the first or the resumed step to the last."""
        job.train(self.run, self.workers, self.rewards, build_algorithm(self.run), self._open_tracking)

    def _open_tracking(self) -> job.Track:
        env.direct_tracking(self.run.run_dir)
        trainer = self.config.trainer
        self.logger = Tracking(trainer.project_name, trainer.experiment_name, list(trainer.logger))
        return self.logger.log

    def get_llm_client(self) -> None:
        """None: rollout happens on the training workers."""

    get_teacher_client = get_reward_handles = get_llm_client

    def on_step_end(self) -> None:
        """Verl's hook; the loop has its own."""

    on_sample_end = on_step_end
