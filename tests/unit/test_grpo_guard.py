"""GRPO-Guard: its ratio is centred, alike at every step and each row's own (T6 of the method notes)."""

import math

import pytest
import torch

from crossrl.config import Batch, SamplingConfig
from crossrl.noise import generator
from crossrl.types import Rows
from crossrl_t2v import kernel
from crossrl_t2v.grpo_guard import GRPOGuard
from crossrl_t2v.policy_gradient import Transition
from tests.unit.family import SHAPE, Net64, loss_of, make, nearby, rows_of

D = 2048


def transition(size, std, seed=0, n=400):
    """Rows with a drift of given rms: (transition, xi d as a mean over elements)."""
    stream = generator("guard", seed)
    xi, d = torch.randn(2, n, D, generator=stream, dtype=torch.float64)
    d *= size.view(-1, 1) / d.square().mean(1, keepdim=True).sqrt()
    s = torch.full((n,), std, dtype=torch.float64)
    log_ratio = (xi * d).mean(1) / std - d.square().mean(1) / (2 * std**2)
    ones = torch.ones(n, dtype=torch.float64)
    return Transition(log_ratio, ones, s, ones, ones, d, None), (xi * d).mean(1)


@pytest.mark.parametrize("std", [0.02, 0.3, 1.5])
def test_the_ratio_has_mean_zero_and_a_deviation_that_no_step_changes(std):
    t, expected = transition(torch.full((400,), 0.01, dtype=torch.float64), std)
    _, metrics = make(GRPOGuard).surrogate(t)
    guard = metrics["guard_log_ratio"]
    torch.testing.assert_close(guard, expected, rtol=1e-9, atol=1e-15)
    spread = 0.01 / math.sqrt(D)
    assert abs(float(guard.mean())) < 4 * spread / math.sqrt(400)
    assert float(guard.std()) == pytest.approx(spread, rel=0.15)
    bias = -(0.01**2) / (2 * std**2)
    assert float(t.log_ratio.mean()) == pytest.approx(bias, abs=4 * spread / std / math.sqrt(400))  # without the guard


def test_the_bias_is_each_rows_own():
    """Half the rows drift, half do not: one number for the batch would shift both."""
    size = torch.cat([torch.full((200,), 0.1), torch.full((200,), 1e-9)]).double()
    t, expected = transition(size, 0.1)
    guard = make(GRPOGuard).surrogate(t)[1]["guard_log_ratio"]
    torch.testing.assert_close(guard, expected, rtol=1e-9, atol=1e-15)
    assert float(guard[200:].abs().max()) < 1e-9


def test_drift_clips_both_sides_alike_where_the_plain_ratio_clips_low_only():
    t, _ = transition(torch.full((400,), 0.02, dtype=torch.float64), 0.1)
    alternating = torch.tensor([1.0, -1.0]).double().repeat(200)
    t = Transition(t.log_ratio, alternating, t.std, t.delta, t.sigma, t.drift, None)
    metrics = make(GRPOGuard).surrogate(t)[1]
    high, low = float(metrics["clip_high"].sum()), float(metrics["clip_low"].sum())
    assert 0.8 < high / low < 1.25
    assert float((t.log_ratio < -1e-4).double().mean()) > 0.95


def test_in_the_loss_drift_is_measured_from_the_action_and_its_noise():
    """log rho_guard of the loss is mean(xi d) with the noise that the rollout drew."""
    algorithm, net = make(GRPOGuard), Net64()
    rows, moved = rows_of(algorithm, net), nearby(net, 1e-2)
    means = [
        kernel.step(rows.x, n(rows.x, rows.sigma), rows.sigma, rows.targets["sigma_next"], algorithm.rule).mean
        for n in (moved, net)
    ]
    expected = (rows.targets["noise"] * (means[0] - means[1])).flatten(1).mean(1)
    got = loss_of(algorithm, moved, rows).metrics["guard_log_ratio"]
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-9)


def test_the_loss_is_weighed_by_one_over_delta():
    algorithm = make(GRPOGuard)
    sigma, after = torch.tensor([[0.9, 0.9], [0.8, 0.4]], dtype=torch.float64)
    x = torch.zeros(2, *SHAPE, dtype=torch.float64)
    out = kernel.step(x, x, sigma, after, algorithm.rule)
    targets = {"x_next": out.mean, "sigma_next": after, "advantage": torch.ones(2).double(), "noise": x}
    targets["log_prob"] = kernel.log_prob(out.mean, out.mean, out.std)
    loss = algorithm.loss({"policy": x}, Rows(x, sigma, torch.arange(2), targets)).loss
    torch.testing.assert_close(loss, torch.tensor([-10.0, -2.0]).double())


@pytest.mark.parametrize(("clip", "rules"), [(2e-6, []), (1e-4, ["guard_clip"])])
def test_flow_grpos_clip_range_is_advised_against(clip, rules):
    found = make(GRPOGuard, clip_range=clip).check(SamplingConfig(), Batch())
    assert [advice.rule for advice in found] == rules
