"""From a config name and overrides to verl's own entry point: compose, validate, start, show progress."""

from __future__ import annotations

import difflib
import logging
import os
import re
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, Protocol

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from crossrl import env
from crossrl.config import RunConfig
from crossrl.console import MARK
from crossrl.errors import ConfigError
from crossrl.registry import conf_folders, select, status
from crossrl.types import Advice
from crossrl.validation import validated

log = logging.getLogger(__name__)

VERLS = ("trainer", "ray_kwargs", "model_engine", "global_profiler", "transfer_queue", "hydra")
"""verl's keys that may be set for every kind of job."""


class Prepared(Protocol):
    """A validated config: `RunConfig` for a diffusion job, a section of its own for other kinds."""

    run_dir: str

    def model_dump_json(self, *, indent: int) -> str:
        """All keys."""


class Kind(Protocol):
    """A kind of job, told by the node that its configs have: what a `crossrl.jobs` plug-in's target is."""

    node: str
    fields: Collection[str]  # of the node: on the command line they need no prefix
    shortcuts: Mapping[str, str]  # name on the command line -> override, with {} for the value
    verls: Collection[str]  # verl's keys that matter to it, besides `VERLS`

    def validated(self, tree: DictConfig, source: str, workers: int) -> tuple[Prepared, str, list[Advice]]:
        """(the node, what it is in a few words, advice); raises `ConfigError` or `PluginError`."""

    warm_start: Callable[[Job, Callable[[str], None]], None] | None  # `crossrl sft`; None: a run of flow_matching


class DiffusionKind:
    """Jobs with a `crossrl:` node."""

    node, fields, verls = "crossrl", (*RunConfig.model_fields, "for_algorithm"), ()
    shortcuts: ClassVar = {
        "backend": "model_engine=crossrl_{}",
        "algorithm": "++crossrl.algorithm.name={}",
        "workers": "trainer.n_gpus_per_node={}",
    }
    warm_start = None

    def validated(self, tree: DictConfig, source: str, workers: int) -> tuple[RunConfig, str, list[Advice]]:
        """The run, checked with its plug-ins and data."""
        from crossrl.build import check_parts

        node = OmegaConf.to_container(tree.crossrl, resolve=True)
        node.setdefault("backend", str(tree.model_engine).removeprefix("crossrl_"))
        run = validated(RunConfig, node, source=source, prefix="")
        run.check_world_size(workers)
        return run, f"{run.algorithm['name']} on {run.backend}", check_parts(run)


@dataclass(frozen=True, slots=True)
class Job:
    """A validated job: what was asked for, the verl command line that runs it, and advice on its settings."""

    run: Prepared
    title: str
    tree: DictConfig
    workers: int
    command: list[str]
    advice: list[Advice]


def known_configs() -> dict[str, Path]:
    """Name -> file of every config that `crossrl run` knows by name."""
    folders = [Path(__file__).parent / "verl" / "conf", *conf_folders().values()]
    return {p.stem: p for folder in folders for p in sorted(folder.glob("*.yaml"))}


def prepare(config: str, overrides: list[str]) -> Job:
    """Compose and validate the config; raises `ConfigError` or `PluginError` with file, key and a suggestion."""
    arguments, source = _config_arguments(config)
    kind = kind_of(config)
    source += " with the command line" if overrides else ""
    hydra_overrides = [_translate(o, kind) for o in overrides]
    tree = _compose(arguments, hydra_overrides, source)
    workers = _count(tree, "n_gpus_per_node") * _count(tree, "nnodes")
    run, title, advice = kind.validated(tree, source, workers)
    command = [sys.executable, "-m", "verl.trainer.main_ppo", *arguments, *hydra_overrides, *_machine(tree, workers)]
    return Job(run, title, tree, workers, command, advice)


def kind_of(config: str) -> Kind:
    """The kind of job by the node in the config: that of a `crossrl.jobs` plug-in, else a diffusion job."""
    tree = _compose(_config_arguments(config)[0], [], config)
    named = [found.name for found in status("crossrl.jobs") if found.name in tree]
    return select("crossrl.jobs", named[0])() if named else DiffusionKind()


