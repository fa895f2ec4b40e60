"""Flow-GRPO: the KL (T5 of the method notes), the fast variant's windows, and what is refused or advised against."""

import numpy as np
import pytest
import torch

from crossrl.config import Batch, SamplingConfig
from crossrl.errors import ConfigError
from crossrl.noise import Noise
from crossrl.types import Sampling
from crossrl.validation import validated
from crossrl_t2v import kernel
from crossrl_t2v.flow_grpo import FlowGRPO
from tests.unit.family import KEYS, SAMPLING, SHAPE, Net64, gradient, loss_of, make, nearby, rows_of


def test_published_defaults():
    options = FlowGRPO.Config()
    assert (options.level, options.clip_range, options.std, options.adv_clip) == (0.7, 1e-4, "global", 5.0)
    assert (options.kl, options.kl_form, options.window, options.drop_zero_std) == (0.04, "code", None, True)


@pytest.mark.parametrize("form", ["paper", "code"])
def test_the_kl_is_that_of_two_gaussians(form):
    """In the paper's form that of N(mean, s^2) and N(mean_ref, s^2) as a mean over elements; the code's has delta."""
    algorithm, net = make(FlowGRPO, kl_form=form), Net64()
    rows, reference = rows_of(algorithm, net), nearby(net)
    kl = loss_of(algorithm, net, rows, reference).metrics["kl"]
    after, std = rows.targets["sigma_next"], None
    means = []
    for n in (net, reference):
        out = kernel.step(rows.x, n(rows.x, rows.sigma), rows.sigma, after, algorithm.rule)
        means.append(out.mean)
        std = out.std.expand_as(out.mean)
    normal = [torch.distributions.Normal(m, std) for m in means]
    expected = torch.distributions.kl_divergence(*normal).flatten(1).mean(1)
    expected = expected * (rows.sigma - after) if form == "code" else expected
    torch.testing.assert_close(kl, expected, rtol=1e-12, atol=1e-15)
    assert float(kl.min()) > 0


def test_the_kl_in_velocities_is_the_papers_formula():
    """(delta / 2) (1 / sigma_t + sigma_t (1 - sigma) / 2 sigma)^2 |v - v_ref|^2."""
    algorithm, net = make(FlowGRPO, kl_form="paper"), Net64()
    rows, reference = rows_of(algorithm, net), nearby(net)
    sigma, delta = rows.sigma.double(), (rows.sigma - rows.targets["sigma_next"]).double()
    level = algorithm.rule.coefficient(sigma, rows.targets["sigma_next"].double())
    gap = (net(rows.x, rows.sigma) - reference(rows.x, rows.sigma)).square().flatten(1).mean(1)
    expected = delta / 2 * (1 / level + level * (1 - sigma) / (2 * sigma)) ** 2 * gap
    torch.testing.assert_close(loss_of(algorithm, net, rows, reference).metrics["kl"], expected, rtol=1e-5, atol=0)


def test_equal_weights_have_no_kl_and_other_weights_a_pull_back_to_the_reference():
    algorithm, net = make(FlowGRPO, kl=1.0), Net64()
    rows = rows_of(algorithm, net, torch.zeros(12).double())
    out = loss_of(algorithm, net, rows)
    assert (out.metrics["kl"] == 0).all() and (out.loss == 0).all() and float(gradient(out.loss.sum(), net).norm()) == 0
    reference = nearby(net)
    direction = gradient(loss_of(algorithm, net, rows, reference).loss.mean(), net)
    away = torch.cat([(p - q).flatten() for p, q in zip(net.parameters(), reference.parameters(), strict=True)])
    assert float(direction @ away) > 0


def test_without_a_kl_no_reference_is_kept():
    assert make(FlowGRPO).needs.reference and not make(FlowGRPO, kl=0.0).needs.reference


def test_groups_without_spread_are_left_out_and_do_not_shift_the_others():
    scores = np.array([[1.0, 2.0, 3.0], [5.0, 5.0, 5.0]])[..., None]
    out = make(FlowGRPO).advantages(scores, np.ones((2, 3), bool))
    assert out.keep.tolist() == [[True] * 3, [False] * 3] and out.metrics["zero_std"] == 0.5
    np.testing.assert_allclose(out.values[0] * scores.std(ddof=1), [-1, 0, 1], atol=1e-6)


def test_a_window_is_drawn_each_iteration_within_its_range_alike_for_all():
    algorithm = make(FlowGRPO, window=3, window_range=(1, 6))
    windows = [algorithm.noisy(10, 0, i) for i in range(200)]
    assert {w.start for w in windows} == {1, 2, 3} and all(len(w) == 3 for w in windows)
    assert windows == [algorithm.noisy(10, 0, i) for i in range(200)] != [algorithm.noisy(10, 1, i) for i in range(200)]
    assert {make(FlowGRPO, window=2).noisy(10, 0, i).start for i in range(200)} == {0, 1, 2, 3}  # the first half


def ode(net, sigmas, x, steps):
    for k in steps:
        x = x - (sigmas[k] - sigmas[k + 1]) * net(x, sigmas[k].expand(len(x)))
    return x


def test_outside_of_the_window_steps_are_ode_steps():
    algorithm, net = make(FlowGRPO, window=2, window_range=(2, 4)), Net64()
    with torch.no_grad():
        x0, path = algorithm.sample(net, Noise(0, 1, KEYS, SHAPE), KEYS, SAMPLING, True)
        start = Noise(0, 1, KEYS, SHAPE)("init").double()
        torch.testing.assert_close(path.latents[:, 0], ode(net, path.sigmas, start, (0, 1)), rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(x0, ode(net, path.sigmas, path.latents[:, -1], range(4, 8)), rtol=1e-6, atol=1e-6)
    assert path.latents.shape[1] == 3 and path.data["log_prob"].shape == (12, 2)
    assert len(rows_of(algorithm, net)) == 12 * 2


@pytest.mark.parametrize(
    "options", [{"window": 8}, {"window": 2, "window_range": (6, 9)}, {"window": 3, "window_range": (-1, 2)}]
)
def test_windows_outside_of_the_schedule_are_refused(options):
    with pytest.raises(ConfigError, match="whose steps 0 to 6 can draw noise"):
        make(FlowGRPO, **options).check(SamplingConfig(steps=8), Batch())


def test_a_range_without_a_window_is_refused():
    with pytest.raises(ConfigError, match="window_range is the range of a window"):
        validated(FlowGRPO.Config, {"window_range": [0, 4]}, source="test")


@pytest.mark.parametrize(
    ("options", "guidance", "rules"),
    [
        ({}, 5.0, []),
        ({"window": 2, "clip_range": 1e-5}, 1.0, []),
        ({"window": 2}, 1.0, ["window_clip"]),
        ({"window": 2}, 4.5, ["window_guidance", "window_clip"]),
    ],
)
def test_what_was_seen_to_fail_is_advised_against(options, guidance, rules):
    found = make(FlowGRPO, **options).check(SamplingConfig(steps=8, guidance=guidance), Batch())
    assert [advice.rule for advice in found] == rules


def test_evaluation_is_the_odes_also_with_a_window():
    noise, ode = Noise(0, -1, KEYS, SHAPE), Sampling(8, stochastic=False)
    got = [make(FlowGRPO, **o).sample(Net64(), noise, KEYS, ode, False) for o in ({}, {"window": 2})]
    assert torch.equal(got[0][0], got[1][0]) and got[1][1] is None
