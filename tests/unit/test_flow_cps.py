"""Flow-CPS: the ratio without normaliser, and that its clip range is its own."""

import pytest
import torch

from crossrl.config import Batch, SamplingConfig
from crossrl_t2v import kernel
from crossrl_t2v.flow_cps import FlowCPS
from tests.unit.family import Net64, loss_of, make, nearby, rows_of, trajectory_of


def test_the_clipped_ratio_is_the_difference_of_unnormalised_squares():
    algorithm, net = make(FlowCPS, clip_range=0.9), Net64()
    rows, moved = rows_of(algorithm, net, torch.ones(12).double()), nearby(net)
    squares = []
    for n in (moved, net):
        out = kernel.step(rows.x, n(rows.x, rows.sigma), rows.sigma, rows.targets["sigma_next"], algorithm.rule)
        squares.append((rows.targets["x_next"] - out.mean).square().flatten(1).mean(1))
    expected = torch.exp(-squares[0] + squares[1])
    torch.testing.assert_close(-loss_of(algorithm, moved, rows).loss, expected, rtol=1e-12, atol=0)


def test_rollout_follows_the_rule_and_trains_all_steps_but_the_last():
    algorithm, net = make(FlowCPS), Net64()
    path = trajectory_of(algorithm, net)
    assert algorithm.rule == kernel.NoiseRule("cps", 0.8) and path.data["log_prob"].shape == (12, 7)


def test_the_kl_has_one_form_and_uses_the_full_deviation():
    algorithm, net = make(FlowCPS, kl=1.0), Net64()
    rows, reference = rows_of(algorithm, net, torch.zeros(12).double()), nearby(net)
    out = [
        kernel.step(rows.x, n(rows.x, rows.sigma), rows.sigma, rows.targets["sigma_next"], algorithm.rule)
        for n in (net, reference)
    ]
    expected = (out[0].mean - out[1].mean).square().flatten(1).mean(1) / (2 * out[0].std.flatten() ** 2)
    torch.testing.assert_close(loss_of(algorithm, net, rows, reference).loss, expected)


@pytest.mark.parametrize(("clip", "rules"), [(1e-5, []), (1e-4, ["cps_clip"])])
def test_flow_grpos_clip_range_is_advised_against(clip, rules):
    found = make(FlowCPS, clip_range=clip).check(SamplingConfig(), Batch())
    assert [advice.rule for advice in found] == rules
