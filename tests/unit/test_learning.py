"""Every algorithm learns (T24 of the method notes): a flow over two modes, a reward that prefers one of them.

The policy is the exact velocity of a mixture of two narrow Gaussians; its one parameter is the log-odds of the modes.
So the only way to a better reward is to shift mass from mode to mode, and the mass can be read off.
"""

import importlib
from functools import partial

import numpy as np
import pytest
import torch

from crossrl.config import Batch, SamplingConfig
from crossrl.noise import Noise, generator
from crossrl.types import Prompt, SampleKey, Sampling

SHAPE, MODE, WIDTH = (1, 1, 1, 2), 1.0, 0.3
PROMPTS, SAMPLES, STEPS, ITERATIONS = 4, 16, 8, 12
METHODS = {
    "dance_grpo:DanceGRPO": {"eta": 0.7, "clip_range": 0.1, "timestep_fraction": 1.0, "same_noise": False},
    "flow_grpo:FlowGRPO": {"clip_range": 0.1, "kl": 0.01},
    "flow_cps:FlowCPS": {"clip_range": 0.1},
    "mix_grpo:MixGRPO": {"clip_range": 0.1, "tau": 2, "same_noise": False},
    "grpo_guard:GRPOGuard": {"clip_range": 0.1},
    "flow_dppo:FlowDPPO": {"tau": 0.1},
    "temp_flow:TempFlow": {"clip_range": 0.1, "kl": 0.0},
    "diffusion_nft:DiffusionNFT": {"beta": 0.5, "density": "uniform"},
    "awm:AWM": {"density": "uniform", "kl_old": 0.0, "clip_range": 0.2},
    "dpo:DPO": {"beta": 10.0, "density": "uniform", "best_of_n": None, "rows_per_sample": 4},
}


def velocity(log_odds, x, sigma):
    """Of the mixture with weights sigmoid(+-log_odds) on modes at +-MODE in the first coordinate, 0 in the second."""
    level = sigma.view(-1, 1, 1, 1, 1).clamp(min=1e-3)
    variance = (1 - level) ** 2 * WIDTH**2 + level**2
    centres = torch.zeros(2, 1, *SHAPE)
    centres[0, ..., 0], centres[1, ..., 0] = MODE, -MODE
    away = x - (1 - level) * centres
    prior = torch.nn.functional.logsigmoid(torch.stack([log_odds, -log_odds]))
    score = prior.view(2, 1) - (away.square() / (2 * variance)).flatten(2).sum(2)
    clean = centres + (1 - level) * WIDTH**2 / variance * away
    return (x - (score.softmax(0).view(2, -1, 1, 1, 1, 1) * clean).sum(0)) / level


def mass(log_odds, seed):
    """The part of the ODE's samples that lies in the preferred mode."""
    keys = [SampleKey(Prompt("eval", ""), i) for i in range(512)]
    algorithm = build("dance_grpo:DanceGRPO")
    with torch.no_grad():
        x, _ = algorithm.sample(
            partial(velocity, log_odds), Noise(seed, 0, keys, SHAPE), keys, Sampling(16, stochastic=False), False
        )
    return float((x[..., 0] > 0).float().mean())


def build(method):
    module, name = method.split(":")
    cls = getattr(importlib.import_module(f"crossrl_t2v.{module}"), name)
    algorithm = cls(cls.Config(**METHODS[method]), (1.0,))
    assert algorithm.check(SamplingConfig(steps=STEPS), Batch(samples=SAMPLES)) is not None
    return algorithm


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("method", METHODS)
def test_the_preferred_mode_gains_mass(method, seed):
    algorithm = build(method)
    log_odds, old, base = torch.zeros(1, requires_grad=True), torch.zeros(1), torch.zeros(1)
    optimizer = torch.optim.Adam([log_odds], lr=0.15)
    keys = [SampleKey(Prompt(f"p{b}", ""), g) for b in range(PROMPTS) for g in range(SAMPLES)]
    for step in range(ITERATIONS):
        sampler = log_odds.detach() if algorithm.needs.old is None else old
        with torch.no_grad():
            x0, trajectory = algorithm.sample(
                partial(velocity, sampler), Noise(seed, step, keys, SHAPE), keys, Sampling(STEPS), True
            )
        noise = 0.1 * torch.randn(len(keys), generator=generator(seed, step, "reward"))  # a judge is never exact
        scores = ((x0[..., 0].flatten() > 0).float() + noise).view(PROMPTS, SAMPLES, 1).double().numpy()
        out = algorithm.advantages(scores, np.ones((PROMPTS, SAMPLES), bool))
        advantages = torch.from_numpy(out.values).float().flatten()
        rows = algorithm.rows(trajectory, advantages, seed, step)
        at = {"policy": log_odds, "old": old, "reference": base}
        loss = algorithm.loss({name: velocity(odds, rows.x, rows.sigma) for name, odds in at.items()}, rows).loss.mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if algorithm.needs.old is not None:
            keep = algorithm.needs.old(step)
            old = keep * old + (1 - keep) * log_odds.detach()
    assert mass(base, seed) == pytest.approx(0.5, abs=0.06)
    assert mass(log_odds.detach(), seed) > 0.6
