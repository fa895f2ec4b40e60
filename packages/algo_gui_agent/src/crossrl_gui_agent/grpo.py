"""GRPO and GiGPO for GUI agents: how episodes become one advantage for each step. verl does the rest."""

from __future__ import annotations

from typing import Annotated, ClassVar

import numpy as np
from pydantic import Field

from crossrl.section import Section
from crossrl_gui_agent.credit import Steps, episode_advantages, step_advantages


class GuiGRPO:
    """The return of an episode against its group, the same for each of its steps (GRPO, arXiv 2402.03300)."""

    kind: ClassVar = "gui"  # of job that it is an algorithm for

    class Config(Section):
        """Options that `gui.algorithm` may set."""

    def __init__(self, config: Config) -> None:
        self.config = config

    def advantages(self, steps: Steps) -> np.ndarray:
        """One advantage a step [n]; 0 for what should not train."""
        return episode_advantages(steps)


class GiGPO(GuiGRPO):
    """Adds what a step earned against other visits to the same screen: A_episode + w A_step (arXiv 2505.10978)."""

    class Config(GuiGRPO.Config):
        """Options that `gui.algorithm` may set."""

        gamma: Annotated[float, Field(ge=0.0, le=1.0)] = 0.95  # discount a step
        step_weight: Annotated[float, Field(ge=0.0)] = 1.0  # w

    def advantages(self, steps: Steps) -> np.ndarray:
        """One advantage a step [n]; 0 for what should not train."""
        within = step_advantages(steps, self.config.gamma)
        return super().advantages(steps) + self.config.step_weight * within
