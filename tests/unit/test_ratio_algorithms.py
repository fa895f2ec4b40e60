"""What holds of every algorithm with a ratio: 1 before the first update, the policy gradient there, invariances."""

import pytest
import torch

from crossrl.types import Trajectory
from crossrl_t2v import kernel
from crossrl_t2v.awm import AWM
from crossrl_t2v.dance_grpo import DanceGRPO
from crossrl_t2v.flow_cps import FlowCPS
from crossrl_t2v.flow_dppo import FlowDPPO
from crossrl_t2v.flow_grpo import FlowGRPO
from crossrl_t2v.grpo_guard import GRPOGuard
from crossrl_t2v.mix_grpo import MixGRPO
from crossrl_t2v.temp_flow import TempFlow
from tests.unit.family import Net64, gradient, loss_of, make, nearby, rows_of, trajectory_of

CASES = {  # algorithm and the declared weight of a row's policy gradient, of the step's std and delta
    "dance_grpo": (make(DanceGRPO), lambda s, delta: 1),
    "flow_grpo": (make(FlowGRPO), lambda s, delta: 1),
    "flow_grpo_window": (make(FlowGRPO, window=3, kl=0.0), lambda s, delta: 1),
    "flow_cps": (make(FlowCPS), lambda s, delta: 2 * s**2),
    "mix_grpo": (make(MixGRPO), lambda s, delta: 1),
    "grpo_guard": (make(GRPOGuard), lambda s, delta: s / delta),
    "flow_dppo": (make(FlowDPPO), lambda s, delta: 1),
    "temp_flow": (make(TempFlow), lambda s, delta: 2.25 * s),
    "awm": (make(AWM), lambda s, delta: 1),
}
every = pytest.mark.parametrize("name", CASES)


def log_prob(algorithm, net, rows):
    """(log p [n] with the graph, std [n], delta [n])."""
    v = net(rows.x, rows.sigma)
    if isinstance(algorithm, AWM):
        return algorithm.log_prob(v, rows.targets["velocity"], rows.sigma), None, None
    out = kernel.step(rows.x, v, rows.sigma, rows.targets["sigma_next"], algorithm.rule)
    new = kernel.log_prob(rows.targets["x_next"], out.mean, out.std)
    return new, out.std.flatten(), rows.sigma - rows.targets["sigma_next"]


@every
def test_before_the_first_update_the_ratio_is_one_and_nothing_is_clipped(name):
    algorithm, net = CASES[name][0], Net64()
    out = loss_of(algorithm, net, rows_of(algorithm, net))
    assert float(out.metrics["ratio_deviation_max"].max()) < 1e-12
    for held in ("clip_high", "clip_low", "masked_high", "masked_low", "kl", "kl_old"):
        assert float(out.metrics.get(held, torch.zeros(1)).abs().max()) == 0
    assert all(m.shape == out.loss.shape and not m.requires_grad for m in out.metrics.values())


@every
def test_there_the_gradient_is_the_policy_gradient_with_the_declared_weight_of_a_row(name):
    algorithm, weight = CASES[name]
    net = Net64()
    rows = rows_of(algorithm, net)
    got = gradient(loss_of(algorithm, net, rows).loss.mean(), net)
    new, std, delta = log_prob(algorithm, net, rows)
    weights = 1 if std is None else weight(std, delta)
    torch.testing.assert_close(got, gradient(-(weights * rows.targets["advantage"] * new).mean(), net))
    assert float(got.norm()) > 0


@every
@pytest.mark.parametrize("micro", [1, 5])
def test_micro_batches_do_not_change_the_gradient(name, micro):
    algorithm, net = CASES[name][0], Net64()
    rows, moved = rows_of(algorithm, net), nearby(net, 1e-3)
    whole = gradient(loss_of(algorithm, moved, rows, net, net).loss.mean(), moved)
    parts = [rows.take(slice(i, i + micro)) for i in range(0, len(rows), micro)]
    summed = sum(gradient(loss_of(algorithm, moved, p, net, net).loss.sum() / len(rows), moved) for p in parts)
    torch.testing.assert_close(whole, summed)


@every
def test_the_order_of_samples_does_not_matter(name):
    algorithm, net = CASES[name][0], Net64()
    whole, advantages, moved = trajectory_of(algorithm, net), torch.linspace(-1, 1, 12).double(), nearby(net, 1e-3)
    order = torch.randperm(12, generator=torch.Generator().manual_seed(0))
    keys = tuple(whole.keys[i] for i in order)
    data = {n: t[order] for n, t in whole.data.items()}
    mixed = Trajectory(keys, whole.sigmas, whole.latents[order], data)
    one, two = algorithm.rows(whole, advantages, 0, 1), algorithm.rows(mixed, advantages[order], 0, 1)
    got = [gradient(loss_of(algorithm, moved, rows, net, net).loss.mean(), moved) for rows in (one, two)]
    torch.testing.assert_close(*got)


@every
def test_several_reward_terms_add_up(name):
    algorithm, net = CASES[name][0], Net64()
    advantages, moved = torch.randn(12, 2, generator=torch.Generator().manual_seed(0)).double(), nearby(net, 1e-3)
    both, first, second = (
        loss_of(algorithm, moved, rows_of(algorithm, net, a), net, net)
        for a in (advantages, advantages[:, 0], advantages[:, 1])
    )
    held = sum(
        getattr(algorithm.options, k, 0) * both.metrics[k] for k in ("kl", "kl_old") if k in both.metrics
    )  # counted once, not for each term
    torch.testing.assert_close(both.loss, first.loss + second.loss - held)
