"""`crossrl doctor`: what is on this machine, and whether every plug-in loads (each in its own process)."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from crossrl.registry import status

LIBRARIES = ("crossrl-core", "verl", "ray", "torch", "veomni", "diffusers", "transformers", "peft", "torch-npu")
TIMEOUT_S = 120
DEVICES = (
    "import torch; a = torch.accelerator.current_accelerator(check_available=True); "
    "print(f'{torch.accelerator.device_count()} x {a}' if a else 'none: jobs run on the CPU (VERL_PLATFORM=cpu)')"
)
NO_CANN = (
    "torch-npu is installed, and torch does not start with it: are CANN's libraries there? Source its set_env.sh, or "
    "uninstall torch-npu; TORCH_DEVICE_BACKEND_AUTOLOAD=0 starts torch without it"
)
LOAD = "import sys; from crossrl.registry import select; select(*sys.argv[1:])"


def examine() -> Iterator[tuple[str, bool]]:
    """(line, is fine) for versions, accelerators and each plug-in."""
    for name in LIBRARIES:
        try:
            yield f"{name:<14} {version(name)}", True
        except PackageNotFoundError:
            yield f"{name:<14} not installed", True
    ok, text = _child([sys.executable, "-c", DEVICES])
    yield f"accelerators   {text}", ok
    if not ok and find_spec("torch_npu"):
        yield f"{'':<14} {NO_CANN}", False
    rows = status()
    yield f"plug-ins       {len(rows)}, each loaded in a process of its own: some seconds each", True
    for row in rows:
        if row.state != "ok":
            yield f"{row.group} {row.name}: {row.state}", not row.state.startswith("broken")
            continue
        ok, text = _child([sys.executable, "-c", LOAD, row.group, row.name])
        yield f"{row.group} {row.name}: {'loads' if ok else 'broken: ' + text}", ok


def _child(command: list[str]) -> tuple[bool, str]:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return False, f"hangs (no answer in {TIMEOUT_S} s)"
    if done.returncode < 0:
        return False, f"crashed with signal {-done.returncode}"
    lines = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines()
    return done.returncode == 0, lines[-1] if lines else ""
