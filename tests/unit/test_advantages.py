"""Scores to advantages: baselines, several rewards, selection, failures (T12, T13, P4 of the method notes)."""

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from crossrl.advantages import AdvantageOptions, group_advantages
from crossrl.errors import ConfigError
from crossrl.validation import validated

scores_of = arrays(np.float64, (3, 6, 2), elements=st.floats(-10, 10, width=32))


def advantages(scores, weights=(1.0,), valid=None, **options):
    scores = np.asarray(scores, float)
    scores = scores[..., None] if scores.ndim == 2 else scores
    valid = np.ones(scores.shape[:2], bool) if valid is None else np.asarray(valid)
    return group_advantages(scores, valid, weights, AdvantageOptions(**options))


def test_is_the_group_normalised_reward_with_unbiased_std():
    r = np.array([[0.1, 0.4, 0.2, 0.9], [3.0, 1.0, 2.0, 2.0]])
    out = advantages(r)
    np.testing.assert_allclose(out.values, (r - r.mean(1, keepdims=True)) / (r.std(1, ddof=1, keepdims=True) + 1e-8))
    assert out.keep.all() and out.values.dtype == np.float64
    assert out.metrics == {
        "mean": pytest.approx(r.mean()),
        "std": pytest.approx(r.std()),
        "within_group_std": pytest.approx(r.std(1, ddof=1).mean()),
        "zero_std": 0.0,
        "kept": 8.0,
        "dropped": 0.0,
    }


@given(scores_of, st.permutations(range(6)), st.sampled_from(["sum", "per_reward"]), st.sampled_from([None, 4]))
@settings(max_examples=50, deadline=None)
def test_order_of_a_group_does_not_matter(scores, order, aggregate, best):
    options = {"aggregate": aggregate, "best_of_n": best, "weights": (1.0, 0.5)}
    before, after = advantages(scores, **options), advantages(scores[:, order], **options)
    np.testing.assert_allclose(np.sort(before.values), np.sort(after.values), atol=1e-6)
    total = scores @ [1.0, 0.5]
    for row, kept, new in zip(total, before.keep, after.keep, strict=True):
        assert sorted(row[kept]) == sorted(row[order][new])  # ties may pick another sample of the same score


@given(scores_of, st.floats(-5, 5), st.floats(0.5, 20), st.sampled_from(["sum", "per_reward"]))
@settings(max_examples=50, deadline=None)
def test_shift_and_scale_of_a_reward_do_not_matter(scores, shift, scale, aggregate):
    spread = np.stack([scores @ [1.0, 0.0], scores @ [0.0, 1.0], scores @ [1.0, 0.5]]).std(2)
    assume(not ((spread > 0) & (spread < 1e-3)).any())  # of the size of float noise, scale does decide
    one = advantages(scores, (1.0, 0.5), aggregate=aggregate)
    two = advantages(scores * scale + shift, (1.0, 0.5), aggregate=aggregate)
    np.testing.assert_allclose(one.values, two.values, atol=1e-3)


@given(scores_of)
@settings(max_examples=30, deadline=None)
def test_values_are_centred_clamped_and_zero_where_not_kept(scores):
    wide, narrow = advantages(scores, (1.0, 1.0), adv_clip=100.0), advantages(scores, (1.0, 1.0), adv_clip=0.5)
    np.testing.assert_allclose(wide.values.sum(1), 0, atol=1e-9)
    np.testing.assert_allclose(narrow.values, wide.values.clip(-0.5, 0.5))
    best = advantages(scores, (1.0, 1.0), best_of_n=2)
    assert (best.values[~best.keep] == 0).all()


def test_groups_do_not_see_each_other():
    r = np.random.default_rng(0).normal(size=(4, 5))
    together = advantages(r).values
    alone = [advantages(row[None]).values[0] for row in r]
    np.testing.assert_array_equal(together, alone)


@pytest.mark.parametrize("level", [0.0, 0.43, -7.0, 1e4])
def test_float_noise_is_no_spread(level):
    noise = np.random.default_rng(0).normal(size=(1, 8)) * 1e-7 * max(1.0, abs(level))
    out = advantages(level + noise)
    assert (out.values == 0).all() and out.keep.all() and out.metrics["zero_std"] == 1.0
    assert not advantages(level + noise, drop_zero_std=True).keep.any()
    assert (np.abs(advantages(level + 1e4 * noise).values) > 0).all()


def test_constant_groups_are_filtered_only_on_request():
    r = [[0.5, 0.5, 0.5], [0.1, 0.2, 0.3]]
    assert advantages(r).keep.tolist() == [[True] * 3] * 2
    out = advantages(r, drop_zero_std=True)
    assert out.keep.tolist() == [[False] * 3, [True] * 3]
    np.testing.assert_allclose(out.values[1], [-1, 0, 1], atol=1e-6)  # the other group is as before
    assert out.metrics["zero_std"] == 0.5 and out.metrics["dropped"] == 3.0


def test_a_group_of_one_has_nothing_to_compare_with():
    out = advantages([[0.7], [0.2]])
    assert (out.values == 0).all() and not out.keep.any()
    assert out.metrics == {"kept": 0.0, "dropped": 2.0}


