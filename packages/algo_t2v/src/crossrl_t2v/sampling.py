"""What all diffusion algorithms share: the denoising loop, and which of its steps are trained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from crossrl.errors import ConfigError
from crossrl.noise import generator
from crossrl.protocols import NoiseFn, Predict
from crossrl.types import SampleKey, Sampling
from crossrl_t2v import kernel


@dataclass(frozen=True, slots=True)
class Path:
    """One micro-batch of denoised samples.

    `x0` [n, C, F, H, W] on the model's device, the denoised estimate of the last step: what is decoded. Only if kept,
    on CPU in fp32: `states` [n, T, C, F, H, W], the inputs of the T steps, and `log_probs` [n, T - 1] of the drawn
    ones.
    """

    x0: torch.Tensor
    sigmas: torch.Tensor
    states: torch.Tensor | None
    log_probs: torch.Tensor | None


def denoise(
    predict: Predict,
    noise: NoiseFn,
    sampling: Sampling,
    rule: kernel.NoiseRule,
    *,
    same_noise: bool = False,
    keep: bool = False,
) -> Path:
    """Sample from sigma 1 to 0 under `rule` (or the ODE, if `sampling` is not stochastic).

    Noise tags are "init" and "step/k". The last step adds none: its denoised estimate is what is decoded, as in
    DanceGRPO. `same_noise` gives all samples of a group one initial state; not under the ODE, which would then draw
    the same sample G times.
    """
    rule = rule if sampling.stochastic else kernel.ODE
    schedule = kernel.sigmas(sampling.steps, sampling.shift)
    x = noise("init", shared=same_noise and sampling.stochastic)
    states, log_probs = [], []
    for k in range(sampling.steps):
        sigma, after = schedule[k].expand(len(x)), schedule[k + 1].expand(len(x))
        if keep:
            states.append(x.cpu())
        out = kernel.step(x, predict(x, sigma), sigma, after, rule)
        if k == sampling.steps - 1:
            break
        x = out.mean
        if rule.level:
            x = out.mean + out.std * noise(f"step/{k}").to(out.mean)
            if keep:
                log_probs.append(kernel.log_prob(x, out.mean, out.std).cpu())
    if not keep:
        return Path(out.x0, schedule, None, None)
    return Path(out.x0, schedule, torch.stack(states, 1), torch.stack(log_probs, 1) if log_probs else None)


def trained_steps(steps: int, fraction: float) -> int:
    """How many of T `steps` train: int((T - 1) fraction); the last step, whose noise no reward sees, never does.

    Raises `ConfigError` if that is none.
    """
    count = int((steps - 1) * fraction)
    if count < 1:
        raise ConfigError(
            f"timestep_fraction={fraction} of {steps} sampling steps, the last never trained, leaves none to train",
            where="algorithm.timestep_fraction",
            fix="raise timestep_fraction or sampling.steps",
        )
    return count


def select_steps(keys: Sequence[SampleKey], steps: int, fraction: float, seed: int, step: int) -> torch.Tensor:
    """Indices [n, S] int64 of the S = `trained_steps` steps that train: the head of a permutation for each sample.

    A function of (seed, step, prompt, index) alone, so the same at every world size and micro-batch.
    """
    count = trained_steps(steps, fraction)
    orders = [
        torch.randperm(steps - 1, generator=generator(seed, step, key.prompt.id, key.index, "steps")) for key in keys
    ]
    return torch.stack(orders)[:, :count]
