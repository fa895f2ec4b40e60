"""The toy world: prompts, split, videos and clips."""

import subprocess
import sys

import numpy as np
import pytest

from crossrl_t2v.toy import world
from crossrl_t2v.toy.world import COMBINATIONS, ToyData, parse, render


def test_split_is_disjoint_and_every_value_and_pair_is_trained():
    train, heldout = world.combinations("train"), world.combinations("heldout")
    assert (len(train), len(heldout)) == (36, 12)
    assert set(train) | set(heldout) == set(COMBINATIONS) and not set(train) & set(heldout)
    assert {a.shape for a in train} == set(world.SHAPES)
    assert len({(a.colour, a.direction) for a in train}) == len(world.COLOURS) * len(world.DIRECTIONS)


def test_prompts_have_unique_stable_ids_and_parse_back():
    prompts = world.train_prompts() + world.heldout_prompts()
    assert len({p.id for p in prompts}) == 48
    assert {parse(p.text) for p in prompts} == set(COMBINATIONS)
    assert {p.id: p.text for p in prompts}["toy/0"] == "a red square moving left"


@pytest.mark.parametrize(
    "text", ["", "a red circle", "a pink circle moving up", "a red circle moving up ", "A red circle moving up"]
)
def test_other_text_is_refused_by_name(text):
    with pytest.raises(ValueError, match="not a toy prompt"):
        parse(text)


def test_unknown_split_and_shape_are_refused():
    with pytest.raises(ValueError, match="no split 'test'"):
        world.combinations("test")
    with pytest.raises(ValueError, match="no shape"):
        world.coverage("star", np.zeros(1), np.zeros(1))


def test_shapes_have_the_same_area():
    axis = np.arange(world.SIZE) - 15.5
    areas = [world.coverage(s, axis, axis[:, None]).sum() for s in world.SHAPES]
    assert areas == pytest.approx([world.AREA] * 3, rel=0.02)


def test_render_is_deterministic_and_of_the_asked_colour():
    for attributes in COMBINATIONS:
        video = render(attributes, np.random.default_rng(3))
        assert video.dtype == np.uint8 and video.shape == (9, 32, 32, 3)
        assert tuple(video.max((0, 1, 2))) == world.COLOURS[attributes.colour]
        assert np.array_equal(video, render(attributes, np.random.default_rng(3)))


def test_clip_depends_on_seed_split_and_index_alone():
    data = ToyData(seed=4)
    captions, videos = data.clips("train", [7, 3])
    again, once = data.clips("train", [3])
    assert captions[1] == again[0] and np.array_equal(videos[1], once[0])
    assert not np.array_equal(videos[1], ToyData(seed=5).clips("train", [3])[1][0])
    assert not np.array_equal(videos[1], data.clips("heldout", [3])[1][0])
    assert data.clips("train", [])[1].shape == (0, 9, 32, 32, 3)


def test_batches_continue_where_the_last_one_ended():
    batches = ToyData().batches("train", 2)
    next(batches)
    assert next(batches)[0] == ToyData().clips("train", [2, 3])[0]


def test_captions_are_wrong_and_empty_as_often_as_asked():
    n = 600
    captions, videos = ToyData(p_wrong=0.5, p_empty=0.1).clips("train", range(n))
    assert captions.count("") / n == pytest.approx(0.1, abs=0.04)
    asked = [(parse(c), v) for c, v in zip(captions, videos, strict=True) if c]
    assert {a for a, _ in asked} <= set(world.combinations("train"))
    right = np.mean([tuple(v.max((0, 1, 2))) == world.COLOURS[a.colour] for a, v in asked])
    assert right == pytest.approx(0.68, abs=0.05)  # 0.5 + 0.5 / 4, and more because held-out captions are redrawn


def test_true_captions_describe_their_videos():
    captions, videos = ToyData(p_wrong=0.0, p_empty=0.0).clips("heldout", range(50))
    assert {parse(c) for c in captions} <= set(world.combinations("heldout"))
    assert all(tuple(v.max((0, 1, 2))) == world.COLOURS[parse(c).colour] for c, v in zip(captions, videos, strict=True))


def test_world_and_rewards_are_light():
    code = "import sys, crossrl_t2v.toy.rewards; sys.exit('torch' in sys.modules or 'diffusers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
