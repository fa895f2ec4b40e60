"""The loop's own arithmetic: who trains what, and what the numbers in the log mean."""

import numpy as np
import pytest

from crossrl.config import RunConfig
from crossrl.loop import Drawn, Run, as_arrays, update_metrics, update_plans, waves
from crossrl.rewards import Scored
from crossrl.types import Advantages, Prompt, RankStats, SampleKey, Sampling, Score

B, G = 4, 8


def config(**batch):
    return RunConfig(
        algorithm="dance_grpo",
        backend="veomni",
        model={"path": "toy"},
        data={"train": "toy:train"},
        rewards=[{"name": "toy"}],
        batch={"prompts": B, "samples": G, "updates": 4, "rollout_micro": 8, **batch},
    )


GROUPS = [[SampleKey(Prompt(f"p{b}", f"text {b}"), g) for g in range(G)] for b in range(B)]


def advantages(keep=None):
    keep = np.ones((B, G), bool) if keep is None else keep
    return Advantages(np.arange(B * G, dtype=float).reshape(B, G), keep)


def plans_of(values, step, dp_size=1):
    owners = [b * dp_size // B for b in range(B)]
    run = Run(config(), None, None, None, None, lr_scale=0.5, skip_above=3.0)
    return list(update_plans(Drawn(GROUPS, owners, [], None, None), values, run, step))


def test_every_sample_trains_once_and_every_step_sees_every_group():
    plans = plans_of(advantages(), 3)
    assert len(plans) == 4
    assert sorted(k.prompt.id + str(k.index) for p in plans for k in p.keys) == sorted(
        k.prompt.id + str(k.index) for group in GROUPS for k in group
    )
    for plan in plans:
        assert [sum(k.prompt.id == f"p{b}" for k in plan.keys) for b in range(B)] == [G // 4] * B
        for key, advantage in zip(plan.keys, plan.advantages, strict=True):
            assert advantage == int(key.prompt.id[1:]) * G + key.index
    assert [p.last for p in plans] == [False, False, False, True]
    assert {(p.lr_scale, p.skip_above) for p in plans} == {(0.5, 3.0)}


def test_the_parts_are_the_same_at_any_world_size_and_differ_between_steps():
    one = [p.keys for p in plans_of(advantages(), 3)]
    two = plans_of(advantages(), 3, dp_size=2)
    assert [p.keys for p in two] == one
    assert all(p.samples_per_rank == B * G // 4 // 2 for p in two)
    assert [p.keys for p in plans_of(advantages(), 4)] != one


def test_dropped_samples_leave_their_rank_padded_not_the_others_short():
    keep = np.ones((B, G), bool)
    keep[0] = False  # a whole group of rank 0
    plans = plans_of(advantages(keep), 0, dp_size=2)
    assert all(len(p.keys) == 6 and p.samples_per_rank == 4 for p in plans)
    assert plans_of(advantages(np.zeros((B, G), bool)), 0, dp_size=2) == []


def test_refill_replaces_dead_groups_first_and_keeps_the_number():
    def drawn(names, owner):
        groups = [[SampleKey(Prompt(n, n), g) for g in range(2)] for n in names]
        scores = np.array([[[float(ord(n))]] * 2 for n in names])
        return Drawn(groups, [owner] * len(names), [], scores, np.ones(scores.shape[:2], bool))

    out = drawn("abcd", 0).replaced(np.array([True, False, False, True]), drawn("xyz", 1))
    assert [g[0].prompt.id for g in out.groups] == ["a", "d", "x", "y"] and out.owners == [0, 0, 1, 1]
    assert out.scores[:, 0, 0].tolist() == [ord(c) for c in "adxy"]
    short = drawn("abcd", 0).replaced(np.array([True, False, False, True]), drawn("x", 1))
    assert [g[0].prompt.id for g in short.groups] == ["a", "d", "x", "b"]


def test_advantages_of_several_loss_terms_travel_as_tuples():
    values = Advantages(np.stack([np.ones((B, G)), -np.ones((B, G))], -1), np.ones((B, G), bool))
    assert set(plans_of(values, 0)[0].advantages) == {(1.0, -1.0)}


def test_pull_is_reported_as_shares():
    sums = {"pull_0.00": 1.0, "pull_0.25": 0.0, "pull_0.50": 2.0, "pull_0.75": 1.0}
    out = update_metrics([[RankStats(sums, {}, {"forwards": 1.0})] * 2])
    assert [out[f"update/{name}"] for name in sums] == [0.25, 0.0, 0.5, 0.25]


@pytest.mark.parametrize("dp_size", [1, 2, 4])
def test_waves_cover_all_samples_with_whole_groups_on_one_rank(dp_size):
    keys = [k for group in GROUPS for k in group]
    requests = [r for wave in waves(keys, Sampling(8), config(), 0, dp_size) for r in enumerate(wave)]
    assert sorted(str(k) for _, r in requests for k in r.keys) == sorted(map(str, keys))
    assert all(len(r.keys) <= 8 for _, r in requests)
    for group in GROUPS:
        assert len({rank for rank, r in requests for k in r.keys if k.prompt == group[0].prompt}) == 1


def test_waves_of_an_uneven_number_keep_the_ranks_in_step():
    keys = GROUPS[0][:5]
    wave_list = list(waves(keys, Sampling(8, stochastic=False), config(), -1, 2))
    assert [len(r.keys) for wave in wave_list for r in wave] == [3, 3]
    assert {k for wave in wave_list for r in wave for k in r.keys} == set(keys)


def test_failed_samples_are_invalid_not_zero():
    scores = {k: (Score(0.5),) for group in GROUPS for k in group}
    scores[GROUPS[1][2]] = None
    values, valid = as_arrays([Scored(scores)], GROUPS, 1)
    assert values.shape == (B, G, 1) and np.isnan(values[1, 2, 0])
    assert not valid[1, 2] and valid.sum() == B * G - 1


def test_update_metrics_add_ranks_and_average_steps():
    steps = [[RankStats({"ratio": 0.5}, {"dev_max": 0.0}, {"grad_norm": 2.0, "skipped": 0.0, "forwards": 5.0})] * 2]
    steps.append([RankStats({"ratio": 0.6}, {"dev_max": 0.3}, {"grad_norm": 4.0, "skipped": 1.0, "forwards": 5.0})] * 2)
    out = update_metrics(steps)
    assert out["update/ratio"] == pytest.approx(1.1)
    assert out["update/dev_max"] == 0.3 and out["update/first_dev_max"] == 0.0
    assert out["update/grad_norm"] == 3.0 and out["update/skipped"] == 1.0
    assert out["update/forwards"] == 20.0
