"""Broken rewards are counted and dropped; nothing is invented (F9)."""

import numpy as np
import pytest

from crossrl.errors import RewardError
from crossrl.rewards import RewardSet
from crossrl.types import Media, Prompt, SampleKey, Score

MEDIA = Media(
    tuple(SampleKey(Prompt("p", "text"), g) for g in range(4)), np.zeros((4, 2, 4, 4, 3), np.uint8), 8.0, {"x": 1.0}
)


class Fixed:
    name, range = "fixed", (0.0, 1.0)

    def __init__(self, answers):
        self.answers = answers

    def score(self, samples):
        out = [self.answers[s.index] for s in samples]
        if any(isinstance(a, Exception) for a in out):
            raise next(a for a in out if isinstance(a, Exception))
        return out


@pytest.mark.parametrize(
    "bad", [float("nan"), float("inf"), 1.5, None, "0.5", ValueError("no object")], ids=lambda b: repr(b)
)
@pytest.mark.parametrize("micro", [1, 4])
def test_a_bad_score_drops_its_sample_only(bad, micro):
    answer = bad if bad is None or isinstance(bad, Exception | str) else Score(bad)
    scored = RewardSet([Fixed([Score(0.1), answer, Score(0.3), Score(0.4)])], micro).score(MEDIA)
    assert [s and s[0].value for s in scored.scores.values()] == [0.1, None, 0.3, 0.4]
    assert len(scored.problems) == 1 and "p#1" in scored.problems[0]
    assert scored.stats == {"x": 1.0}


def test_one_failing_reward_of_two_drops_the_sample():
    good, bad = Fixed([Score(0.5)] * 4), Fixed([Score(0.5), Score(2.0), Score(0.5), Score(0.5)])
    scored = RewardSet([good, bad], 4).score(MEDIA)
    assert [s is None for s in scored.scores.values()] == [False, True, False, False]


def test_wrong_length_is_an_error_of_the_reward():
    class Short(Fixed):
        def score(self, samples):
            return [Score(0.5)]

    with pytest.raises(RewardError, match="1 scores for 4 samples"):
        RewardSet([Short([])], 4).score(MEDIA)
