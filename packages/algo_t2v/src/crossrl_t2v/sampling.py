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
    on CPU in fp32, for the W steps that drew noise: `states` [n, W + 1, C, F, H, W], their inputs and the last one's
    outcome, and `log_probs` [n, W].
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
    noisy: range | None = None,
    same_noise: bool = False,
    keep: bool = False,
) -> Path:
    """Sample from sigma 1 to 0 under `rule` (or the ODE, if `sampling` is not stochastic).

    Noise tags are "init" and "step/k". Steps outside of `noisy` are ODE steps; so is the last of all, whose denoised
    estimate is what is decoded, as in DanceGRPO. `same_noise` gives all samples of a group one initial state; not under
    the ODE, which would then draw the same sample G times.
    """
    rule = rule if sampling.stochastic else kernel.ODE
    schedule = kernel.sigmas(sampling.steps, sampling.shift)
    noisy = range(sampling.steps - 1) if noisy is None else noisy
    x = noise("init", shared=same_noise and sampling.stochastic)
    states, log_probs = [], []
    for k in range(sampling.steps):
        if keep and (k in noisy or k - 1 in noisy):
            states.append(x.cpu())
        sigma, after = schedule[k].expand(len(x)), schedule[k + 1].expand(len(x))
        drawn = rule.level != 0 and k in noisy
        out = kernel.step(x, predict(x, sigma), sigma, after, rule if drawn else kernel.ODE)
        if k == sampling.steps - 1:
            break
        x = out.mean
        if drawn:
            x = out.mean + out.std * noise(f"step/{k}").to(out.mean)
            if keep:
                log_probs.append(kernel.log_prob(x, out.mean, out.std).cpu())
    if not keep:
        return Path(out.x0, schedule, None, None)
    return Path(out.x0, schedule, torch.stack(states, 1), torch.stack(log_probs, 1) if log_probs else None)


def random_window(size: int, within: range, *stream: int | str) -> range:
    """`size` consecutive steps of `within`, each start equally likely; a function of the names `stream`."""
    starts = len(within) - size + 1
    start = int(torch.randint(starts, (1,), generator=generator(*stream, "window")))
    return within[start : start + size]


def check_window(size: int, within: range, steps: int) -> None:
    """Raise `ConfigError` unless `size` steps fit in `within`, and `within` in the steps that can draw noise.

    The last of `steps` cannot: what is decoded is its denoised estimate.
    """
    if within.start < 0 or within.stop > steps - 1 or size > len(within):
        raise ConfigError(
            f"a window of {size} steps within steps {within.start} to {within.stop - 1} of a schedule of {steps}, "
            f"whose steps 0 to {steps - 2} can draw noise",
            where="algorithm.window",
            fix="make the window smaller, or raise sampling.steps",
        )


def trained_steps(candidates: int, fraction: float) -> int:
    """How many of the steps that draw noise train: int(candidates fraction). Raises `ConfigError` if that is none."""
    count = int(candidates * fraction)
    if count < 1:
        raise ConfigError(
            f"timestep_fraction={fraction} of {candidates} steps that draw noise leaves none to train",
            where="algorithm.timestep_fraction",
            fix="raise timestep_fraction or sampling.steps",
        )
    return count


def select_steps(keys: Sequence[SampleKey], candidates: int, fraction: float, seed: int, step: int) -> torch.Tensor:
    """Places [n, S] int64, of S = `trained_steps` among the candidates: the head of a permutation for each sample.

    A function of (seed, step, prompt, index) alone, so the same at every world size and micro-batch.
    """
    count = trained_steps(candidates, fraction)
    orders = [
        torch.randperm(candidates, generator=generator(seed, step, key.prompt.id, key.index, "steps")) for key in keys
    ]
    return torch.stack(orders)[:, :count]
