"""DanceGRPO against closed forms (T4, T16, P1, P2 of the method notes) with a small network."""

import math

import numpy as np
import pytest
import torch

from crossrl.config import Batch, SamplingConfig
from crossrl.errors import ConfigError
from crossrl.noise import Noise, generator
from crossrl.types import Prompt, Rows, SampleKey, Sampling
from crossrl.validation import validated
from crossrl_t2v import kernel
from crossrl_t2v.dance_grpo import DanceGRPO
from crossrl_t2v.policy_gradient import clipped

SHAPE = (4, 2, 4, 4)
KEYS = tuple(SampleKey(Prompt(f"p{b}", "text"), g) for b in range(2) for g in range(6))
SAMPLING = Sampling(steps=8, shift=1.0)


class Net(torch.nn.Module):
    """(x, sigma) -> velocity: a small convolution that knows sigma."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.inner, self.outer = torch.nn.Conv3d(5, 8, 3, padding=1), torch.nn.Conv3d(8, 4, 3, padding=1)
        for p in self.parameters():
            p.data.normal_(generator=generator("net", seed)).mul_(0.2)

    def forward(self, x, sigma):
        level = sigma.view(-1, 1, 1, 1, 1).expand(-1, 1, *x.shape[2:])
        return self.outer(torch.tanh(self.inner(torch.cat([x, level], 1))))


def make(**options) -> DanceGRPO:
    return DanceGRPO(DanceGRPO.Config(**options), (1.0,))


def rollout(algorithm, net, keys=KEYS, sampling=SAMPLING):
    with torch.no_grad():
        return algorithm.sample(net, Noise(0, 1, keys, SHAPE), keys, sampling, True)


def rows_of(algorithm, net, advantages=None):
    _, trajectory = rollout(algorithm, net)
    if advantages is None:
        scores = np.random.default_rng(0).normal(size=(2, 6, 1))
        advantages = torch.from_numpy(algorithm.advantages(scores, np.ones((2, 6), bool)).values).float().flatten()
    return algorithm.rows(trajectory, advantages, 0, 1)


def loss_of(algorithm, net, rows):
    return algorithm.loss({"policy": net(rows.x, rows.sigma)}, rows)


def test_published_defaults():
    options = DanceGRPO.Config()
    assert (options.eta, options.clip_range, options.adv_clip) == (0.3, 1e-4, 5.0)
    assert (options.timestep_fraction, options.same_noise, options.best_of_n) == (0.6, True, None)


def test_rows_are_the_chosen_steps_of_every_sample():
    algorithm, net = make(), Net()
    _, trajectory = rollout(algorithm, net)
    rows = algorithm.rows(trajectory, torch.arange(12.0), 0, 1)
    assert len(rows) == 12 * 4 and rows.owner.tolist() == [i for i in range(12) for _ in range(4)]
    assert (rows.targets["sigma_next"] > 0).all()  # the last step never trains
    assert torch.equal(rows.targets["advantage"], rows.owner.float())
    for i in range(len(rows)):
        k = int((trajectory.sigmas == rows.sigma[i]).nonzero())
        owner = rows.owner[i]
        assert torch.equal(rows.x[i], trajectory.latents[owner, k])
        assert torch.equal(rows.targets["x_next"][i], trajectory.latents[owner, k + 1])
        assert rows.targets["sigma_next"][i] == trajectory.sigmas[k + 1]
        assert rows.targets["log_prob"][i] == trajectory.data["log_prob"][owner, k]


@pytest.mark.parametrize("eta", [0.3, 1.2])
def test_before_the_first_update_the_ratio_is_one_and_the_loss_is_zero(eta):
    algorithm, net = make(eta=eta, timestep_fraction=1.0), Net()
    out = loss_of(algorithm, net, rows_of(algorithm, net))
    assert float(out.metrics["ratio_deviation_max"].max()) < 1e-6
    assert abs(float(out.loss.mean())) < 1e-6  # -mean(A) over whole groups
    assert out.metrics["clip_low"].sum() == 0 and out.metrics["clip_high"].sum() == 0
    assert out.loss.shape == (84,) and all(m.shape == (84,) and not m.requires_grad for m in out.metrics.values())


def test_with_equal_shapes_the_ratio_is_exactly_one():
    algorithm, net = make(), Net()
    _, trajectory = rollout(algorithm, net)
    for k in range(7):
        sigma, after = trajectory.sigmas[k].expand(12), trajectory.sigmas[k + 1].expand(12)
        targets = {"x_next": trajectory.latents[:, k + 1], "sigma_next": after, "advantage": torch.ones(12)}
        targets["log_prob"] = trajectory.data["log_prob"][:, k]
        out = loss_of(algorithm, net, Rows(trajectory.latents[:, k], sigma, torch.arange(12), targets))
        assert (out.metrics["ratio"] == 1).all() and (out.loss == -1).all()


@pytest.mark.parametrize(("std", "bias"), [(0.27, -1e-6), (0.067, -4.1e-4), (0.03, -1.5e-3)])
def test_a_trajectory_stored_in_bf16_biases_the_ratio_low(std, bias):
    """Why trajectories are fp32: the rounding error's square over 2 std^2, against a clip range of 1e-4."""
    stream, s = generator("bf16"), torch.full((64, 1), std, dtype=torch.float64)
    mean, noise = torch.randn(2, 64, 8192, generator=stream, dtype=torch.float64)
    drawn = mean + std * noise
    shift = kernel.log_prob(drawn.bfloat16(), mean, s) - kernel.log_prob(drawn, mean, s)
    rounding = (drawn.bfloat16().double() - drawn).square().mean() / (2 * std**2)
    assert float(shift.mean()) == pytest.approx(-float(rounding), abs=3e-5)
    assert float(shift.mean()) == pytest.approx(bias, rel=0.35, abs=3e-5)


