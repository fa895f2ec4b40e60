"""The kind of job with a `gui:` node: what `crossrl check`, `run` and `sft` do with it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from crossrl.errors import ConfigError
from crossrl.launch import Job
from crossrl.registry import select
from crossrl.types import Advice
from crossrl.validation import validated
from crossrl_gui_agent.codecs import CODECS
from crossrl_gui_agent.config import GuiConfig
from crossrl_gui_agent.envs import World
from crossrl_gui_agent.seeds import ranges_of

log = logging.getLogger("crossrl.gui")

TINY = "tiny"
"""A model path that stands for the warm-started model which ships with the package."""


class GuiKind:
    """Reinforcement learning of a GUI agent on verl's own engines, trainer and rollout."""

    node, fields = "gui", tuple(GuiConfig.model_fields)
    verls = ("data", "actor_rollout_ref", "algorithm", "reward")
    shortcuts = {
        "algorithm": "++gui.algorithm.name={}",
        "workers": "trainer.n_gpus_per_node={}",
        "steps": "trainer.total_training_steps={}",
        "resume": "trainer.resume_mode={}",
        "model": "actor_rollout_ref.model.path={}",
    }

    def validated(self, tree: DictConfig, source: str, workers: int) -> tuple[GuiConfig, str, list[Advice]]:
        """The `gui` node, checked with its plug-ins and the names of its tasks."""
        gui = load_config(tree, source)
        if gui.codec not in CODECS:
            raise ConfigError(f"unknown codec {gui.codec!r}", where="gui.codec", fix=f"one of {', '.join(CODECS)}")
        build_algorithm(gui)
        _check_tasks(tree, gui, build_world(gui))
        title = f"{gui.algorithm['name']} on {gui.env['name']} with verl's {tree.actor_rollout_ref.actor.strategy}"
        return gui, title, []

    def warm_start(self, job: Job, echo: Callable[[str], None]) -> None:
        """Clone the scripted expert; the model goes to `RUN_DIR/model`."""
        from crossrl_gui_agent.sft import warm_start

        folder = asyncio.run(warm_start(job.run, model_path(job.tree), Path(job.run.run_dir) / "model", echo))
        echo(f"wrote {folder}: go on with model={folder}")


def load_config(tree: DictConfig, source: str) -> GuiConfig:
    """The `gui` node of a composed config."""
    node: Any = OmegaConf.to_container(tree.gui, resolve=True)
    return validated(GuiConfig, node, source=source, prefix="gui.")


def build_world(gui: GuiConfig) -> World:
    """The environments that `gui.env` names; nothing is started."""
    return _configured(select("crossrl.envs", str(gui.env.get("name"))), gui.env, "gui.env.")


def build_algorithm(gui: GuiConfig) -> Any:
    """The algorithm that `gui.algorithm` names."""
    algorithm = select("crossrl.algorithms", str(gui.algorithm.get("name")))
    if getattr(algorithm, "kind", None) != "gui":
        raise ConfigError(
            f"{gui.algorithm['name']!r} is no algorithm for a GUI agent", where="gui.algorithm", fix="gui_grpo or gigpo"
        )
    return _configured(algorithm, gui.algorithm, "gui.algorithm.")


def system_prompt(gui: GuiConfig, world: World) -> str:
    """The configured one, or the codec's for what the world can do."""
    if gui.system_prompt is not None:
        return gui.system_prompt
    codec = CODECS[gui.codec]
    return codec.system_prompt(world.actions & codec.kinds)


def model_path(tree: DictConfig) -> str:
    """The policy's folder; "tiny" is the one in this package."""
    path = str(tree.actor_rollout_ref.model.path)
    return str(Path(__file__).parent / "assets" / "tiny") if path == TINY else path


def _configured(plugin: Any, node: dict[str, Any], prefix: str) -> Any:
    options = {key: value for key, value in node.items() if key != "name"}
    return plugin(validated(plugin.Config, options, source="gui", prefix=prefix))


def _check_tasks(tree: DictConfig, gui: GuiConfig, world: World) -> None:
    known = set(world.tasks())
    for where in ("train_files", "val_files"):
        for task, _ in ranges_of(tree.data[where], f"data.{where}"):
            if task not in known:
                raise ConfigError(
                    f"{gui.env['name']} has no task {task!r}", where=f"data.{where}", fix=", ".join(sorted(known))
                )
