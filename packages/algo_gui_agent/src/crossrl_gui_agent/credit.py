"""From episodes to one advantage a step: group-relative returns of episodes and of steps. numpy only, fp64.

Shapes: `n` steps of all episodes of a batch; an episode (verl: session) is one attempt, a group the attempts at one
prompt (the same task and seed).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from crossrl.advantages import AdvantageOptions, group_advantages


@dataclass(frozen=True, slots=True)
class Steps:
    """The steps of a batch, in any order; every array is [n].

    `group` and `episode` name what a step belongs to, `turn` is its place in the episode, `anchor` names the screen
    that it saw, `reward` is what the environment paid for it, `episode_return` the (shaped) return of its episode.
    Steps that are not `valid` (the environment broke) neither train nor count in a baseline.
    """

    group: np.ndarray
    episode: np.ndarray
    turn: np.ndarray
    anchor: np.ndarray
    reward: np.ndarray
    episode_return: np.ndarray
    valid: np.ndarray


def normalised(values: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """values [m] as `crossrl.advantages.group_advantages` has them for groups of unequal size; 0 in a group of one."""
    if not len(values):
        return np.zeros(0)
    names, row = np.unique(groups, return_inverse=True)
    row = row.reshape(-1)
    column = np.array([np.sum(row[:i] == r) for i, r in enumerate(row)], dtype=int)
    scores = np.zeros((len(names), column.max() + 1, 1))
    present = np.zeros(scores.shape[:2], dtype=bool)
    scores[row, column, 0], present[row, column] = values, True
    return group_advantages(scores, present, (1.0,), AdvantageOptions()).values[row, column]


def episode_advantages(steps: Steps) -> np.ndarray:
    """[n]: each step gets its episode's advantage (GRPO, arXiv 2402.03300, on returns of whole episodes).

    Every episode counts once in its group's baseline, however many steps it has.
    """
    out = np.zeros(len(steps.group))
    rows = np.flatnonzero(steps.valid)
    _, first, place = np.unique(steps.episode[rows], return_index=True, return_inverse=True)
    picked = rows[first]
    out[rows] = normalised(steps.episode_return[picked], steps.group[picked])[place]
    return out


def step_advantages(steps: Steps, gamma: float) -> np.ndarray:
    """[n]: each step against the other visits of its group to the same screen (GiGPO, arXiv 2505.10978).

    Compared are discounted returns from the step on, sum over k of gamma^k r_(t+k).
    """
    out = np.zeros(len(steps.group))
    rows = np.flatnonzero(steps.valid)
    pairs = np.stack([steps.group[rows], steps.anchor[rows]]).astype(str)
    _, place = np.unique(pairs, axis=1, return_inverse=True)
    out[rows] = normalised(discounted_returns(steps, gamma)[rows], place.reshape(-1))
    return out


def discounted_returns(steps: Steps, gamma: float) -> np.ndarray:
    """[n]: what each step and those after it in its episode were paid, discounted by `gamma` a step."""
    out = np.zeros(len(steps.group))
    _, place = np.unique(steps.episode, return_inverse=True)
    for index in range(place.max(initial=-1) + 1):
        rows = np.flatnonzero(place == index)
        later = 0.0
        for row in rows[np.argsort(steps.turn[rows])[::-1]]:
            out[row] = later = steps.reward[row] + gamma * later
    return out
