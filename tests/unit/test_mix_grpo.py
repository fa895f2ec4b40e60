"""MixGRPO: the windows' schedules (T14 of the method notes) and its kinship with Flow-GRPO."""

import math
from collections import Counter

import pytest
import torch

from crossrl.config import Batch, SamplingConfig
from crossrl.errors import ConfigError
from crossrl.noise import Noise
from crossrl.types import Sampling
from crossrl_t2v.flow_grpo import FlowGRPO
from crossrl_t2v.mix_grpo import MixGRPO
from tests.unit.family import KEYS, SHAPE, Net64, gradient, loss_of, make, nearby, rows_of, trajectory_of

STEPS = 25


def starts(iterations, steps=STEPS, seed=0, **options):
    algorithm = make(MixGRPO, **options)
    windows = [algorithm.noisy(steps, seed, i) for i in range(iterations)]
    assert all(len(w) == algorithm.options.window and w.stop <= steps - 1 for w in windows)
    return [w.start for w in windows]


def test_published_defaults():
    options = MixGRPO.Config()
    assert (options.window, options.tau, options.stride, options.schedule) == (4, 25, 1, "progressive")
    assert (options.level, options.clip_range, options.same_noise, options.aggregate) == (0.7, 1e-4, True, "per_reward")


@pytest.mark.parametrize(("window", "tau", "stride"), [(4, 25, 1), (3, 2, 1), (4, 3, 4), (24, 5, 1), (4, 7, 0)])
def test_progressive_windows_visit_every_step_the_declared_number_of_times(window, tau, stride):
    places = range(0, STEPS - window, stride) if stride else range(1)
    seen = starts(2 * tau * len(places), window=window, tau=tau, stride=stride)
    assert seen == [place for place in places for _ in range(tau)] * 2  # and starts over
    visits = Counter(k for start in seen for k in range(start, start + window))
    for k in range(STEPS - 1):
        assert visits[k] == 2 * tau * sum(place <= k < place + window for place in places)


def test_exponential_decay_stays_shorter_at_later_places():
    places = range(STEPS - 4)
    stays = [math.ceil(25 * math.exp(-0.1 * max(place - 13, 0))) for place in places]
    assert stays[13:16] == [25, 23, 21]
    assert starts(sum(stays), schedule="exp_decay") == [p for p, n in zip(places, stays, strict=True) for _ in range(n)]


def test_decay_goes_from_tau_to_the_least():
    stays = Counter(starts(10_000, steps=12, schedule="decay", window=2, tau=10, least_tau=1))
    algorithm = make(MixGRPO, schedule="decay", window=2, tau=10, least_tau=1)
    each = [algorithm.iterations_at(place, 12) for place in range(10)]
    assert each == [10, 9, 8, 7, 6, 5, 4, 3, 2, 1] == sorted(each, reverse=True)
    assert stays[0] / stays[9] == pytest.approx(10, rel=0.01)
    assert make(MixGRPO, schedule="decay").iterations_at(23, STEPS) == 6  # a quarter of tau


def test_random_windows_cover_all_places_alike_and_depend_on_the_seed():
    seen = starts(4000, schedule="random", window=4)
    counts = Counter(seen)
    assert set(counts) == set(range(21)) and all(abs(n - 4000 / 21) < 60 for n in counts.values())
    assert seen != starts(4000, schedule="random", window=4, seed=1)


def test_a_window_of_all_steps_is_flow_grpo_without_kl():
    common = {"same_noise": False, "std": "global"}
    mix, flow = make(MixGRPO, window=7, **common), make(FlowGRPO, kl=0.0, **common)
    net = Net64()
    one, two = trajectory_of(mix, net), trajectory_of(flow, net)
    assert torch.equal(one.latents, two.latents) and torch.equal(one.data["log_prob"], two.data["log_prob"])
    advantages, moved = torch.linspace(-1, 1, 12).double(), nearby(net, 1e-3)
    got = [loss_of(a, moved, a.rows(t, advantages, 0, 1)).loss for a, t in ((mix, one), (flow, two))]
    assert torch.equal(*got)
    assert torch.equal(*(gradient(loss.mean(), moved) for loss in got))


def test_outside_of_the_window_noise_changes_nothing():
    """Trajectories of two indices of one group coincide until the window, which starts with the second step."""
    algorithm, net = make(MixGRPO, window=2, tau=1), Net64()
    path = trajectory_of(algorithm, net, step=1)
    assert algorithm.noisy(8, 0, 1) == range(1, 3)
    group = path.latents[:6]
    torch.testing.assert_close(group[:, 0], group[:1, 0].expand_as(group[:, 0]), rtol=1e-12, atol=1e-12)
    assert len(group[:, 1].flatten(1).unique(dim=0)) == 6


def test_only_the_windows_steps_train():
    algorithm, net = make(MixGRPO, window=2, tau=1), Net64()
    rows = rows_of(algorithm, net)
    assert sorted(set(rows.sigma.tolist()), reverse=True) == trajectory_of(algorithm, net).sigmas[1:3].tolist()
    assert len(rows) == 12 * 2


@pytest.mark.parametrize(("window", "fits"), [(7, True), (8, False)])
def test_windows_outside_of_the_schedule_are_refused(window, fits):
    algorithm = make(MixGRPO, window=window)
    if fits:
        assert algorithm.check(SamplingConfig(steps=8), Batch()) == []
    else:
        with pytest.raises(ConfigError, match="window of 8 steps"):
            algorithm.check(SamplingConfig(steps=8), Batch())


def test_evaluation_may_take_fewer_steps_than_the_window_has():
    short = Sampling(3, stochastic=False)
    x0, kept = make(MixGRPO, window=7).sample(Net64(), Noise(0, -1, KEYS, SHAPE), KEYS, short, False)
    assert kept is None and len(x0.detach().flatten(1).unique(dim=0)) == 12


def test_guidance_is_advised_against():
    (advice,) = make(MixGRPO).check(SamplingConfig(steps=8, guidance=3.5), Batch())
    assert (advice.rule, advice.key) == ("window_guidance", "sampling.guidance")