def _config_arguments(config: str) -> tuple[list[str], str]:
    path = Path(config)
    if path.suffix in (".yaml", ".yml"):
        if not path.is_file():
            raise ConfigError(f"no such config file: {config}", fix="give a path to a YAML file, or a known name")
        if path.stem in known_configs():  # Hydra would find that one first
            raise ConfigError(f"{path.stem!r} is the name of a config of CrossRL", where=config, fix="rename the file")
        return [f"--config-dir={path.parent.resolve()}", f"--config-name={path.stem}"], config
    known = known_configs()
    if config not in known:
        near = difflib.get_close_matches(config, known, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ConfigError(
            f"unknown config {config!r}", fix=f"{hint}known: {', '.join(sorted(known))}; or a path to a .yaml file"
        )
    return [f"--config-name={config}"], str(known[config].name)


def _translate(override: str, kind: Kind) -> str:
    """`backend=x`, `workers=2`, `seed=1`, `batch.prompts=4` are ours; verl's own keys pass through."""
    key, separator, value = override.partition("=")
    if not separator:
        raise ConfigError(f"override {override!r} has no '='", where="command line", fix="write key=value")
    if key in kind.shortcuts:
        return kind.shortcuts[key].format(value)
    bare = key.lstrip("+~")
    root = bare.partition(".")[0]
    if root == kind.node:
        return f"++{bare}={value}"
    if root in VERLS or root in kind.verls:
        return override
    if root in kind.fields:
        return f"++{kind.node}.{bare}={value}"
    candidates = dict.fromkeys([*kind.fields, *kind.shortcuts, "trainer", "ray_kwargs"])
    near = difflib.get_close_matches(root, candidates, n=1)
    raise ConfigError(
        f"unknown key {bare!r}",
        where="command line",
        fix=(f"did you mean {near[0]!r}? " if near else "") + f"known: {', '.join(candidates)}",
    )


def _compose(arguments: list[str], overrides: list[str], source: str) -> Any:
    options = dict(a.removeprefix("--").split("=", 1) for a in arguments)
    verl = find_spec("verl")
    if verl is None:
        raise ConfigError("verl is not installed", fix="pip install 'verl>=0.9.1,<0.10'")
    folder = Path(next(iter(verl.submodule_search_locations))) / "trainer" / "config"
    if "config-dir" in options:  # the main config must lie in the first folder, unlike on verl's command line
        overrides = [*overrides, f"hydra.searchpath=[file://{folder}]"]
        folder = Path(options["config-dir"])
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(folder), version_base=None):
            return compose(options["config-name"], overrides)
    except (HydraException, OmegaConfBaseException, YAMLError) as error:
        backend = re.search(r"model_engine/crossrl_(\w+)", str(error))
        if backend:
            select("crossrl.backends", backend.group(1))
        raise ConfigError(" ".join(str(error).split()), where=source) from error


def _count(tree: Any, name: str) -> int:
    value = tree.trainer[name]
    if not isinstance(value, int) or value < 1:
        raise ConfigError(f"{value!r} is not a number of 1 or more", where=f"trainer.{name}", fix="e.g. workers=2")
    return value


def _machine(tree: Any, workers: int) -> list[str]:
    """What depends on this machine: verl's platform, and a local Ray unless a cluster is named."""
    env.use_cpu_platform_if_alone()
    out = []
    if env.verl_platform() == "cpu":
        out.append("++ray_kwargs.ray_init.runtime_env.env_vars.VERL_PLATFORM=cpu")
    if not env.ray_address() and not tree.ray_kwargs.ray_init.get("address"):
        # logical CPUs only order the queue: every rank, the rewards and verl's own actors must find a place
        out += [f"ray_kwargs.ray_init.num_cpus={workers + 16}", "++ray_kwargs.ray_init.include_dashboard=false"]
    return out


def start(job: Job, echo) -> int:
    """Run the job in a child process; lines meant for people go to `echo`, all of them to `logs/` in the run folder.

    The first SIGINT or SIGTERM asks the job to stop after its step and save; the second ends it at once.
    Returns the child's exit status, or 143 / 130 after a signal.
    """
    run_dir = Path(job.run.run_dir)
    try:
        (run_dir / "logs").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot be used: {error}", where="run_dir", fix="choose another folder") from error
    (run_dir / "STOP").unlink(missing_ok=True)
    if getattr(job.run, "resume", None) == "never" and any((run_dir / "checkpoints").glob("step-*")):
        echo(f"{run_dir} holds an earlier run: its checkpoints move to checkpoints-aside-*, resume=auto would go on")
    path = run_dir / "logs" / time.strftime("run-%Y%m%d-%H%M%S.log")
    tail: deque[str] = deque(maxlen=400)
    with path.open("w") as logfile:
        child = subprocess.Popen(
            job.command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
            env=env.for_checked_job(),
            preexec_fn=env.die_with_parent,
        )
        caught = _stop_on_signals(child, run_dir, echo)
        for line in child.stdout:
            logfile.write(line)
            logfile.flush()
            tail.append(line)
            _, found, message = line.partition(MARK)
            if found:
                echo(message.rstrip())
    code = child.wait()
    if code and len(caught) < 2:
        echo(f"the job failed (exit status {code}): {_cause(tail)}\nfull log: {path}")
    return 128 + caught[0] if caught else code


def _stop_on_signals(child: subprocess.Popen, run_dir: Path, echo) -> list[int]:
    caught: list[int] = []

    def handle(number: int, _frame: object) -> None:
        caught.append(number)
        if len(caught) > 1:
            os.killpg(child.pid, signal.SIGKILL)
            return
        (run_dir / "STOP").touch()
        echo("stopping after the current step (at start-up: the first) and saving; once more to stop at once")

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, handle)
    return caught


def _cause(tail: deque[str]) -> str:
    """The error that a person should read first: CrossRL's own if there is one, else the last exception line."""
    lines = [re.sub(r"^(\x1b\[\d+m)?\([^)]*\)(\x1b\[0m)? ", "", line.rstrip()) for line in tail]
    for pattern in (r"^crossrl\.errors\.\w+: ", r"^[\w.]+(Error|Exception)\b"):
        for i in range(len(lines) - 1, -1, -1):
            if re.match(pattern, lines[i]):
                more = [line for line in lines[i + 1 : i + 4] if line.startswith("  -> ")]
                return "\n".join([lines[i], *more])
    return lines[-1] if lines else "no output"
