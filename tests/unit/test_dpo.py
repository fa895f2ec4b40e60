"""Online Diffusion-DPO: pairing, padding, and the loss against closed forms."""

import math

import numpy as np
import pytest
import torch

from crossrl.config import Batch, SamplingConfig
from crossrl.errors import ConfigError
from crossrl.types import Prompt, SampleKey, Trajectory
from crossrl_t2v.dpo import DPO
from tests.unit.family import KEYS, SHAPE, Net64, gradient, loss_of, make, nearby, trajectory_of


def rows_for(advantages, keys=KEYS, algorithm=None, **options):
    """Rows of the named samples, one latent each."""
    algorithm = algorithm or make(DPO, **options)
    latents = torch.stack([torch.full((1, *SHAPE), float(k.index)) for k in keys])
    trajectory = Trajectory(tuple(keys), torch.tensor([1.0, 0.5, 0.0]), latents, {})
    return algorithm.rows(trajectory, torch.tensor(advantages, dtype=torch.float64), 0, 1)


def pairs_in(rows, keys=KEYS):
    """(prompt, winner's index, loser's index) of each pair of rows."""
    found = []
    for i in range(0, len(rows) - 1, 2):
        if rows.targets["side"][i] == 1:
            winner, loser = keys[rows.owner[i]], keys[rows.owner[i + 1]]
            assert rows.targets["side"][i + 1] == -1 and winner.prompt == loser.prompt
            found.append((winner.prompt.id, winner.index, loser.index))
    return found


def test_best_and_worst_of_a_prompt_are_paired_then_the_next():
    rows = rows_for([0.3, 2.0, -1.0, 0.1, -0.5, 0.0, -3.0, -2.0, -1.0, 1.0, 2.0, 3.0])
    assert pairs_in(rows) == [("p0", 1, 2), ("p0", 0, 4), ("p0", 3, 5), ("p1", 5, 0), ("p1", 4, 1), ("p1", 3, 2)]
    assert sorted(rows.owner.tolist()) == list(range(12))


def test_a_pair_shares_its_sigma_and_its_noise_and_no_two_pairs_do():
    rows = rows_for([1.0, -1.0, 0.5, -0.5, 0.2, -0.2] * 2, rows_per_sample=3)
    eps = rows.targets["velocity"] + torch.stack([torch.full(SHAPE, float(KEYS[i].index)) for i in rows.owner])
    assert torch.equal(rows.sigma[::2], rows.sigma[1::2]) and len(rows) == 12 * 3
    torch.testing.assert_close(eps[::2], eps[1::2])
    assert len(rows.sigma.unique()) == 6 * 3
    level = rows.sigma.view(-1, 1, 1, 1, 1)
    torch.testing.assert_close(rows.x, level * eps + (1 - level) * (eps - rows.targets["velocity"]))


def test_ties_and_the_odd_one_out_stay_alone_and_come_last():
    keys = KEYS[:3] + KEYS[6:8]
    rows = rows_for([1.0, 0.0, -1.0, 0.7, 0.7], keys, rows_per_sample=1)
    assert pairs_in(rows, keys) == [("p0", 0, 2)]
    assert rows.targets["side"].tolist() == [1, -1, 0, 0, 0] and sorted(rows.owner[2:].tolist()) == [1, 3, 4]


@pytest.mark.parametrize("held_only", [True, False])
@pytest.mark.parametrize("padding", [1, 2, 3])
def test_padding_is_no_sample_of_its_prompt(padding, held_only):
    """A rank's share is filled up with its first key, which may or may not be one of the plan's."""
    real = KEYS[1:3] if held_only else KEYS[:2]
    keys = (*real, *[KEYS[0]] * padding)
    rows = rows_for([1.5, 0.5] + [0.0] * padding, keys)
    assert pairs_in(rows, keys) == [("p0", real[0].index, real[1].index)]
    assert (rows.targets["side"][2:] == 0).all() and len(rows) == 2 + padding


def test_a_share_of_nothing_but_padding_has_no_pair():
    rows = rows_for([0.0] * 4, (KEYS[0],) * 4)
    assert (rows.targets["side"] == 0).all() and len(rows) == 4


def test_pairs_do_not_depend_on_who_holds_which_prompt_or_in_which_order():
    advantages = [0.3, 2.0, -1.0, 0.1, -0.5, 0.4] * 2
    whole = rows_for(advantages)
    alone = rows_for(advantages[6:], KEYS[6:])
    assert torch.equal(alone.sigma, whole.sigma[6:]) and torch.equal(alone.x, whole.x[6:])
    order = [4, 2, 0, 5, 3, 1]
    mixed = rows_for([advantages[i] for i in order], [KEYS[i] for i in order])
    assert torch.equal(mixed.x, whole.x[:6]) and torch.equal(mixed.sigma, whole.sigma[:6])


def paired_rows(algorithm, net, advantages):
    return algorithm.rows(trajectory_of(algorithm, net), advantages, 0, 1)


