"""Flow-DPPO: the mask's truth table (T7 of the method notes) and its divergence."""

import math

import pytest
import torch

from crossrl_t2v import kernel
from crossrl_t2v.flow_dppo import FlowDPPO
from crossrl_t2v.policy_gradient import Transition
from tests.unit.family import Net64, loss_of, make, nearby, rows_of


@pytest.mark.parametrize("far", [False, True])
@pytest.mark.parametrize("ratio", [1.5, 0.5])
@pytest.mark.parametrize("advantage", [2.0, -2.0])
def test_masked_iff_far_and_leading_away(far, ratio, advantage):
    tau, std = 1e-5, 0.5
    drift = math.sqrt(2 * std**2 * tau) * (1.001 if far else 0.999)
    log_ratio = torch.tensor([math.log(ratio)], requires_grad=True)
    one = torch.ones(1)
    t = Transition(log_ratio, advantage * one, std * one, one, one, torch.full((1, 8), drift), None)
    loss, metrics = make(FlowDPPO, tau=tau).surrogate(t)
    (slope,) = torch.autograd.grad(loss.sum(), log_ratio)
    away = (ratio > 1) == (advantage > 0)
    expected = 0.0 if far and away else -advantage * ratio
    assert float(loss) == pytest.approx(expected) and float(slope) == pytest.approx(expected)
    assert float(metrics["masked_high"]) == (far and away and ratio > 1)
    assert float(metrics["masked_low"]) == (far and away and ratio < 1)


def test_the_mask_is_closed_at_tau():
    one = torch.ones(1)
    t = Transition(0.1 * one, one, one, one, one, torch.ones(1, 8), None)
    assert float(make(FlowDPPO, tau=0.5).surrogate(t)[0]) == 0


def test_the_divergence_is_that_of_the_new_and_the_old_gaussian():
    algorithm, net = make(FlowDPPO), Net64()
    rows, moved = rows_of(algorithm, net), nearby(net, 1e-2)
    out = [
        kernel.step(rows.x, n(rows.x, rows.sigma), rows.sigma, rows.targets["sigma_next"], algorithm.rule)
        for n in (moved, net)
    ]
    normal = [torch.distributions.Normal(o.mean, o.std.expand_as(o.mean)) for o in out]
    expected = torch.distributions.kl_divergence(*normal).flatten(1).mean(1)
    torch.testing.assert_close(loss_of(algorithm, moved, rows).metrics["divergence"], expected, rtol=1e-5, atol=1e-12)
