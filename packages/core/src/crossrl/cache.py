"""What a worker keeps on the host: text embeddings, latents of training clips, and the samples of the current step."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
import torch

from crossrl.errors import WorkerError
from crossrl.protocols import ModelFamily
from crossrl.registry import select
from crossrl.types import Prompt, SampleKey, Trajectory, UpdatePlan

Condition = dict[str, torch.Tensor]
TEXT_CACHE_BYTES = 1 << 30


class TextCache:
    """Condition tensors by prompt text, least recently used out first once `TEXT_CACHE_BYTES` are held."""

    def __init__(self, family: ModelFamily) -> None:
        self.family = family
        self._entries: OrderedDict[str, Condition] = OrderedDict()
        self._bytes = 0

    @torch.no_grad()
    def rows(self, texts: Sequence[str]) -> Condition:
        """Condition tensors [n, ...] on the host, one row a text; every new text is encoded once."""
        wanted = dict.fromkeys(texts)
        for text in [t for t in wanted if t not in self._entries]:
            encoded = self.family.encode_text([text])  # alone: in a batch its last bits depend on its neighbours
            self._entries[text] = entry = {k: t[0].cpu() for k, t in encoded.items()}
            self._bytes += sum(t.nbytes for t in entry.values())
        for text in wanted:
            self._entries.move_to_end(text)
        rows = [self._entries[t] for t in texts]
        while self._bytes > TEXT_CACHE_BYTES and len(self._entries) > len(wanted):
            _, entry = self._entries.popitem(last=False)
            self._bytes -= sum(t.nbytes for t in entry.values())
        return {k: torch.stack([row[k] for row in rows]) for k in rows[0]}


class ClipCache:
    """Clean latents of captioned training clips by index; a clip is encoded once."""

    def __init__(self, family: ModelFamily, micro: int) -> None:
        self.family, self.micro = family, micro
        self._entries: dict[tuple[str, int], tuple[Prompt, torch.Tensor]] = {}

    @torch.no_grad()
    def rows(self, source: str, indices: Sequence[int]) -> list[tuple[Prompt, torch.Tensor]]:
        """(captioned prompt, latents [C, F, H, W] fp32) of each clip of `source` ("name:split")."""
        name, _, split = source.partition(":")
        missing = [i for i in dict.fromkeys(indices) if (source, i) not in self._entries]
        for start in range(0, len(missing), self.micro):
            part = missing[start : start + self.micro]
            captions, videos = select("crossrl.data", name).clips(split, part)
            for i, caption, latents in zip(part, captions, self.family.encode_video(videos), strict=True):
                self._entries[source, i] = (Prompt(f"clip/{i}", caption), latents)
        return [self._entries[source, i] for i in indices]


class HeldSamples:
    """The trajectories that this rank has drawn in the current step."""

    def __init__(self) -> None:
        self._step: int | None = None
        self._sigmas = torch.empty(0)
        self._rows: dict[SampleKey, tuple[SampleKey, torch.Tensor, dict[str, torch.Tensor]]] = {}

    def add(self, trajectory: Trajectory, step: int) -> None:
        """Keep its samples until the first ones of another step arrive."""
        if step != self._step:
            self._rows, self._step = {}, step
        self._sigmas = trajectory.sigmas
        for i, key in enumerate(trajectory.keys):
            self._rows[key] = (key, trajectory.latents[i], {k: t[i] for k, t in trajectory.data.items()})

    def share(self, plan: UpdatePlan) -> tuple[Trajectory, torch.Tensor, torch.Tensor]:
        """This rank's samples of `plan`: (trajectory, advantages [n] or [n, R], real [n]: 1, or 0 for padding)."""
        mine = [(k, a) for k, a in zip(plan.keys, plan.advantages, strict=True) if k in self._rows]
        padding = plan.samples_per_rank - len(mine)
        if plan.step != self._step or padding < 0:
            raise WorkerError(
                f"a plan of step {plan.step} wants {plan.samples_per_rank} samples a rank; "
                f"this rank holds {len(mine)} of its samples, from step {self._step}"
            )
        real = torch.tensor([1.0] * len(mine) + [0.0] * padding)
        none = np.zeros_like(plan.advantages[0]).tolist()
        mine += [(next(iter(self._rows)), none)] * padding
        rows = [self._rows[k] for k, _ in mine]
        trajectory = Trajectory(
            keys=tuple(key for key, _, _ in rows),  # not the plan's: only the held ones know a clip's caption
            sigmas=self._sigmas,
            latents=torch.stack([latents for _, latents, _ in rows]),
            data={name: torch.stack([data[name] for _, _, data in rows]) for name in rows[0][2]},
        )
        return trajectory, torch.tensor([a for _, a in mine], dtype=torch.float32), real
