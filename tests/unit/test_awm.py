"""AWM: the matching loss as likelihood (T9 of the method notes), its weightings, and the pull to the old policy."""

import pytest
import torch

from crossrl.config import Batch, SamplingConfig
from crossrl.errors import ConfigError
from crossrl_t2v.awm import AWM
from tests.unit.family import Net64, gradient, loss_of, make, nearby, rows_of

WEIGHTINGS = ["uniform", "t", "t2", "huber", "ghuber"]


def weighted(name, t, error, power=0.25):
    return {
        "uniform": error,
        "t": t * error,
        "t2": t**2 * error,
        "huber": t * error.sqrt(),
        "ghuber": t * error**power / power,
    }[name]


@pytest.mark.parametrize("weighting", WEIGHTINGS)
def test_at_the_old_policy_the_ratio_is_one_and_the_gradient_that_of_the_weighted_matching_loss(weighting):
    algorithm, net = make(AWM, weighting=weighting, clip_range=1e-4), Net64()
    rows = rows_of(algorithm, net)
    out = loss_of(algorithm, net, rows)
    assert (out.metrics["ratio"] == 1).all() and torch.equal(out.loss, -rows.targets["advantage"])
    error = (net(rows.x, rows.sigma) - rows.targets["velocity"]).square().flatten(1).mean(1)
    expected = gradient((rows.targets["advantage"] * weighted(weighting, rows.sigma, error)).mean(), net)
    torch.testing.assert_close(gradient(out.loss.mean(), net), expected, rtol=1e-4, atol=1e-8)


def test_with_positive_advantages_one_step_is_reward_weighted_matching():
    """On-policy, and A >= 0 of one size: the gradient is A times that of flow matching on own samples."""
    algorithm, net = make(AWM, weighting="uniform", adv_max=5.0), Net64()
    rows = rows_of(algorithm, net, torch.full((12,), 2.0).double())
    matching = (net(rows.x, rows.sigma) - rows.targets["velocity"]).square().mean()
    torch.testing.assert_close(gradient(loss_of(algorithm, net, rows).loss.mean(), net), gradient(2 * matching, net))


@pytest.mark.parametrize("weighting", WEIGHTINGS)
def test_the_ratio_compares_the_policies_on_the_same_noise(weighting):
    algorithm, net = make(AWM, weighting=weighting), Net64()
    rows, moved = rows_of(algorithm, net), nearby(net, 1e-2)
    errors = [(n(rows.x, rows.sigma) - rows.targets["velocity"]).square().flatten(1).mean(1) for n in (net, moved)]
    old, new = (weighted(weighting, rows.sigma, e) for e in errors)
    got = loss_of(algorithm, moved, rows, net, net).metrics["log_ratio"]
    torch.testing.assert_close(got, old - new, rtol=1e-5, atol=1e-8)


def test_the_pulls_to_the_old_policy_and_to_the_base_model():
    algorithm, net = make(AWM, kl_old=2.0, kl=0.5), Net64()
    rows, old, base = rows_of(algorithm, net, torch.zeros(12).double()), nearby(net, seed=1), nearby(net, seed=2)
    out = loss_of(algorithm, net, rows, base, old)
    gaps = [(net(rows.x, rows.sigma) - n(rows.x, rows.sigma)).square().flatten(1).mean(1) for n in (old, base)]
    torch.testing.assert_close(out.metrics["kl_old"], gaps[0])
    torch.testing.assert_close(out.metrics["kl"], gaps[1])
    torch.testing.assert_close(out.loss, 2.0 * gaps[0] + 0.5 * gaps[1])


def test_advantages_are_scaled_from_their_clamp():
    rows = rows_of(make(AWM, rows_per_sample=1), Net64(), torch.linspace(-5, 5, 12).double())
    torch.testing.assert_close(rows.targets["advantage"], torch.linspace(-1, 1, 12).double())


def test_the_old_policy_follows_ever_more_slowly():
    needs = make(AWM, kl=0.0).needs
    assert [needs.old(k) for k in (0, 100, 300, 900)] == pytest.approx([0, 0.1, 0.3, 0.3]) and not needs.reference
    assert make(AWM, decay=0.0).needs.old(500) == 0


@pytest.mark.parametrize(
    ("options", "rules"),
    [({}, []), ({"kl_old": 0.0}, ["awm_unbounded"]), ({"kl_old": 0.0, "clip_range": 1e-5}, [])],
)
def test_an_update_that_nothing_holds_back_is_advised_against(options, rules):
    assert [a.rule for a in make(AWM, **options).check(SamplingConfig(), Batch())] == rules


def test_one_start_under_the_ode_is_refused():
    with pytest.raises(ConfigError, match="same sample G times"):
        make(AWM, same_noise=True).check(SamplingConfig(), Batch())
    assert make(AWM, same_noise=True, eta=0.3).check(SamplingConfig(), Batch()) == []
