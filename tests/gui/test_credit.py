"""Credit: closed forms of episode and step advantages."""

import numpy as np
import pytest

from crossrl_gui_agent.credit import Steps, discounted_returns, episode_advantages, step_advantages
from crossrl_gui_agent.grpo import GiGPO, GuiGRPO


def steps(episodes, valid=None):
    """`episodes`: (group, [reward of each step], [anchor of each step])."""
    rows = [
        (group, f"{group}_{i}", turn, anchor, reward, sum(rewards))
        for i, (group, rewards, anchors) in enumerate(episodes)
        for turn, (reward, anchor) in enumerate(zip(rewards, anchors, strict=True))
    ]
    columns = [np.array(column) for column in zip(*rows, strict=True)]
    return Steps(*columns, np.ones(len(rows), bool) if valid is None else np.array(valid))


HALF = 0.5**0.5  # the advantage of the better one of two
TWO_OF_FOUR = [("a", [1.0], "s"), ("a", [0.0], "s"), ("a", [1.0], "s"), ("a", [0.0], "s")]


def test_the_episodes_advantage_is_its_distance_from_the_groups_mean_in_standard_deviations():
    std = np.std([1, 0, 1, 0], ddof=1)
    assert episode_advantages(steps(TWO_OF_FOUR)) == pytest.approx(np.array([1, -1, 1, -1]) * 0.5 / std)


def test_a_long_episode_counts_once_in_the_baseline():
    found = episode_advantages(steps([("a", [0.0, 0.0, 1.0], "xyz"), ("a", [0.0], "x")]))
    assert found == pytest.approx(np.array([1, 1, 1, -1]) * HALF)


@pytest.mark.parametrize("reward", [0.0, 1.0])
def test_a_group_without_spread_teaches_nothing(reward):
    assert not episode_advantages(steps([("a", [reward], "s")] * 3)).any()
    assert not episode_advantages(steps([("a", [reward], "s")])).any()


def test_an_episode_that_the_environment_broke_neither_trains_nor_counts():
    four = steps(TWO_OF_FOUR, valid=[True, True, False, True])
    std = np.std([1, 0, 0], ddof=1)
    assert episode_advantages(four) == pytest.approx(np.array([2 / 3, -1 / 3, 0, -1 / 3]) / std)
    assert not episode_advantages(steps(TWO_OF_FOUR, valid=[False] * 4)).any()


def test_groups_do_not_mix():
    both = steps([*TWO_OF_FOUR, ("b", [1.0], "s"), ("b", [1.0], "s")])
    std = np.std([1, 0, 1, 0], ddof=1)
    assert episode_advantages(both) == pytest.approx(np.array([0.5, -0.5, 0.5, -0.5, 0, 0]) / std)


def test_discounted_returns_run_backwards_within_an_episode():
    found = discounted_returns(steps([("a", [1.0, 0.0, 2.0], "xyz"), ("a", [3.0], "x")]), gamma=0.5)
    assert found == pytest.approx([1.5, 1.0, 2.0, 3.0])


def test_a_step_is_compared_with_other_visits_to_the_same_screen():
    # both start at x; one goes to y and is paid, the other goes to z and is not
    two = steps([("a", [0.0, 1.0], "xy"), ("a", [0.0, 0.0], "xz")])
    found = step_advantages(two, gamma=0.5)
    assert found == pytest.approx([HALF, 0.0, -HALF, 0.0])  # y and z were each seen once


def test_gigpo_is_grpo_plus_weighted_step_advantages():
    two = steps([("a", [0.0, 1.0], "xy"), ("a", [0.0, 0.0], "xz")])
    grpo = GuiGRPO(GuiGRPO.Config()).advantages(two)
    gigpo = GiGPO(GiGPO.Config(gamma=0.5, step_weight=2.0)).advantages(two)
    assert gigpo - grpo == pytest.approx([2 * HALF, 0.0, -2 * HALF, 0.0])