def test_drift_of_the_mean_biases_the_log_ratio_by_half_its_square_and_clips_low_only():
    """kappa, the drift in units of the step's std: the log-ratio has mean -kappa^2 / 2, so clipping is one-sided."""
    algorithm, net = make(timestep_fraction=1.0), Net()
    rows = rows_of(algorithm, net, torch.tensor([1.0, -1.0]).repeat(6))
    v, kappa = net(rows.x, rows.sigma).detach(), 0.1
    step = kernel.step(rows.x, v, rows.sigma, rows.targets["sigma_next"], algorithm.rule)
    slope = (
        kernel.step(rows.x, v + 1, rows.sigma, rows.targets["sigma_next"], algorithm.rule).mean - step.mean
    ) / step.std
    direction = torch.randn(v.shape, generator=generator("drift"))
    direction /= direction.flatten(1).square().mean(1).sqrt().view(-1, 1, 1, 1, 1)
    out = algorithm.loss({"policy": v + kappa * direction / slope}, rows)
    spread = kappa / math.sqrt(math.prod(SHAPE))
    assert float(out.metrics["log_ratio"].mean()) == pytest.approx(-(kappa**2) / 2, abs=4 * spread / math.sqrt(84))
    assert float(out.metrics["log_ratio"].std()) == pytest.approx(spread, rel=0.3)
    assert out.metrics["clip_low"].sum() > 2 * out.metrics["clip_high"].sum()


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope", "clipped"),
    [
        (1.5, 2.0, -2.4, 0.0, "clip_high"),
        (1.5, -2.0, 3.0, 3.0, None),
        (0.5, 2.0, -1.0, -1.0, None),
        (0.5, -2.0, 1.6, 0.0, "clip_low"),
        (1.1, 2.0, -2.2, -2.2, None),
        (0.9, -2.0, 1.8, 1.8, None),
        (1.5, 0.0, 0.0, 0.0, None),
    ],
)
def test_clipping_truth_table(ratio, advantage, loss, slope, clipped):
    """Loss and d loss / d log p of one row; clipping takes away the gradient only where it would go on outwards."""
    algorithm, x = make(clip_range=0.2), torch.zeros(1, *SHAPE)
    sigma, after = torch.tensor([0.5]), torch.tensor([0.4])
    v = torch.zeros(1, *SHAPE, requires_grad=True)
    out = kernel.step(x, v, sigma, after, algorithm.rule)
    x_next = out.mean.detach() + out.std
    new = kernel.log_prob(x_next, out.mean, out.std)
    targets = {"x_next": x_next, "sigma_next": after, "log_prob": new.detach() - math.log(ratio)}
    targets["advantage"] = torch.tensor([advantage])
    result = algorithm.loss({"policy": v}, Rows(x, sigma, torch.zeros(1, dtype=torch.int64), targets))
    assert float(result.loss) == pytest.approx(loss, rel=1e-5)
    (of_loss,) = torch.autograd.grad(result.loss.sum(), v, retain_graph=True)
    (of_log_prob,) = torch.autograd.grad(new.sum(), v)
    torch.testing.assert_close(of_loss, slope * of_log_prob, rtol=1e-4, atol=1e-7)
    for name in ("clip_high", "clip_low"):
        assert float(result.metrics[name]) == (name == clipped)


def test_each_reward_may_have_its_own_clipped_term():
    """Two rewards that disagree: one term is clipped, the other still pulls; a summed advantage would hide that."""
    log_ratio, advantage = torch.tensor([0.1, 0.1]), torch.tensor([[2.0, -0.5], [1.0, 1.0]])
    loss, metrics = clipped(log_ratio, advantage, 0.05)
    terms = [clipped(log_ratio, advantage[:, r], 0.05)[0] for r in range(2)]
    assert torch.equal(loss, terms[0] + terms[1])
    assert metrics["clip_high"].tolist() == [0.5, 1.0] and metrics["clip_low"].tolist() == [0.0, 0.0]
    assert not torch.equal(loss[:1], clipped(log_ratio[:1], advantage.sum(1)[:1], 0.05)[0])


