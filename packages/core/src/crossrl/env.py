"""Every environment variable that CrossRL reads or sets. Nothing else in the project touches the environment."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path


def allowed_plugins() -> frozenset[str] | None:
    """`CROSSRL_PLUGINS`: the only plug-ins (or distributions) that may be loaded, e.g. "veomni,toy"; "none" = no one.

    None when it is unset or empty: all that are installed.
    """
    names = frozenset(filter(None, (name.strip() for name in os.environ.get("CROSSRL_PLUGINS", "").split(","))))
    return names - {"none"} if names else None


def cpu_count() -> int:
    """Cores this process may run on (no variable: the scheduler's affinity, which a container sets)."""
    return len(os.sched_getaffinity(0))


def local_world_size() -> int:
    """`RAY_LOCAL_WORLD_SIZE` (set by verl in its actors) or `LOCAL_WORLD_SIZE` (torchrun): ranks on this machine."""
    return int(os.environ.get("RAY_LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_WORLD_SIZE") or 1)


def mindspeed_homes() -> dict[str, str]:
    """`MINDSPEED_MM_HOME`, `MINDSPEED_HOME`: source checkouts, keyed by the package in each ("" = not set)."""
    return {
        "mindspeed_mm": os.environ.get("MINDSPEED_MM_HOME", "").strip(),
        "mindspeed": os.environ.get("MINDSPEED_HOME", "").strip(),
    }


@contextmanager
def variables(**values: str) -> Iterator[None]:
    """Within it, these variables are set: for libraries that take arguments from the environment only."""
    kept = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in kept.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def verl_platform() -> str:
    """`VERL_PLATFORM`: verl's platform by name, or "" to let verl probe."""
    return os.environ.get("VERL_PLATFORM", "").strip().lower()


def use_cpu_platform_if_alone() -> None:
    """Set `VERL_PLATFORM=cpu` for this process and its children where there is no accelerator, unless it is set."""
    import torch

    if not torch.accelerator.is_available() and not find_spec("torch_npu"):
        os.environ.setdefault("VERL_PLATFORM", "cpu")


def device() -> str:
    """The device type that a single process computes on."""
    import torch

    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return "cpu" if accelerator is None or verl_platform() == "cpu" else accelerator.type


def checked() -> bool:
    """`CROSSRL_CHECKED`: whether `crossrl run`, the parent of this process, has checked plug-ins and data already."""
    return os.environ.get("CROSSRL_CHECKED") == "1"


def for_checked_job() -> dict[str, str]:
    """This environment, with `CROSSRL_CHECKED` set for the job about to start."""
    return {**os.environ, "CROSSRL_CHECKED": "1"}


def ray_address() -> str:
    """`RAY_ADDRESS`: the running Ray cluster to join, or "" to start one here."""
    return os.environ.get("RAY_ADDRESS", "").strip()


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent dies, also by SIGKILL (Linux; elsewhere nothing)."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


def direct_tracking(run_dir: str | Path) -> None:
    """`VERL_FILE_LOGGER_PATH`, `TENSORBOARD_DIR`: point verl's loggers into `run_dir` unless the user chose a place."""
    folder = Path(run_dir).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("VERL_FILE_LOGGER_PATH", str(folder / "metrics.jsonl"))
    os.environ.setdefault("TENSORBOARD_DIR", str(folder / "tensorboard"))
