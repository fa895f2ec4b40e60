"""From scores to advantages, for every algorithm: group baselines, several rewards, selection. numpy only, fp64.

Shapes: `B` prompts, `G` samples a prompt, `R` rewards. A group is the G samples of one prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from crossrl.config import Section
from crossrl.errors import ConfigError
from crossrl.types import Advantages

FLOAT_NOISE = 1e-6
"""A group whose standard deviation is below this, relative to its largest score (or to 1), counts as constant."""


class AdvantageOptions(Section):
    """Options of an algorithm's `Config` that say how scores become advantages; they belong to no single method."""

    adv_clip: Annotated[float, Field(gt=0)] = 5.0  # advantages are clamped to +- this
    std: Literal["group", "global", "max_group"] = "group"  # divisor: the group's, the batch's, or the largest group's
    aggregate: Literal["sum", "per_reward", "gdpo", "per_reward_loss"] = "sum"  # see `group_advantages`
    best_of_n: Annotated[int, Field(ge=2, multiple_of=2)] | None = None  # train only the n/2 best and n/2 worst
    drop_zero_std: bool = False  # leave groups without any spread out of training

    def check_group(self, size: int) -> None:
        """Raise `ConfigError` if `best_of_n` is more than the group size."""
        if self.best_of_n is not None and self.best_of_n > size:
            raise ConfigError(
                f"best_of_n={self.best_of_n} of groups of {size} samples", where="algorithm.best_of_n", fix="lower it"
            )


def group_advantages(
    scores: np.ndarray, valid: np.ndarray, weights: Sequence[float], options: AdvantageOptions
) -> Advantages:
    """Advantages (r - mean of the group) / (std + 1e-8), unbiased std, and which samples train.

    scores [B, G, R], valid [B, G], weights [R]. A sample that is not valid or whose score is not finite is dropped and
    its group normalised without it; a group with fewer than two samples left is skipped. All-equal scores, up to float
    noise, give exactly 0. `std` is each group's own, that of all scores of the batch (Flow-GRPO, arXiv 2505.05470), or
    the largest of any group, so that quiet groups are not amplified (LongCat-Video, arXiv 2510.22200). `aggregate`:

        sum              the advantage of the weighted sum of the scores
        per_reward       the weighted sum of each reward's own advantage
        gdpo             that, normalised once more over the batch (GDPO, arXiv 2601.05242)
        per_reward_loss  weighted advantages [B, G, R] for a loss term each (DanceGRPO, arXiv 2505.07818)

    Best-of-n (DanceGRPO) selects after normalisation, by the total reward. `zero_std` is the fraction of the groups in
    use whose samples all have advantage 0.

    Raises `ConfigError` if `best_of_n` is more than the group size.
    """
    groups, size, _ = scores.shape
    options.check_group(size)
    scores, weights = np.asarray(scores, np.float64), np.asarray(weights, np.float64)
    usable = valid & np.isfinite(scores).all(-1)
    usable &= usable.sum(1, keepdims=True) >= 2
    scores = np.where(usable[..., None], scores, 0.0)
    total = scores @ weights
    values, spread = _normalise(total[..., None], usable, options.std)
    if options.aggregate != "sum":
        values = _normalise(scores, usable, options.std)[0] * weights
    if options.aggregate != "per_reward_loss":
        values = values.sum(-1)
    if options.aggregate == "gdpo" and usable.sum() > 1:
        kept = values[usable]
        values = np.where(usable, (values - kept.mean()) / (kept.std(ddof=1) + 1e-8), 0.0)
    values = values.clip(-options.adv_clip, options.adv_clip)

    live = usable.any(1)
    constant = live & (values.reshape(groups, -1) == 0).all(1)
    keep = usable & ~(constant[:, None] & options.drop_zero_std)
    if options.best_of_n is not None:
        keep = _extremes(total, keep, options.best_of_n)
    metrics = {"kept": float(keep.sum()), "dropped": float(groups * size - keep.sum())}
    if live.any():
        metrics |= {
            "mean": float(total[usable].mean()),
            "std": float(total[usable].std()),
            "within_group_std": float(spread[live].mean()),
            "zero_std": float(constant[live].mean()),
        }
    mask = keep if values.ndim == 2 else keep[..., None]
    return Advantages(np.where(mask, values, 0.0), keep, metrics)


def _normalise(scores: np.ndarray, usable: np.ndarray, divisor: str) -> tuple[np.ndarray, np.ndarray]:
    """(advantages [B, G, R], the groups' std [B, R]) of scores [B, G, R], over the usable samples of each reward."""
    mask = usable[..., None]
    count = np.maximum(mask.sum(1, keepdims=True), 2)
    centred = np.where(mask, scores - scores.sum(1, keepdims=True, where=mask) / count, 0.0)
    std = np.sqrt((centred**2).sum(1, keepdims=True) / (count - 1))
    noise = FLOAT_NOISE * np.maximum(1.0, np.abs(scores).max(1, keepdims=True, initial=0.0, where=mask))
    by = std
    if divisor == "max_group":
        by = std.max(0, keepdims=True)
    elif divisor == "global" and usable.sum() > 1:
        by = scores[usable].std(0, ddof=1)
    return np.where(std > noise, centred / (by + 1e-8), 0.0), std[:, 0]


def _extremes(total: np.ndarray, keep: np.ndarray, n: int) -> np.ndarray:
    """`keep` [B, G] thinned to the n/2 lowest and n/2 highest totals of each group (all, if it has no more than n)."""
    out = keep.copy()
    for row, kept, scores in zip(out, keep, total, strict=True):
        order = np.flatnonzero(kept)[np.argsort(scores[kept], kind="stable")]
        row[order[n // 2 : len(order) - n // 2]] = False
    return out
