"""Advice on settings that can run but worked badly elsewhere; never an error.

Only what the config itself shows is judged: rules of an algorithm's own options are in its `check`. A rule states what
was seen and what to set. docs/checks.md has the table with sources.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from crossrl.config import RunConfig
from crossrl.protocols import Algorithm
from crossrl.types import Advice

SMALL_MODEL_BYTES = 100 << 20
"""Of weights on disk. Published learning rates are of models of a billion parameters and more; a smaller one takes
larger steps (the toy model, 2 MB, learns best at 3e-4), so no learning rate is advised on for it."""

Found = tuple[str, str, str]
"""(key, what was seen, what to set)."""


def advise(config: RunConfig, algorithm: Algorithm) -> list[Advice]:
    """Advice on `config`: the algorithm's own, then the general rules. May raise `ConfigError`, from the former."""
    own = list(algorithm.check(config.sampling, config.batch))
    rules = [*_ANY, *([] if algorithm.needs.clips else _RL)]
    return own + [
        Advice(rule.__name__.removeprefix("_"), *found) for rule in rules for found in rule(config, algorithm)
    ]


Rule = Callable[[RunConfig, Algorithm], Iterator[Found]]


def _global_batch(config: RunConfig, _: Algorithm) -> Iterator[Found]:
    batch = config.batch
    if batch.prompts * batch.samples <= 64:
        yield (
            "batch.prompts",
            f"{batch.prompts} prompts x {batch.samples} samples = {batch.prompts * batch.samples} an iteration: "
            "at 64 and below the reward jittered and large models did not learn",
            "batch.prompts x batch.samples > 64",
        )


def _group_size(config: RunConfig, _: Algorithm) -> Iterator[Found]:
    if config.batch.samples < 8:
        yield (
            "batch.samples",
            f"groups of {config.batch.samples}: the mean of fewer than 8 rewards is a noisy baseline, and runs with 4 "
            "ended in noise",
            "batch.samples=8 or more, usually 12 to 24",
        )


def _few_prompts(config: RunConfig, _: Algorithm) -> Iterator[Found]:
    if config.batch.prompts <= 4:
        yield (
            "batch.prompts",
            f"{config.batch.prompts} prompts an iteration: with 4 the reward oscillated from one set of prompts to the "
            "next",
            "batch.prompts=8 or more, with fewer batch.samples if need be",
        )


def _guidance(config: RunConfig, _: Algorithm) -> Iterator[Found]:
    if config.sampling.guidance > 1:
        yield (
            "sampling.guidance",
            f"guidance {config.sampling.guidance:g} while RL trains: it multiplies every error of the velocity; runs "
            "with 4.5 to 15 collapsed, and every sample costs two forwards",
            "sampling.guidance=1; eval.guidance may differ",
        )


def _bf16_ratio(config: RunConfig, algorithm: Algorithm) -> Iterator[Found]:
    batch = config.batch
    if config.model.dtype == "bfloat16" and algorithm.needs.old is None and batch.rollout_micro != batch.update_micro:
        yield (
            "batch.update_micro",
            f"bfloat16 with micro-batches of {batch.rollout_micro} in rollout and {batch.update_micro} in the update: "
            "kernels round by batch shape, and ratios of 0.98 were seen in the last steps before any update",
            "equal batch.rollout_micro and batch.update_micro, or model.dtype=float32; gate.json has the ratios",
        )


def _eval_steps(config: RunConfig, _: Algorithm) -> Iterator[Found]:
    steps = config.eval.steps
    if steps is not None and steps != config.sampling.steps:
        yield (
            "eval.steps",
            f"evaluated with {steps} steps, trained with {config.sampling.steps}: the held-out reward is that of "
            "another sampler, and can fall while training goes well",
            "leave eval.steps out to judge training; keep it if you want to know the reward of inference",
        )


def _learning_rate(config: RunConfig, _: Algorithm) -> Iterator[Found]:
    lr, lora = config.optimizer.lr, config.model.lora is not None
    if _weight_bytes(config.model.path) < SMALL_MODEL_BYTES:
        return
    if not lora and lr > 2e-5:
        yield (
            "optimizer.lr",
            f"lr {lr:g} with full fine-tuning: 1e-5 made oily pictures in one run and 1e-4 noise in another",
            "optimizer.lr=5e-6 to 2e-5, or model.lora",
        )
    if lora and lr < 1e-5:
        yield (
            "optimizer.lr",
            f"lr {lr:g} with LoRA: adapters start at zero and hardly move at rates meant for full fine-tuning",
            "optimizer.lr=1e-4 to 3e-4",
        )


def _schedule_end(config: RunConfig, algorithm: Algorithm) -> Iterator[Found]:
    optimizer = config.optimizer
    steps = config.steps * (1 if algorithm.needs.clips else config.batch.updates)
    if optimizer.schedule != "constant" and optimizer.total < steps:
        yield (
            "optimizer.total",
            f"the {optimizer.schedule} schedule ends after {optimizer.total} of {steps} optimizer steps (steps x "
            "batch.updates): the rest train at a learning rate of 0",
            f"optimizer.total={steps}",
        )


def _weight_bytes(path: str) -> int:
    """Of the trained network; 0 for a name that is no folder, such as "toy"."""
    return sum(file.stat().st_size for file in Path(path).glob("transformer/*.safetensors"))


_ANY: tuple[Rule, ...] = (_eval_steps, _learning_rate, _schedule_end)
_RL: tuple[Rule, ...] = (_global_batch, _group_size, _few_prompts, _guidance, _bf16_ratio)
