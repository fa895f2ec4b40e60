"""Errors that a user meets: each says what is wrong, where, and what to do. All pickle across processes."""

from __future__ import annotations


class CrossRLError(Exception):
    """Root of all errors raised on purpose by CrossRL."""

    def __init__(self, what: str, *, where: str | None = None, fix: str | None = None) -> None:
        self.what, self.where, self.fix = what, where, fix
        super().__init__(what)

    def __str__(self) -> str:
        text = f"{self.where}: {self.what}" if self.where else self.what
        return f"{text}\n  -> {self.fix}" if self.fix else text

    def __reduce__(self):
        return _rebuild, (type(self), self.what, self.where, self.fix)


def _rebuild(cls: type[CrossRLError], what: str, where: str | None, fix: str | None) -> CrossRLError:
    return cls(what, where=where, fix=fix)


class ConfigError(CrossRLError, ValueError):
    """A config that cannot run: unknown key, wrong type, impossible combination."""


class PluginError(CrossRLError, ImportError):
    """A plug-in that is unknown, absent or broken, met when it is selected."""


class DataError(CrossRLError, ValueError):
    """Prompts, videos or data files that cannot be used."""


class RewardError(CrossRLError, RuntimeError):
    """Rewards failed beyond what the run tolerates."""


class CheckpointError(CrossRLError, RuntimeError):
    """A checkpoint that is missing, damaged or does not fit."""


class GuardError(CrossRLError, RuntimeError):
    """The guard stopped a run that was going wrong; `guard_report.md` in its folder says why."""


class DeviceLeakError(CrossRLError, TypeError):
    """A tensor where only plain data may be (batch metadata)."""


class WorkerError(CrossRLError, RuntimeError):
    """A worker died or a step could not be finished."""


class GateError(WorkerError):
    """The start-up gate found what would spoil the training."""