def test_at_the_reference_the_loss_is_log_two_and_the_gradient_the_closed_form():
    """d loss / d v of a pair is +-(beta / 2) (v - target) / D: winners are imitated, losers unlearnt."""
    beta = 40.0
    algorithm, net = make(DPO, beta=beta), Net64()
    rows = paired_rows(algorithm, net, torch.linspace(-1, 1, 12).double())
    out = loss_of(algorithm, net, rows)
    torch.testing.assert_close(out.loss, torch.full((12,), math.log(2)).double())
    v = net(rows.x, rows.sigma).detach().requires_grad_()
    loss = algorithm.loss({"policy": v, "reference": v.detach()}, rows).loss
    (got,) = torch.autograd.grad(loss[::2].sum(), v)  # each pair once
    side = rows.targets["side"].double().view(-1, 1, 1, 1, 1)
    expected = side * beta / 2 * (v.detach() - rows.targets["velocity"]) / math.prod(SHAPE)
    torch.testing.assert_close(got, expected)
    through = (expected * net(rows.x, rows.sigma)).sum() / 6  # six pairs
    torch.testing.assert_close(gradient(out.loss.mean(), net), gradient(through, net))


def test_the_loss_is_the_published_one():
    algorithm, net = make(DPO, beta=300.0), Net64()
    rows, reference = paired_rows(algorithm, net, torch.linspace(-1, 1, 12).double()), nearby(net)
    error = [(n(rows.x, rows.sigma) - rows.targets["velocity"]).square().flatten(1).mean(1) for n in (net, reference)]
    gain = error[0] - error[1]
    inside = -150.0 * (gain[::2] - gain[1::2])
    expected = (1 + (-inside).exp()).log().repeat_interleave(2)
    out = loss_of(algorithm, net, rows, reference)
    torch.testing.assert_close(out.loss, expected)
    torch.testing.assert_close(out.metrics["margin"], inside.repeat_interleave(2))


def test_equal_rewards_have_no_gradient():
    algorithm, net = make(DPO), Net64()
    rows = paired_rows(algorithm, net, torch.full((12,), 0.4).double())
    out = loss_of(algorithm, net, rows, nearby(net))
    assert (out.metrics["paired"] == 0).all() and float(gradient(out.loss.sum(), net).abs().max()) == 0
    torch.testing.assert_close(out.loss, torch.full((12,), math.log(2)).double())


@pytest.mark.parametrize("micro", [2, 8])
def test_even_micro_batches_do_not_change_the_gradient(micro):
    algorithm, net = make(DPO, rows_per_sample=3), Net64()
    advantages = torch.tensor([1.0, 0.5, 0.0, -0.5, -1.0, 0.2, 1.0, 1.0, 1.0, -1.0, 0.3, 0.0]).double()
    rows, reference = paired_rows(algorithm, net, advantages), nearby(net, 1e-2)
    whole = gradient(loss_of(algorithm, net, rows, reference).loss.mean(), net)
    parts = [rows.take(slice(i, i + micro)) for i in range(0, len(rows), micro)]
    summed = sum(gradient(loss_of(algorithm, net, p, reference).loss.sum() / len(rows), net) for p in parts)
    torch.testing.assert_close(whole, summed)


def test_a_parted_pair_is_refused_before_and_during_the_run():
    with pytest.raises(ConfigError, match="part a winner from its loser"):
        make(DPO).check(SamplingConfig(), Batch(update_micro=7))
    algorithm, net = make(DPO), Net64()
    rows = paired_rows(algorithm, net, torch.linspace(-1, 1, 12).double())
    with pytest.raises(ConfigError, match="parted"):
        loss_of(algorithm, net, rows.take(slice(0, 3)))


@pytest.mark.parametrize(
    ("best_of_n", "samples", "updates", "fits"),
    [(2, 8, 1, True), (2, 8, 2, False), (4, 8, 2, True), (None, 8, 8, False)],
)
def test_optimizer_steps_without_a_pair_are_refused(best_of_n, samples, updates, fits):
    algorithm, batch = make(DPO, best_of_n=best_of_n), Batch(samples=samples, updates=updates)
    if fits:
        assert algorithm.check(SamplingConfig(), batch) == []
    else:
        with pytest.raises(ConfigError, match="less than a pair"):
            algorithm.check(SamplingConfig(), batch)


def test_by_default_a_groups_best_and_worst_alone_take_part():
    out = make(DPO).advantages(np.array([[3.0, 1.0, 2.0, 5.0]])[..., None], np.ones((1, 4), bool))
    assert out.keep.tolist() == [[False, True, False, True]]


def test_one_update_prefers_the_winners():
    algorithm, net = make(DPO), Net64()
    rows = paired_rows(algorithm, net, torch.linspace(-1, 1, 12).double())
    reference = nearby(net, 0.0)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-5)
    loss_of(algorithm, net, rows, reference).loss.mean().backward()
    optimizer.step()
    assert float(loss_of(algorithm, net, rows, reference).metrics["margin"].mean()) > 0


def test_a_key_of_another_prompt_with_the_same_index_is_another_sample():
    keys = (SampleKey(Prompt("a", "x"), 0), SampleKey(Prompt("b", "x"), 0))
    assert pairs_in(rows_for([1.0, -1.0], keys), keys) == []
