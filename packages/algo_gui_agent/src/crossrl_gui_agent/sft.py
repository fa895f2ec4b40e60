"""Supervised warm start: clone a scripted expert's answers. One process on one CPU: meant for the tiny model."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForImageTextToText, AutoProcessor

from crossrl import env
from crossrl.head import linear_logprob
from crossrl_gui_agent.actions import Action
from crossrl_gui_agent.codecs import CODECS
from crossrl_gui_agent.config import GuiConfig, SftConfig
from crossrl_gui_agent.demos import Demonstration, blurred, collect
from crossrl_gui_agent.generate import banned_ids
from crossrl_gui_agent.job import build_world, system_prompt
from crossrl_gui_agent.patches import multiply_patches
from crossrl_gui_agent.prompting import Message, Prompter
from crossrl_gui_agent.seeds import alternating

log = logging.getLogger(__name__)


async def warm_start(gui: GuiConfig, path: str, to: Path, echo: Callable[[str], None]) -> Path:
    """Clone the expert of `gui.sft.tasks` with the model at `path`; the folder `to` that the result is written to."""
    torch.set_num_threads(env.cpu_count())
    model = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32, attn_implementation="sdpa")
    multiply_patches(model)
    processor = AutoProcessor.from_pretrained(path)
    codec, world = CODECS[gui.codec], build_world(gui)
    seeds = range(gui.sft.first_seed, gui.sft.first_seed + gui.sft.episodes)
    started = time.monotonic()
    demonstrations = await collect(
        world,
        alternating((task, seeds) for task in gui.sft.tasks),
        processor_prompter(processor, model.config.text_config.max_position_embeddings),
        codec.render,
        system=system_prompt(gui, world),
        screenshots=gui.screenshots,
        max_steps=gui.max_steps,
    )
    await world.close()
    echo(f"{len(demonstrations)} demonstrated steps in {time.monotonic() - started:.0f} s")

    def report(step: int, loss: float) -> None:
        if step % 10 == 0 or step == gui.sft.steps:
            spent = time.monotonic() - started
            echo(f"step {step}/{gui.sft.steps} | loss {loss:.4f} | {spent:.0f} s")

    Cloner(model, processor, codec.render, gui.sft, gui.seed).train(demonstrations, report)
    model.save_pretrained(to)
    processor.save_pretrained(to)
    return to


def processor_prompter(processor: Any, limit: int) -> Prompter:
    """Prompts by a transformers processor: the same tokens as verl's own builder makes."""

    def render(chat: list[Message], images: list[Any]) -> list[int]:
        text = processor.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        return processor(text=[text], images=images)["input_ids"][0]

    return Prompter(render, processor.tokenizer.convert_tokens_to_ids("<|vision_start|>"), limit)


class Cloner:
    """Trains a model on demonstrations."""

    def __init__(
        self, model: torch.nn.Module, processor, render: Callable[[Action], str], config: SftConfig, seed: int
    ) -> None:
        self.model, self.processor, self.render, self.config = model, processor, render, config
        self.end = processor.tokenizer.eos_token
        self.forbidden = torch.tensor(banned_ids(processor.tokenizer))
        self.rng = random.Random(seed)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr, weight_decay=0.0)

    def train(self, demonstrations: Sequence[Demonstration], report: Callable[[int, float], None]) -> None:
        """All steps; `report(step, loss)` after each."""
        warm = max(1, self.config.steps // 20)
        for step in range(1, self.config.steps + 1):
            rate = min(1.0, step / warm, 1.5 * (1 - (step - 1) / self.config.steps))
            for group in self.optimizer.param_groups:
                group["lr"] = self.config.lr * rate
            loss = self.loss(self.rng.choices(demonstrations, k=self.config.batch))
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()
            report(step, loss.item())

    def loss(self, batch: Sequence[Demonstration]) -> Tensor:
        """Mean negative log-likelihood of the answers' tokens."""
        ids, mask, said = self._tokens(batch)
        images = [image for demonstration in batch for image in demonstration.prompt.images]
        pixels = self.processor.image_processor(images=images, return_tensors="pt")
        hidden = self.model.model(
            input_ids=ids,
            attention_mask=mask,
            mm_token_type_ids=(ids == self.processor.image_token_id).long(),
            **pixels,
        ).last_hidden_state
        log_prob, _ = linear_logprob(
            hidden[:, :-1],
            self.model.lm_head.weight,
            ids[:, 1:],
            mask=said[:, 1:],
            entropy=False,
            forbidden=self.forbidden,
        )
        return -log_prob.sum() / said.sum()

    def _tokens(self, batch: Sequence[Demonstration]) -> tuple[Tensor, Tensor, Tensor]:
        """Token ids [B, L], attention mask [B, L] and which tokens are the answer's [B, L], padded on the right."""
        tokenizer = self.processor.tokenizer
        rows = []
        for demonstration in batch:
            answer = self.render(blurred(demonstration.action, self.config.spread, self.rng))
            rows.append((demonstration.prompt.ids, tokenizer(answer + self.end, add_special_tokens=False)["input_ids"]))
        width = max(len(prompt) + len(answer) for prompt, answer in rows)
        ids = torch.full((len(rows), width), tokenizer.pad_token_id)
        mask, said = torch.zeros_like(ids), torch.zeros_like(ids, dtype=torch.bool)
        for row, (prompt, answer) in enumerate(rows):
            length = len(prompt) + len(answer)
            ids[row, :length] = torch.tensor([*prompt, *answer])
            mask[row, :length] = 1
            said[row, len(prompt) : length] = True
        return ids, mask, said
