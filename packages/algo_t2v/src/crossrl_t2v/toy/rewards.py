"""Closed-form rewards of the toy world. Numpy only; all samples of a call are measured together.

    toy = presence * smoothness * (0.5 colour + 0.5 direction)

A pixel's mass is its brightest channel relative to the object's, with a floor that hides faint noise. The tolerances
are set so that a clean render scores 1 in everything, while the score of a bad video still has a slope to climb.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from crossrl.types import Sample, Score
from crossrl_t2v.toy.world import (
    AREA,
    COLOURS,
    DIRECTIONS,
    FRAMES,
    SIZE,
    TRAVEL,
    Attributes,
    coverage,
    parse,
)

PARTS = ("colour", "direction", "smoothness", "presence", "shape")
_SHAPE_VIDEO = (FRAMES, SIZE, SIZE, 3)
_BRIGHT, _FLOOR = 240.0, 0.1
_COLOUR_WIDTH = 0.7  # distance in relative RGB at which the colour score is 0; the nearest two colours are 0.75 apart
_AREA_TOLERANCE, _AREA_WIDTH = 0.15, 0.5  # relative deviation that is free, and that after it which costs everything
_SPREAD, _SPREAD_WIDTH = 32.0, 32.0  # px^2: second moment of the widest clean shape plus slack; as above
_JERK_FREE, _JERK_SCALE = 0.15, 1.0  # px a frame^2


class ToyReward:
    """Scores toy videos against their prompts: `kind` is "toy" for the product, or one of `PARTS`.

    Every score lists all parts; "shape" (overlap with the asked shape) is no factor of "toy" and only worth watching.
    """

    range = (0.0, 1.0)
    frames = "all"
    device = "cpu"

    def __init__(self, kind: str = "toy") -> None:
        """`ValueError` for an unknown kind."""
        if kind != "toy" and kind not in PARTS:
            raise ValueError(f"no toy reward {kind!r}; there are toy, {', '.join(PARTS)}")
        self.kind = kind
        self.name = kind if kind == "toy" else f"toy_{kind}"

    def score(self, samples: Sequence[Sample]) -> list[Score]:
        """One score a sample, in order; `ValueError` names a sample that is not a toy video with a toy prompt."""
        if not samples:
            return []
        asked = [_check(sample) for sample in samples]
        found = measure(np.stack([sample.video for sample in samples]), asked)
        return [
            Score(float(found[self.kind][i]), {name: float(found[name][i]) for name in PARTS})
            for i in range(len(samples))
        ]


def measure(videos: np.ndarray, asked: Sequence[Attributes]) -> dict[str, np.ndarray]:
    """Toy reward and its parts by name, fp64 [n] in [0, 1]; videos uint8 [n, F, H, W, 3], one `Attributes` a video."""
    blobs = _blobs(videos)
    parts = {
        "colour": _colour(blobs, asked),
        "direction": _direction(blobs, asked),
        "smoothness": _smoothness(blobs),
        "presence": _presence(blobs),
        "shape": _shape(blobs, asked),
    }
    parts["toy"] = parts["presence"] * parts["smoothness"] * (0.5 * parts["colour"] + 0.5 * parts["direction"])
    return parts


@dataclass(frozen=True, slots=True)
class _Blobs:
    """Mass [n, F, H, W] and its moments: area [n, F] px, centre [n, F, 2] px, spread [n, F] px^2; rgb [n, 3]."""

    mass: np.ndarray
    area: np.ndarray
    centre: np.ndarray
    spread: np.ndarray
    rgb: np.ndarray


def _check(sample: Sample) -> Attributes:
    video = sample.video
    if video.dtype != np.uint8 or video.shape != _SHAPE_VIDEO:
        raise ValueError(
            f"sample {sample.prompt.id}#{sample.index}: expected uint8 {_SHAPE_VIDEO}, got {video.dtype} {video.shape}"
        )
    return parse(sample.prompt.text)


_axis = np.arange(SIZE, dtype=np.float32) - (SIZE - 1) / 2
_X, _Y = (a.ravel() for a in np.meshgrid(_axis, _axis))
_MOMENTS = np.stack([np.ones_like(_X), _X, _Y, _X**2 + _Y**2], axis=1)  # [H*W, 4]


def _blobs(videos: np.ndarray) -> _Blobs:
    n = len(videos)
    brightest = np.maximum(np.maximum(videos[..., 0], videos[..., 1]), videos[..., 2])
    mass = np.clip((brightest / np.float32(_BRIGHT) - _FLOOR) / (1 - _FLOOR), 0.0, 1.0)
    area, x, y, square = np.moveaxis((mass.reshape(n, FRAMES, -1) @ _MOMENTS).astype(np.float64), -1, 0)
    some = np.maximum(area, 1.0)  # an empty frame has its centre in the middle; its presence is 0 anyway
    centre = np.stack([x / some, y / some], axis=-1)
    spread = square / some - (centre**2).sum(-1)
    rgb = np.matmul(mass.reshape(n, 1, -1), videos.reshape(n, -1, 3).astype(np.float32))[:, 0].astype(np.float64)
    return _Blobs(mass, area, centre, spread, rgb)


def _colour(blobs: _Blobs, asked: Sequence[Attributes]) -> np.ndarray:
    """Distance between mean and asked colour, both relative to their brightest channel."""
    brightest = blobs.rgb.max(-1)
    seen = blobs.rgb / np.maximum(brightest, 1e-6)[:, None]
    wanted = np.array([COLOURS[a.colour] for a in asked], dtype=np.float64)
    wanted /= wanted.max(-1, keepdims=True)
    distance = np.linalg.norm(seen - wanted, axis=-1)
    return np.where(brightest > 0, np.clip(1.05 - distance / _COLOUR_WIDTH, 0.0, 1.0), 0.0)


def _direction(blobs: _Blobs, asked: Sequence[Attributes]) -> np.ndarray:
    """Displacement along the asked axis less that across it, over 80 % of the travel; 1 from there on."""
    moved = blobs.centre[:, -1] - blobs.centre[:, 0]
    axis = np.array([DIRECTIONS[a.direction] for a in asked])
    along = (moved * axis).sum(-1)
    across = np.abs(moved[:, 0] * axis[:, 1] - moved[:, 1] * axis[:, 0])
    return np.clip((along - across) / (0.8 * TRAVEL), 0.0, 1.0)


def _smoothness(blobs: _Blobs) -> np.ndarray:
    """Falls exponentially with the mean change of velocity from frame to frame."""
    jerk = np.linalg.norm(np.diff(blobs.centre, n=2, axis=1), axis=-1).mean(-1)
    return np.exp(-np.maximum(jerk - _JERK_FREE, 0.0) / _JERK_SCALE)


def _presence(blobs: _Blobs) -> np.ndarray:
    """Mean over the frames of: the right area, in one piece."""
    area = 1.0 - (np.abs(blobs.area / AREA - 1.0) - _AREA_TOLERANCE) / _AREA_WIDTH
    compact = 1.0 - (blobs.spread - _SPREAD) / _SPREAD_WIDTH
    return (np.clip(area, 0.0, 1.0) * np.clip(compact, 0.0, 1.0)).mean(-1)


def _shape(blobs: _Blobs, asked: Sequence[Attributes]) -> np.ndarray:
    """Intersection over union with the asked shape at the object's centre, in the first, middle and last frame."""
    frames = [0, FRAMES // 2, FRAMES - 1]
    dx = _axis - blobs.centre[:, frames, 0, None, None]
    dy = _axis[:, None] - blobs.centre[:, frames, 1, None, None]
    ideal = np.empty((len(asked), len(frames), SIZE, SIZE))
    for shape in {a.shape for a in asked}:
        rows = [i for i, a in enumerate(asked) if a.shape == shape]
        ideal[rows] = coverage(shape, dx[rows], dy[rows])
    mass = blobs.mass[:, frames]
    both, either = np.minimum(mass, ideal).sum((-1, -2)), np.maximum(mass, ideal).sum((-1, -2))
    return (both / either).mean(-1)
