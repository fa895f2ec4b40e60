"""DiffusionNFT against closed forms (N1 to N6 of the method notes), in fp64 where a form is exact."""

import math

import numpy as np
import pytest
import torch

from crossrl.config import Batch, SamplingConfig
from crossrl.errors import ConfigError
from crossrl.noise import Noise, generator
from crossrl.types import Prompt, Rows, SampleKey, Sampling
from crossrl.validation import validated
from crossrl_t2v.diffusion_nft import DiffusionNFT

SHAPE = (4, 2, 3, 3)
D = math.prod(SHAPE)
KEYS = tuple(SampleKey(Prompt(f"p{b}", "text"), g) for b in range(2) for g in range(4))


def make(**options) -> DiffusionNFT:
    return DiffusionNFT(DiffusionNFT.Config(kl=options.pop("kl", 0.0), **options), (1.0,))


def rows_at(sigma, advantage, clip=5.0):
    """Random rows (fp64) at given sigma and advantage [n], with an old velocity."""
    n = len(sigma)
    x0, eps, old = torch.randn(3, n, *SHAPE, generator=generator("nft"), dtype=torch.float64)
    sigma = torch.tensor(sigma, dtype=torch.float64)
    level = sigma.view(-1, 1, 1, 1, 1)
    r = 0.5 + torch.tensor(advantage, dtype=torch.float64) / (2 * clip)
    return Rows((1 - level) * x0 + level * eps, sigma, torch.arange(n), {"x0": x0, "velocity": eps - x0, "r": r}), old


def gradient(algorithm, rows, old, v=None):
    v = (old if v is None else v).clone().requires_grad_()
    (found,) = torch.autograd.grad(algorithm.loss({"policy": v, "old": old}, rows).loss.sum(), v)
    return found


@pytest.mark.parametrize("beta", [0.1, 1.0, 3.0])
@pytest.mark.parametrize("clip", [2.0, 5.0])
def test_gradient_at_the_old_policy_is_independent_of_beta_and_clip(beta, clip):
    sigma, advantage = [0.9, 0.5, 0.1, 0.7], [1.5, -0.7, 0.4, 0.0]
    rows, old = rows_at(sigma, advantage, clip)
    e, t = old - rows.targets["velocity"], rows.sigma.view(-1, 1, 1, 1, 1)
    a = torch.tensor(advantage, dtype=torch.float64).view(-1, 1, 1, 1, 1)
    wanted = 2 * a * t * e / (D * e.flatten(1).abs().mean(1).view(-1, 1, 1, 1, 1))
    torch.testing.assert_close(gradient(make(beta=beta, adv_clip=clip), rows, old), wanted, rtol=1e-9, atol=1e-12)


def test_pull_is_proportional_to_t_and_even_with_inverse_t():
    rows, old = rows_at([0.9, 0.5, 0.1], [1.0, 1.0, 1.0])
    for i in range(1, 3):  # the same error at every t
        for tensor in (rows.targets["velocity"], old):
            tensor[i] = tensor[0]
    rows.targets["x0"] = rows.x - rows.sigma.view(-1, 1, 1, 1, 1) * rows.targets["velocity"]
    norms = gradient(make(), rows, old).flatten(1).norm(dim=1)
    torch.testing.assert_close(norms / norms[0], rows.sigma / 0.9, rtol=1e-9, atol=0)
    flat = gradient(make(inverse_t=True), rows, old).flatten(1).norm(dim=1)
    torch.testing.assert_close(flat, flat[0].expand(3), rtol=1e-9, atol=0)


@pytest.mark.parametrize("beta", [0.5, 2.0])
def test_value_at_the_old_policy_does_not_measure_progress(beta):
    rows, old = rows_at([0.9, 0.3], [1.0, -1.0])
    e = (old - rows.targets["velocity"]).flatten(1)
    wanted = 5.0 / beta * rows.sigma * e.square().mean(1) / e.abs().mean(1)
    loss = make(beta=beta).loss({"policy": old, "old": old}, rows).loss
    torch.testing.assert_close(loss, wanted, rtol=1e-9, atol=0)


@pytest.mark.parametrize("beta", [0.5, 2.0])
def test_a_neutral_reward_only_pulls_back_to_the_old_policy(beta):
    rows, old = rows_at([0.8] * 3, [0.0] * 3)
    for tensor in (rows.x, rows.targets["x0"], rows.targets["velocity"]):
        tensor[1], tensor[2] = tensor[0], tensor[0]
    away = 0.01 * torch.randn(1, *SHAPE, generator=generator("away"), dtype=torch.float64)
    old = old[:1].expand(3, *SHAPE)
    pull = gradient(make(beta=beta), rows, old, old + away)
    assert (pull.flatten(1) @ away.flatten() > 0).all()  # descent goes back


def test_optimum_is_the_old_policy_plus_two_over_beta_times_the_improvement():
    """Two equally likely clean samples, unweighted errors: v* = v_old + 2/beta alpha (v+* - v_old)."""
    stream = generator("optimum")
    targets = torch.randn(2, 6, generator=stream, dtype=torch.float64)
    r, beta = torch.tensor([0.9, 0.3], dtype=torch.float64), 0.7
    old = targets.mean(0)  # the best prediction without a preference
    alpha = r.mean()
    better = (r @ targets) / r.sum()  # the mean under the distribution that the reward prefers
    v = (old + 2 / beta * alpha * (better - old)).requires_grad_()
    plus, minus = (1 - beta) * old + beta * v, (1 + beta) * old - beta * v
    loss = (r[:, None] * (plus - targets).square() + (1 - r)[:, None] * (minus - targets).square()).sum()
    assert torch.autograd.grad(loss, v)[0].abs().max() < 1e-12


