"""One coloured object that moves over a black background, and the sentence that describes it.

A prompt reads "a {colour} {shape} moving {direction}". 48 combinations, of which 12 are held out: every value, and
every (colour, direction) pair, still occurs in training. Distances are in pixels, x to the right, y down.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from crossrl.types import Prompt

FRAMES, SIZE, FPS = 9, 32, 8.0
TRAVEL = 12.0  # centre of the first frame to centre of the last
AREA = 134.0  # the same for all shapes, so that presence does not depend on the shape
EDGE = 2.0  # width of the soft edge

COLOURS = {
    "red": (240, 40, 40),
    "green": (40, 240, 60),
    "blue": (50, 90, 240),
    "yellow": (240, 220, 40),
}
SHAPES = ("square", "circle", "cross")
DIRECTIONS = {"left": (-1.0, 0.0), "right": (1.0, 0.0), "up": (0.0, -1.0), "down": (0.0, 1.0)}

_SQUARE = AREA**0.5 / 2
_CIRCLE = (AREA / np.pi) ** 0.5
_ARM, _ARM_WIDTH = 7.4, 2.8  # half-length and half-width of a bar of the cross


@dataclass(frozen=True, slots=True)
class Attributes:
    """What a prompt asks for; the fields are keys of `COLOURS`, `SHAPES` and `DIRECTIONS`."""

    colour: str
    shape: str
    direction: str

    @property
    def text(self) -> str:
        """The sentence; `parse` is its inverse."""
        return f"a {self.colour} {self.shape} moving {self.direction}"


COMBINATIONS = tuple(Attributes(*values) for values in product(COLOURS, SHAPES, DIRECTIONS))
_INDEX = {attributes.text: i for i, attributes in enumerate(COMBINATIONS)}


def _is_heldout(a: Attributes) -> bool:
    # A Latin square for each shape: a (colour, direction) pair is held out for at most one shape.
    return (list(COLOURS).index(a.colour) + list(DIRECTIONS).index(a.direction) + SHAPES.index(a.shape)) % 4 == 0


_SPLITS = {
    "train": tuple(a for a in COMBINATIONS if not _is_heldout(a)),
    "heldout": tuple(a for a in COMBINATIONS if _is_heldout(a)),
}


def combinations(split: str) -> tuple[Attributes, ...]:
    """The combinations of "train" (36) or "heldout" (12); `ValueError` for another split."""
    if split not in _SPLITS:
        raise ValueError(f"no split {split!r}; there are {', '.join(_SPLITS)}")
    return _SPLITS[split]


def parse(text: str) -> Attributes:
    """The attributes of a prompt; `ValueError` for anything that is not one of the 48 sentences."""
    if text not in _INDEX:
        raise ValueError(
            f"not a toy prompt: {text!r}; expected 'a {{{'|'.join(COLOURS)}}} {{{'|'.join(SHAPES)}}} "
            f"moving {{{'|'.join(DIRECTIONS)}}}'"
        )
    return COMBINATIONS[_INDEX[text]]


def train_prompts() -> list[Prompt]:
    """The 36 training prompts, ids `toy/0` to `toy/47`."""
    return _prompts("train")


def heldout_prompts() -> list[Prompt]:
    """The 12 held-out prompts."""
    return _prompts("heldout")


def _prompts(split: str) -> list[Prompt]:
    return [Prompt(f"toy/{_INDEX[a.text]}", a.text) for a in combinations(split)]


def coverage(shape: str, dx: np.ndarray, dy: np.ndarray, scale: float = 1.0) -> np.ndarray:
    """How much of each pixel the shape covers, in [0, 1]; `dx`, `dy` [...] are offsets from its centre.

    `scale` multiplies its lengths. `ValueError` for an unknown shape.
    """
    x, y = np.abs(dx), np.abs(dy)
    if shape == "square":
        outside = np.maximum(x, y) - _SQUARE * scale
    elif shape == "circle":
        outside = np.hypot(x, y) - _CIRCLE * scale
    elif shape == "cross":
        arm, width = _ARM * scale, _ARM_WIDTH * scale
        outside = np.minimum(np.maximum(x - arm, y - width), np.maximum(x - width, y - arm))
    else:
        raise ValueError(f"no shape {shape!r}; there are {', '.join(SHAPES)}")
    return np.clip(0.5 - outside / EDGE, 0.0, 1.0)


def render(attributes: Attributes, rng: np.random.Generator) -> np.ndarray:
    """A video of the object, uint8 [F, H, W, 3]; `rng` jitters where it starts, how far it goes and its size."""
    direction = np.array(DIRECTIONS[attributes.direction])
    travel = TRAVEL + rng.uniform(-0.75, 0.75)
    middle = (SIZE - 1) / 2 + rng.uniform(-1.5, 1.5, size=2)
    scale = rng.uniform(0.97, 1.03)
    centre = middle + np.linspace(-0.5, 0.5, FRAMES)[:, None] * travel * direction
    pixel = np.arange(SIZE)
    dx = pixel[None, None, :] - centre[:, 0, None, None]
    dy = pixel[None, :, None] - centre[:, 1, None, None]
    alpha = coverage(attributes.shape, dx, dy, scale)
    return np.rint(alpha[..., None] * np.array(COLOURS[attributes.colour])).astype(np.uint8)


@dataclass(frozen=True, slots=True)
class ToyData:
    """Prompts for RL and captioned clips for SFT.

    A caption's attributes are each replaced by a random value with probability `p_wrong`, and the caption is empty with
    probability `p_empty`. Neither clips nor captions of "train" have a held-out combination: such a caption is redrawn.
    """

    seed: int = 0
    p_wrong: float = 0.5  # a mediocre base on purpose, so that RL has something to do
    p_empty: float = 0.1

    def prompts(self, split: str) -> list[Prompt]:
        """The prompts of "train" or "heldout"; `ValueError` for another split."""
        return _prompts(split)

    def clips(self, split: str, indices: Sequence[int]) -> tuple[list[str], np.ndarray]:
        """Captions and videos uint8 [n, F, H, W, 3]; clip i is a function of (seed, split, i) alone."""
        pairs = [self._clip(split, int(i)) for i in indices]
        videos = np.stack([v for _, v in pairs]) if pairs else np.zeros((0, FRAMES, SIZE, SIZE, 3), np.uint8)
        return [caption for caption, _ in pairs], videos

    def batches(self, split: str, size: int) -> Iterator[tuple[list[str], np.ndarray]]:
        """Endless batches of `clips` with indices 0, 1, 2, ..."""
        start = 0
        while True:
            yield self.clips(split, range(start, start + size))
            start += size

    def _clip(self, split: str, index: int) -> tuple[str, np.ndarray]:
        allowed = combinations(split)
        rng = np.random.default_rng([self.seed, list(_SPLITS).index(split), index])
        truth = allowed[rng.integers(len(allowed))]
        video = render(truth, rng)
        if rng.random() < self.p_empty:
            return "", video
        caption = self._caption(truth, rng)
        while caption not in allowed:
            caption = self._caption(truth, rng)
        return caption.text, video

    def _caption(self, truth: Attributes, rng: np.random.Generator) -> Attributes:
        def maybe(value: str, values: Sequence[str]) -> str:
            return str(rng.choice(values)) if rng.random() < self.p_wrong else value

        return Attributes(
            maybe(truth.colour, tuple(COLOURS)), maybe(truth.shape, SHAPES), maybe(truth.direction, tuple(DIRECTIONS))
        )


TOY = ToyData()
"""The data source behind `toy:train` and `toy:heldout`."""
