"""The loop's own arithmetic: who trains what, and what the numbers in the log mean."""

import numpy as np
import pytest

from crossrl.config import RunConfig
from crossrl.loop import as_arrays, update_metrics, update_plans, waves
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


def test_every_sample_trains_once_and_every_step_sees_every_group():
    plans = list(update_plans(GROUPS, advantages(), config(), step=3, dp_size=1))
    assert len(plans) == 4
    assert sorted(k.prompt.id + str(k.index) for p in plans for k in p.keys) == sorted(
        k.prompt.id + str(k.index) for group in GROUPS for k in group
    )
    for plan in plans:
        assert [sum(k.prompt.id == f"p{b}" for k in plan.keys) for b in range(B)] == [G // 4] * B
        for key, advantage in zip(plan.keys, plan.advantages, strict=True):
            assert advantage == int(key.prompt.id[1:]) * G + key.index


def test_the_parts_are_the_same_at_any_world_size_and_differ_between_steps():
    one = [p.keys for p in update_plans(GROUPS, advantages(), config(), 3, dp_size=1)]
    two = list(update_plans(GROUPS, advantages(), config(), 3, dp_size=2))
    assert [p.keys for p in two] == one
    assert all(p.samples_per_rank == B * G // 4 // 2 for p in two)
    assert [p.keys for p in update_plans(GROUPS, advantages(), config(), 4, dp_size=1)] != one


def test_dropped_samples_leave_their_rank_padded_not_the_others_short():
    keep = np.ones((B, G), bool)
    keep[0] = False  # a whole group of rank 0
    plans = list(update_plans(GROUPS, advantages(keep), config(), 0, dp_size=2))
    assert all(len(p.keys) == 6 and p.samples_per_rank == 4 for p in plans)
    assert list(update_plans(GROUPS, advantages(np.zeros((B, G), bool)), config(), 0, dp_size=2)) == []


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