def test_gradient_at_ratio_one_is_that_of_the_advantage_weighted_log_probability():
    algorithm, net = make(), Net()
    rows = rows_of(algorithm, net)
    got = torch.autograd.grad(loss_of(algorithm, net, rows).loss.mean(), list(net.parameters()))
    out = kernel.step(rows.x, net(rows.x, rows.sigma), rows.sigma, rows.targets["sigma_next"], algorithm.rule)
    surrogate = -(rows.targets["advantage"] * kernel.log_prob(rows.targets["x_next"], out.mean, out.std)).mean()
    for a, b in zip(got, torch.autograd.grad(surrogate, list(net.parameters())), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_gradient_of_a_linear_toy_depends_on_the_drawn_noise_alone():
    """v = w x: d loss / d w of one step with ratio 1 is -A mean(noise x) d(mean) / d(v) / std, a closed form."""
    algorithm = make(eta=0.8)
    x, noise = torch.randn(2, 2, *SHAPE, generator=generator("linear"), dtype=torch.float64)
    sigma, after = torch.tensor([0.8, 0.5]).double(), torch.tensor([0.6, 0.2]).double()
    w = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    out = kernel.step(x, w * x, sigma, after, algorithm.rule)
    x_next = (out.mean + out.std * noise).detach()
    targets = {"x_next": x_next, "sigma_next": after, "advantage": torch.tensor([1.0, -1.0]).double()}
    targets["log_prob"] = kernel.log_prob(x_next, out.mean, out.std).detach()
    rows = Rows(x, sigma, torch.arange(2), targets)
    (got,) = torch.autograd.grad(algorithm.loss({"policy": w * x}, rows).loss.sum(), w)
    delta = sigma - after
    slope = -delta * (1 + 0.64 * (1 - sigma) / (2 * sigma))
    per_row = (noise * x).flatten(1).mean(1) * slope / (0.8 * delta.sqrt())
    assert float(got) == pytest.approx(float(-(targets["advantage"] * per_row).sum()), rel=1e-9)


def test_one_update_raises_the_log_probability_of_good_samples():
    algorithm, net = make(clip_range=0.2), Net()
    rows = rows_of(algorithm, net, torch.tensor([1.0, -1.0]).repeat(6))
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-2)
    loss_of(algorithm, net, rows).loss.mean().backward()
    optimizer.step()
    change = loss_of(algorithm, net, rows).metrics["log_ratio"]
    good = rows.targets["advantage"] > 0
    assert change[good].mean() > 0 > change[~good].mean()


@pytest.mark.parametrize("micro", [1, 7, 48])
def test_micro_batches_do_not_change_the_gradient(micro):
    algorithm, net = make(), Net()
    rows = rows_of(algorithm, net)
    whole = torch.autograd.grad(loss_of(algorithm, net, rows).loss.mean(), list(net.parameters()))
    parts = [rows.take(slice(i, i + micro)) for i in range(0, len(rows), micro)]
    sums = [
        torch.autograd.grad(loss_of(algorithm, net, p).loss.sum() / len(rows), list(net.parameters())) for p in parts
    ]
    for a, b in zip(whole, (sum(g) for g in zip(*sums, strict=True)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


def test_evaluation_keeps_nothing_and_draws_distinct_samples():
    latents, trajectory = make().sample(Net(), Noise(0, 1, KEYS, SHAPE), KEYS, Sampling(8, stochastic=False), False)
    assert trajectory is None and len(latents.detach().flatten(1).unique(dim=0)) == 12


def test_trajectory_is_fp32_and_holds_no_more_than_the_inputs_of_the_steps():
    latents, trajectory = rollout(make(), Net())
    assert latents.shape == (12, *SHAPE) and trajectory.latents.shape == (12, 8, *SHAPE)
    assert trajectory.latents.dtype == trajectory.data["log_prob"].dtype == torch.float32
    assert trajectory.keys == KEYS and len(trajectory.sigmas) == 9


@pytest.mark.parametrize("eta", [0, 0.0, -0.1])
def test_a_ratio_without_noise_is_refused(eta):
    with pytest.raises(ConfigError, match="no ratio to train"):
        validated(DanceGRPO.Config, {"name": "dance_grpo", "eta": eta}, source="test")


def test_impossible_configs_are_refused_before_anything_runs():
    with pytest.raises(ConfigError, match="leaves none to train"):
        make().check(SamplingConfig(steps=2), Batch())
    with pytest.raises(ConfigError, match="best_of_n=8 of groups of 4"):
        make(best_of_n=8).check(SamplingConfig(), Batch(samples=4))
    make(best_of_n=4).check(SamplingConfig(), Batch(samples=4))


def test_a_deterministic_rollout_is_refused_before_the_network_is_asked():
    with pytest.raises(ConfigError, match="deterministic sampler"):
        make().sample(None, Noise(0, 1, KEYS, SHAPE), KEYS, Sampling(8, stochastic=False), True)


def test_unknown_options_are_refused_with_a_suggestion():
    with pytest.raises(ConfigError, match="did you mean 'clip_range'"):
        validated(DanceGRPO.Config, {"clip_rang": 1}, source="test")
