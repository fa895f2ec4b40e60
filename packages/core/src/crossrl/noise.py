"""Randomness as a pure function of names, so that it survives any world size, micro-batch, backend and restart."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from crossrl.seeds import stream_seed
from crossrl.types import SampleKey


def generator(*parts: int | str) -> torch.Generator:
    """A CPU generator seeded by names."""
    return torch.Generator().manual_seed(stream_seed(*parts))


class Noise:
    """The `NoiseFn` of one micro-batch: fp32 CPU normals [n, *shape], one stream a sample and tag."""

    def __init__(self, seed: int, step: int, keys: Sequence[SampleKey], shape: Sequence[int]) -> None:
        self.seed, self.step, self.keys, self.shape = seed, step, keys, tuple(shape)

    def __call__(self, tag: str, *, shared: bool = False) -> torch.Tensor:
        out = torch.empty(len(self.keys), *self.shape)
        for row, key in zip(out, self.keys, strict=True):
            index = "shared" if shared else key.index
            row.normal_(generator=generator(self.seed, self.step, key.prompt.id, index, tag))
        return out
