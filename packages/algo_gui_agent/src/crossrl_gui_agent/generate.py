"""Batched sampling from a vision-language model with transformers' `generate`: what a rollout needs without a server.

Every token is drawn by the Gumbel-max trick with noise of its own request, so a completion is a function of (weights,
prompt, screenshots, seed), whatever else is in its batch (up to rounding of a batched matrix product).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from PIL import Image
from transformers import LogitsProcessor, LogitsProcessorList, TopKLogitsWarper, TopPLogitsWarper

from crossrl.errors import DataError
from crossrl_gui_agent.patches import multiply_patches

VISION_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>")
"""What an image is made of. A model that could say one would announce an image that is not there."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to draw: `temperature` 0 is greedy, `top_k` 0 and `top_p` 1 are off, at most `max_tokens` tokens."""

    max_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt: token ids with images already expanded to their tokens, the images in order, and a seed."""

    prompt_ids: Sequence[int]
    images: Sequence[Image.Image]
    seed: str
    params: SamplingParams


@dataclass(frozen=True, slots=True)
class Completion:
    """`token_ids` with the end token if it was said; `log_probs` under the distribution they were drawn from."""

    token_ids: list[int]
    log_probs: list[float]
    finished: bool = field(default=True)  # False: cut at max_tokens


def banned_ids(tokenizer: Any) -> list[int]:
    """Ids of the vision tokens that this tokenizer has."""
    known = tokenizer.get_vocab()
    return [known[token] for token in VISION_TOKENS if token in known]


class _Draw(LogitsProcessor):
    """Chooses each next token and remembers its log-probability; `generate` then takes the only one left."""

    def __init__(self, requests: Sequence[Request], banned: torch.Tensor) -> None:
        self.params, self.banned = requests[0].params, banned
        self.noise = [_generator(r.seed) for r in requests]
        self.log_probs: list[torch.Tensor] = []
        warpers = [TopKLogitsWarper(self.params.top_k)] if self.params.top_k > 0 else []
        warpers += [TopPLogitsWarper(self.params.top_p)] if self.params.top_p < 1 else []
        self.warp = LogitsProcessorList(warpers)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores = scores.float().index_fill(1, self.banned, -torch.inf)
        greedy = self.params.temperature == 0
        log_p = self.warp(input_ids, scores if greedy else scores / self.params.temperature).log_softmax(-1)
        drawn = log_p if greedy else log_p + self._gumbel(scores)
        token = drawn.argmax(-1, keepdim=True)
        self.log_probs.append(log_p.gather(1, token).squeeze(1).cpu())
        return torch.full_like(scores, -torch.inf).scatter(1, token, 0.0)

    def _gumbel(self, like: torch.Tensor) -> torch.Tensor:
        noise = torch.stack([torch.empty(like.shape[1]).exponential_(generator=g) for g in self.noise])
        return -noise.log().to(like.device)


class Generator:
    """A model and its processor, ready to complete prompts."""

    def __init__(self, model: torch.nn.Module, processor: Any) -> None:
        self.model, self.processor = model.eval(), processor
        if model.device.type == "cpu":
            multiply_patches(model)
        self.tokenizer = processor.tokenizer
        self.banned = torch.tensor(banned_ids(self.tokenizer), device=model.device)
        self.image_token = processor.image_token_id

    @torch.inference_mode()
    def complete(self, requests: Sequence[Request]) -> list[Completion]:
        """Complete requests that share their `params`, as one batch; `DataError` if tokens and images disagree."""
        draw = _Draw(requests, self.banned)
        inputs = self._inputs(requests)
        width = inputs["input_ids"].shape[1]
        ids = self.model.generate(
            **inputs,
            do_sample=False,
            max_new_tokens=requests[0].params.max_tokens,
            logits_processor=LogitsProcessorList([draw]),
            eos_token_id=self.tokenizer.eos_token_id,
            pad_token_id=self.tokenizer.pad_token_id,
        )[:, width:].tolist()
        log_probs = torch.stack(draw.log_probs, dim=1).tolist()
        return [self._cut(row, lp) for row, lp in zip(ids, log_probs, strict=True)]

    def _cut(self, ids: list[int], log_probs: list[float]) -> Completion:
        end = self.tokenizer.eos_token_id
        if end not in ids:
            return Completion(ids, log_probs, finished=False)
        length = ids.index(end) + 1
        return Completion(ids[:length], log_probs[:length])

    def _inputs(self, requests: Sequence[Request]) -> dict[str, torch.Tensor]:
        """Left-padded tensors. `mm_token_type_ids` makes the model count M-RoPE positions over images."""
        width = max(len(r.prompt_ids) for r in requests)
        ids = torch.full((len(requests), width), self.tokenizer.pad_token_id)
        mask = torch.zeros_like(ids)
        for row, request in enumerate(requests):
            ids[row, width - len(request.prompt_ids) :] = torch.as_tensor(request.prompt_ids)
            mask[row, width - len(request.prompt_ids) :] = 1
        inputs = {"input_ids": ids, "attention_mask": mask}
        inputs["mm_token_type_ids"] = (ids == self.image_token).long()
        if any(r.images for r in requests):
            inputs |= self._pixels(requests)
        return {name: tensor.to(self.model.device) for name, tensor in inputs.items()}

    def _pixels(self, requests: Sequence[Request]) -> dict[str, torch.Tensor]:
        """All images in order; one that several requests share (a group's first screenshot) is processed once."""
        seen: dict[bytes, Any] = {}
        done, merge = [], self.processor.image_processor.merge_size**2
        for request in requests:
            expected = 0
            for image in request.images:
                key = image.size[0].to_bytes(4, "big") + image.tobytes()
                if key not in seen:
                    seen[key] = self.processor.image_processor(images=[image], return_tensors="pt")
                done.append(seen[key])
                expected += int(seen[key]["image_grid_thw"].prod()) // merge
            found = list(request.prompt_ids).count(self.image_token)
            if found != expected:
                raise DataError(
                    f"a prompt has {found} image tokens for {len(request.images)} images that need {expected}",
                    where=request.seed,
                    fix="never cut a prompt inside an image; use one image size limit everywhere",
                )
        return {k: torch.cat([d[k] for d in done]) for k in ("pixel_values", "image_grid_thw")}


def _generator(seed: str) -> torch.Generator:
    digest = hashlib.blake2b(seed.encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "big", signed=True))