def test_invalid_and_not_finite_samples_are_left_out_and_the_rest_renormalised():
    r = np.array([[0.1, np.nan, 0.3, 0.5], [1.0, 2.0, np.inf, np.nan], [np.nan, 1.0, np.nan, np.nan]])
    valid = np.isfinite(r)
    valid[1, 2] = True  # claimed valid, yet not finite
    out = advantages(r, valid=valid)
    assert out.keep.tolist() == [[True, False, True, True], [True, True, False, False], [False] * 4]
    np.testing.assert_allclose(out.values[0, [0, 2, 3]], advantages([[0.1, 0.3, 0.5]]).values[0])
    np.testing.assert_allclose(out.values[1, :2], [-(0.5**0.5), 0.5**0.5])
    assert (out.values[~out.keep] == 0).all()
    assert out.metrics["kept"] == 5 and out.metrics["dropped"] == 7
    assert out.metrics["mean"] == pytest.approx(np.mean([0.1, 0.3, 0.5, 1.0, 2.0]))


def test_a_score_marked_invalid_is_not_read():
    r = [[0.1, 1e9, 0.3]]
    np.testing.assert_allclose(
        advantages(r, valid=[[True, False, True]]).values[0, [0, 2]], advantages([[0.1, 0.3]]).values[0]
    )


def test_best_of_n_keeps_both_ends_after_normalising_the_whole_group():
    r = np.arange(24.0)[None]
    out = advantages(r, best_of_n=8)
    assert np.flatnonzero(out.keep[0]).tolist() == [0, 1, 2, 3, 20, 21, 22, 23]
    np.testing.assert_allclose(out.values[out.keep], advantages(r).values[out.keep])
    assert out.metrics["kept"] == 8 and out.metrics["dropped"] == 16


def test_best_of_n_of_what_is_left():
    valid = np.ones((1, 6), bool)
    valid[0, :3] = False
    assert advantages(np.arange(6.0)[None], valid=valid, best_of_n=4).keep.sum() == 3
    assert advantages(np.arange(6.0)[None], valid=valid, best_of_n=2).keep[0].tolist() == [False] * 3 + [
        True,
        False,
        True,
    ]


def test_several_rewards_are_weighed_before_or_after_normalising():
    first, second = np.array([[1.0, 2.0, 3.0]]), np.array([[30.0, 10.0, 20.0]])
    both, weights = np.stack([first, second], -1), (2.0, 0.1)
    np.testing.assert_allclose(advantages(both, weights).values, advantages(2.0 * first + 0.1 * second).values)
    np.testing.assert_allclose(
        advantages(both, weights, aggregate="per_reward").values,
        2.0 * advantages(first).values + 0.1 * advantages(second).values,
    )
    assert advantages(both, weights).metrics["mean"] == pytest.approx(2 * 2 + 0.1 * 20)


def test_the_divisor_is_the_groups_std_the_batchs_or_the_largest_groups():
    loud, quiet = np.array([0.0, 1.0, 2.0, 5.0]), np.array([0.5, 0.51, 0.52, 0.55])
    r = np.stack([loud, quiet])
    centred = r - r.mean(1, keepdims=True)
    np.testing.assert_allclose(advantages(r, std="global").values, centred / (r.std(ddof=1) + 1e-8))
    np.testing.assert_allclose(advantages(r, std="max_group").values, centred / (loud.std(ddof=1) + 1e-8))
    assert advantages(r, std="global", drop_zero_std=True).metrics["zero_std"] == 0.0


@pytest.mark.parametrize("std", ["global", "max_group"])
def test_a_dropped_sample_does_not_enter_the_batchs_divisor(std):
    r = np.array([[0.0, 1.0, 2.0], [1.0, 3.0, 100.0]])
    valid = np.array([[True, True, True], [True, True, False]])
    out = advantages(r, valid=valid, std=std).values
    divisor = np.array([0.0, 1.0, 2.0, 1.0, 3.0]).std(ddof=1) if std == "global" else np.sqrt(2.0)
    np.testing.assert_allclose(out, [[-1 / divisor, 0, 1 / divisor], [-1 / divisor, 1 / divisor, 0]], rtol=1e-6)


def test_gdpo_normalises_the_weighted_sum_over_the_batch():
    scores = np.random.default_rng(0).normal(size=(4, 6, 2))
    own = advantages(scores, (1.0, 0.5), aggregate="per_reward").values
    out = advantages(scores, (1.0, 0.5), aggregate="gdpo").values
    np.testing.assert_allclose(out, (own - own.mean()) / (own.std(ddof=1) + 1e-8), rtol=1e-9, atol=1e-12)
    assert out.std(ddof=1) == pytest.approx(1.0)


def test_a_loss_term_each_keeps_the_rewards_apart():
    scores = np.random.default_rng(0).normal(size=(3, 5, 2))
    out = advantages(scores, (2.0, -0.5), aggregate="per_reward_loss")
    assert out.values.shape == (3, 5, 2) and out.keep.shape == (3, 5)
    np.testing.assert_allclose(out.values.sum(-1), advantages(scores, (2.0, -0.5), aggregate="per_reward").values)
    single = advantages(scores[..., 1:], (-0.5,)).values
    np.testing.assert_allclose(out.values[..., 1], 0.5 * single, rtol=1e-6)


def test_impossible_options_are_refused():
    with pytest.raises(ConfigError, match=r"best_of_n=4 of groups of 3"):
        advantages([[1, 2, 3]], best_of_n=4)
    for bad in ({"best_of_n": 3}, {"adv_clip": 0}, {"aggregate": "mean"}):
        with pytest.raises(ConfigError):
            validated(AdvantageOptions, bad, source="test")
