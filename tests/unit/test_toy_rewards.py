"""The toy rewards tell good videos from bad ones, and refuse what they cannot score."""

import time

import numpy as np
import pytest

from crossrl.protocols import Reward
from crossrl.types import Prompt, Sample
from crossrl_t2v.toy.rewards import PARTS, ToyReward, measure
from crossrl_t2v.toy.world import COLOURS, COMBINATIONS, DIRECTIONS, SHAPES, Attributes, render

RED_UP = Attributes("red", "circle", "up")


def clean(attributes=RED_UP, seed=0):
    return render(attributes, np.random.default_rng(seed))


def score(video, attributes=RED_UP, kind="toy"):
    sample = Sample(Prompt("toy/0", attributes.text), 0, video, 8.0)
    return ToyReward(kind).score([sample])[0]


@pytest.mark.parametrize("seed", range(3))
def test_clean_renders_score_high_in_everything(seed):
    videos = np.stack([clean(a, seed) for a in COMBINATIONS])
    parts = measure(videos, COMBINATIONS)
    assert all(parts[name].min() >= 0.95 for name in ("toy", "colour", "direction", "smoothness", "presence"))
    assert parts["shape"].min() >= 0.85


@pytest.mark.parametrize("colour", [c for c in COLOURS if c != "red"])
def test_wrong_colour(colour):
    parts = score(clean(Attributes(colour, "circle", "up"))).parts
    assert parts["colour"] <= 0.05 and parts["direction"] >= 0.95


@pytest.mark.parametrize("direction", [d for d in DIRECTIONS if d != "up"])
def test_wrong_direction(direction):
    parts = score(clean(Attributes("red", "circle", direction))).parts
    assert parts["direction"] <= 0.05 and parts["colour"] >= 0.95


@pytest.mark.parametrize("shape", [s for s in SHAPES if s != "circle"])
def test_wrong_shape_is_seen_but_not_paid_for(shape):
    result = score(clean(Attributes("red", shape, "up")))
    assert result.value >= 0.95 and result.parts["shape"] <= 0.85


def test_standing_still_is_no_direction():
    still = np.repeat(clean()[4:5], 9, axis=0)
    result = score(still)
    assert result.parts["direction"] == 0.0 and result.value == pytest.approx(0.5, abs=0.01)


def test_jerky_motion():
    jerky = clean()[[0, 8, 1, 7, 2, 6, 3, 5, 8]]
    assert score(jerky).parts["smoothness"] < 0.1


def test_no_object_scores_zero_and_never_nan():
    for video in (np.zeros_like(clean()), np.full_like(clean(), 255), clean() // 12):
        result = score(video)
        assert np.isfinite(list(result.parts.values())).all()
        assert result.value == 0.0


def test_vanishing_doubled_and_scattered_objects():
    vanishing = clean()
    vanishing[5:] = 0
    doubled = np.maximum(clean(), clean()[:, :, ::-1].copy())
    doubled = np.maximum(np.roll(doubled, 8, axis=2), np.roll(doubled, -8, axis=2))
    scattered = np.random.default_rng(0).permutation(clean().reshape(9, -1, 3), axis=1).reshape(9, 32, 32, 3)
    assert all(score(v).parts["presence"] < 0.6 for v in (vanishing, doubled, scattered))


def test_noise_stays_in_range():
    videos = np.random.default_rng(0).integers(0, 256, (64, 9, 32, 32, 3), dtype=np.uint8)
    for values in measure(videos, COMBINATIONS + COMBINATIONS[:16]).values():
        assert np.isfinite(values).all() and values.min() >= 0.0 and values.max() <= 1.0


def test_score_does_not_depend_on_the_rest_of_the_batch():
    samples = [Sample(Prompt("p", a.text), i, clean(a, i), 8.0) for i, a in enumerate(COMBINATIONS)]
    reward = ToyReward()
    together = reward.score(samples)
    alone = [reward.score([s])[0] for s in samples]
    assert [s.value for s in together] == pytest.approx([s.value for s in alone], abs=1e-6)
    assert together == reward.score(samples)


@pytest.mark.parametrize("kind", ["toy", *PARTS])
def test_each_kind_is_a_reward(kind):
    reward = ToyReward(kind)
    assert isinstance(reward, Reward) and reward.range == (0.0, 1.0) and kind in reward.name
    result = score(clean(), kind=kind)
    assert set(result.parts) == set(PARTS)
    if kind != "toy":
        assert result.value == result.parts[kind]


def test_toy_is_the_product():
    parts = score(np.roll(clean(), 3, axis=3)).parts
    expected = parts["presence"] * parts["smoothness"] * (0.5 * parts["colour"] + 0.5 * parts["direction"])
    assert score(np.roll(clean(), 3, axis=3)).value == pytest.approx(expected)


def test_what_cannot_be_scored_is_refused():
    with pytest.raises(ValueError, match="no toy reward 'beauty'"):
        ToyReward("beauty")
    for video in (clean().astype(np.float32), clean()[:5], clean()[..., :2], np.zeros((9, 64, 64, 3), np.uint8)):
        with pytest.raises(ValueError, match="toy/0#0: expected uint8"):
            score(video)
    with pytest.raises(ValueError, match="not a toy prompt"):
        ToyReward().score([Sample(Prompt("x", "a cat"), 0, clean(), 8.0)])
    assert ToyReward().score([]) == []


def test_128_videos_are_quick():
    samples = [Sample(Prompt("p", RED_UP.text), i, clean(seed=i), 8.0) for i in range(128)]
    start = time.process_time()
    ToyReward().score(samples)
    assert time.process_time() - start < 0.15
