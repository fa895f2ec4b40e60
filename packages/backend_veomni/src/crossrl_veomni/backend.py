"""The `Backend` object that the plug-in names."""

from __future__ import annotations

import shutil
from pathlib import Path

from crossrl.errors import ConfigError


class VeOmniBackend:
    """VeOmni behind `crossrl.protocols.Backend`."""

    def engine(self, kind: str) -> type:
        """The engine class for `kind`; raises `ConfigError` for all but "diffusion". Imports VeOmni (seconds)."""
        if kind != "diffusion":
            raise ConfigError(
                f"the veomni backend has no engine for {kind!r}, only for 'diffusion'",
                where="backend",
                fix="token models train on verl's own engines: choose one with verl's model_engine",
            )
        from crossrl_veomni.engine import VeOmniEngine

        return VeOmniEngine


class VeOmniLayout:
    """Diffusers' layout under another name (`crossrl.layouts.Layout`)."""

    def is_of(self, folder: Path) -> bool:
        """Never: it is diffusers'."""
        return False

    def from_diffusers(self, source: Path, target: Path) -> None:
        """Copy the folder."""
        shutil.copytree(source, target)

    to_diffusers = from_diffusers


backend, layout = VeOmniBackend(), VeOmniLayout()
