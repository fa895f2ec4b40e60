"""The learning rate as a function of the number of optimizer steps done: nothing to save, nothing to drift."""

from __future__ import annotations

import math

from crossrl.config import Optimizer


def lr_at(updates: int, settings: Optimizer) -> float:
    """Learning rate of the optimizer step number `updates` (from 0): linear warm-up, then the schedule to zero."""
    warm = min(1.0, (updates + 1) / settings.warmup) if settings.warmup else 1.0
    if settings.schedule == "constant":
        return settings.lr * warm
    done = min(1.0, max(0, updates - settings.warmup) / max(1, settings.total - settings.warmup))
    left = 1.0 - done if settings.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return settings.lr * warm * left