def test_iterating_raises_the_preferred_mode_of_a_mixture():
    """A one-parameter flow over two modes at -1 and 1: the velocity moves towards the rewarded mode."""
    algorithm, theta = make(beta=1.0), torch.zeros(1, dtype=torch.float64)
    stream = generator("mixture")
    for _ in range(40):
        x0 = theta + torch.where(torch.rand(64, generator=stream) < 0.5, -1.0, 1.0).double()
        eps = torch.randn(64, generator=stream, dtype=torch.float64)
        t = torch.rand(64, generator=stream, dtype=torch.float64).clamp(min=0.05)
        reward = (x0 > theta).double() * 2 - 1
        x = (1 - t) * x0 + t * eps
        shape = (64, 1, 1, 1, 1)
        targets = {"x0": x0.view(shape), "velocity": (eps - x0).view(shape), "r": 0.5 + reward / 10}
        rows = Rows(x.view(shape), t, torch.arange(64), targets)
        old = ((x - theta) / t).view(shape)  # predicts x0 = theta
        moved = theta.clone().requires_grad_()
        loss = algorithm.loss({"policy": ((x - moved) / t).view(shape), "old": old}, rows).loss.mean()
        theta = theta - 0.05 * torch.autograd.grad(loss, moved)[0]
    assert float(theta) > 0.3


def test_kl_pulls_to_the_reference_and_is_reported():
    rows, old = rows_at([0.6], [0.0])
    reference = old + 1.0
    algorithm = make(kl=0.5)
    assert algorithm.needs.reference and not make(kl=0.0).needs.reference
    out = algorithm.loss({"policy": old, "old": old, "reference": reference}, rows)
    plain = make(kl=0.0).loss({"policy": old, "old": old}, rows)
    assert float(out.loss - plain.loss) == pytest.approx(0.5) and float(out.metrics["kl"]) == pytest.approx(1.0)


def test_rows_are_the_samples_noised_to_every_step_of_the_grid():
    algorithm = make()
    _, trajectory = algorithm.sample(lambda x, s: 0.3 * x, Noise(0, 1, KEYS, SHAPE), KEYS, Sampling(6, 3.0), True)
    rows = algorithm.rows(trajectory, torch.arange(8.0), 0, 1)
    assert len(rows) == 48 and torch.equal(rows.owner, torch.arange(8).repeat_interleave(6))
    assert (rows.sigma.view(8, 6).sort(1, descending=True).values == trajectory.sigmas[:-1]).all()
    assert len({tuple(s) for s in rows.sigma.view(8, 6).tolist()}) > 1  # an order for each sample
    assert torch.equal(rows.targets["r"], (0.5 + torch.arange(8.0).clamp(max=5) / 10)[rows.owner])
    part = algorithm.rows(
        type(trajectory)(KEYS[2:4], trajectory.sigmas, trajectory.latents[2:4], {}), torch.zeros(2), 0, 1
    )
    assert torch.equal(part.x, rows.x[12:24])  # a function of the sample alone


@pytest.mark.parametrize(
    ("mode", "wanted"),
    [
        ("all", [-1.0, 0.0, 1.0]),
        ("positive_only", [0.0, 0.0, 1.0]),
        ("negative_only", [-1.0, 0.0, 0.0]),
        ("one_only", [0.0, 0.0, 1.0]),
        ("binary", [-1.0, 0.0, 1.0]),
    ],
)
def test_advantage_modes(mode, wanted):
    out = make(adv_mode=mode, std="group").advantages(np.array([[[1.0], [2.0], [3.0]]]), np.ones((1, 3), bool))
    np.testing.assert_allclose(out.values[0], wanted, atol=1e-6)


@pytest.mark.parametrize(
    ("decay", "expected"),
    [
        ("on_policy", [0.0, 0.0, 0.0, 0.0]),
        ("slow", [0.0, 0.075, 0.1, 0.5]),
        ("late", [0.0, 0.0, 0.1875, 0.999]),
    ],
)
def test_decay_schedules_of_the_old_policy(decay, expected):
    assert [make(decay=decay).needs.old(k) for k in (0, 75, 100, 1000)] == pytest.approx(expected)


def test_stochastic_sampler_is_an_option_and_keeps_no_path():
    noise = Noise(0, 1, KEYS, SHAPE)
    ode, _ = make().sample(lambda x, s: 0.3 * x, noise, KEYS, Sampling(6), True)
    sde, trajectory = make(eta=0.5).sample(lambda x, s: 0.3 * x, noise, KEYS, Sampling(6), True)
    assert not torch.equal(ode, sde) and trajectory.latents.shape == (8, 1, *SHAPE)


def test_bad_settings_are_refused_or_advised_against():
    with pytest.raises(ConfigError, match="the same sample G times"):
        make(same_noise=True).check(SamplingConfig(), Batch())
    (advice,) = make().check(SamplingConfig(shift=5.0), Batch())
    assert advice.rule == "nft_density" and "uniform" in advice.fix
    for good in ({"density": "uniform"}, {"inverse_t": True}):
        assert make(**good).check(SamplingConfig(shift=5.0), Batch()) == []
    (advice,) = make(density={"name": "last_k", "k": 3}).check(SamplingConfig(steps=8), Batch())
    assert advice.rule == "nft_density" and "0.38" in advice.seen
    for good in ({"name": "last_k", "k": 4}, {"name": "range", "high": 0.5}):
        assert make(density=good).check(SamplingConfig(steps=8), Batch()) == []
    assert make(density={"name": "last_k", "k": 3}).check(SamplingConfig(steps=8, shift=5.0), Batch()) == []
    with pytest.raises(ConfigError, match="beta"):
        validated(DiffusionNFT.Config, {"beta": 0}, source="test")
