"""TempFlow-GRPO: a group shares all up to the branching step, which alone has noise; the weight of its loss."""

import pytest
import torch

from crossrl.config import Batch, SamplingConfig
from crossrl.errors import ConfigError
from crossrl.noise import Noise
from crossrl.validation import validated
from crossrl_t2v import kernel
from crossrl_t2v.policy_gradient import Transition
from crossrl_t2v.temp_flow import TempFlow
from tests.unit.family import KEYS, SAMPLING, SHAPE, Net64, make, rows_of, trajectory_of


@pytest.mark.parametrize("k", [0, 3, 6])
def test_a_group_shares_the_prefix_and_differs_by_the_noise_of_the_branch_alone(k):
    algorithm, net = make(TempFlow, window_range=(k, k + 1)), Net64()
    path = trajectory_of(algorithm, net)
    groups = path.latents.unflatten(0, (2, 6))
    assert path.latents.shape[1] == 2
    torch.testing.assert_close(groups[:, :, 0], groups[:, :1, 0].expand_as(groups[:, :, 0]), rtol=1e-12, atol=1e-12)
    assert not torch.equal(groups[0, 0, 0], groups[1, 0, 0])
    sigma, after = path.sigmas[k].expand(12), path.sigmas[k + 1].expand(12)
    out = kernel.step(path.latents[:, 0], net(path.latents[:, 0], sigma), sigma, after, algorithm.rule)
    noise = Noise(0, 1, KEYS, SHAPE)(f"step/{k}")
    torch.testing.assert_close(path.latents[:, 1], out.mean + out.std * noise)


def test_before_and_after_the_branch_the_trajectory_is_the_odes():
    net, k = Net64(), 3
    algorithm = make(TempFlow, window_range=(k, k + 1))
    with torch.no_grad():
        x0, path = algorithm.sample(net, Noise(0, 1, KEYS, SHAPE), KEYS, SAMPLING, True)
    s = kernel.sigmas(8, 3.0)
    x = Noise(0, 1, KEYS, SHAPE)("init", shared=True).double()
    for j in range(8):
        if j == k:
            torch.testing.assert_close(path.latents[:, 0], x)
            x = path.latents[:, 1]
        else:
            x = x - (s[j] - s[j + 1]).double() * net(x, s[j].expand(12)).detach()
    torch.testing.assert_close(x0, x, rtol=1e-5, atol=1e-6)


def test_every_step_with_noise_gets_its_turn_and_one_row_a_sample_trains():
    algorithm = make(TempFlow)
    assert {algorithm.noisy(8, 0, i).start for i in range(200)} == set(range(7))
    assert all(len(algorithm.noisy(8, 0, i)) == 1 for i in range(20))
    assert len(rows_of(algorithm, Net64())) == 12


def test_the_loss_is_weighed_by_the_noise_of_the_step():
    one, std = torch.ones(3), torch.tensor([0.1, 0.2, 0.4])
    loss, _ = make(TempFlow, weight=3.0).surrogate(Transition(0 * one, one, std, one, one, None, None))
    torch.testing.assert_close(loss, -3 * std)


def test_the_default_weight_is_one_on_average_over_the_authors_schedule():
    s = kernel.sigmas(10, 3.0)
    rule = make(TempFlow).rule
    full = rule.coefficient(s[:-1], s[1:]) * (s[:-1] - s[1:]).sqrt()
    assert 2.25 * float(full[:-1].mean()) == pytest.approx(1, abs=0.01)


@pytest.mark.parametrize("options", [{"same_noise": False}, {"window": 2}])
def test_what_makes_the_method_cannot_be_turned_off(options):
    with pytest.raises(ConfigError):
        validated(TempFlow.Config, options, source="test")


def test_a_branch_at_the_last_step_is_refused():
    with pytest.raises(ConfigError, match="can draw noise"):
        make(TempFlow, window_range=(7, 8)).check(SamplingConfig(steps=8), Batch())
