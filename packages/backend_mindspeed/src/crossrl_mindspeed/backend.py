"""The `Backend` object that the plug-in names."""

from __future__ import annotations

from crossrl.errors import ConfigError


class MindSpeedBackend:
    """MindSpeed-MM behind `crossrl.protocols.Backend`."""

    def engine(self, kind: str) -> type:
        """The engine class for `kind`; raises `ConfigError` for all but "diffusion". Imports MindSpeed-MM (seconds)."""
        if kind != "diffusion":
            raise ConfigError(
                f"the mindspeed backend has no engine for {kind!r}, only for 'diffusion'",
                where="backend",
                fix="token models train on verl's own engines: choose one with verl's model_engine",
            )
        from crossrl_mindspeed.engine import MindSpeedEngine

        return MindSpeedEngine


backend = MindSpeedBackend()
