"""How an exported pipeline names its transformer's tensors: diffusers' way, or that of a `crossrl.layouts` plug-in."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Protocol

from crossrl.errors import CheckpointError, ConfigError
from crossrl.fsdp2.checkpoint import copy_components
from crossrl.registry import select, status

DIFFUSERS = "diffusers"


class Layout(Protocol):
    """Other names for the same tensors: what a `crossrl.layouts` plug-in's target is. Folders hold safetensors."""

    def is_of(self, folder: Path) -> bool:
        """Whether the tensors in `folder` have this layout's names."""

    def from_diffusers(self, source: Path, target: Path) -> None:
        """Rename diffusers' tensors bit for bit; `CheckpointError`, with nothing written, if they are not complete."""

    def to_diffusers(self, source: Path, target: Path) -> None:
        """The way back, likewise."""


def check_layout(name: str) -> None:
    """Raise `ConfigError` unless `name` is a layout that can be written here."""
    known = [DIFFUSERS, *(found.name for found in status("crossrl.layouts") if found.ok)]
    if name not in known:
        raise ConfigError(
            f"unknown layout {name!r}",
            where="--to",
            fix=f"one of {', '.join(known)}; a backend's package brings its own",
        )


def convert(source: Path, target: Path, name: str) -> None:
    """Copy the pipeline folder `source`, its transformer in any installed layout, to `target` in the layout `name`."""
    check_layout(name)
    transformer = source / "transformer"
    if not transformer.is_dir():
        raise CheckpointError("no pipeline folder: it has no transformer/", where=str(source))
    if target.exists() and any(target.iterdir()):
        raise ConfigError("the folder is not empty", where=f"--out {target}", fix="choose another")
    with tempfile.TemporaryDirectory() as scratch:
        for found in status("crossrl.layouts"):
            layout = select(found.group, found.name) if found.ok else None
            if layout is not None and layout.is_of(transformer):
                layout.to_diffusers(transformer, Path(scratch))
                transformer = Path(scratch)
                break
        if name != DIFFUSERS:
            select("crossrl.layouts", name).from_diffusers(transformer, target / "transformer")
        else:
            copy_components(transformer, target / "transformer", without="")
    copy_components(source, target, without="transformer")
