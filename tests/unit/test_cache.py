"""What a worker holds for an update."""

import pytest
import torch

from crossrl.cache import HeldSamples, TextCache
from crossrl.errors import WorkerError
from crossrl.types import Prompt, SampleKey, Trajectory, UpdatePlan


def key(name, text="", index=0):
    return SampleKey(Prompt(name, text), index)


def held():
    samples = HeldSamples()
    keys = (key("a", "text of a"), key("b", "text of b"))
    samples.add(Trajectory(keys, torch.ones(2), torch.arange(2.0).view(2, 1), {"p": torch.tensor([5.0, 6.0])}), step=3)
    return samples


def test_a_rank_trains_what_it_holds_and_pads_with_weight_zero():
    plan = UpdatePlan(3, 0, (key("b"), key("elsewhere")), (2.0, 1.0), samples_per_rank=2)
    trajectory, advantages, real = held().share(plan)
    assert trajectory.latents[0].item() == 1.0 and trajectory.data["p"][0] == 6.0
    assert advantages.tolist() == [2.0, 0.0] and real.tolist() == [1.0, 0.0]


def test_the_held_captions_are_trained_whatever_the_plan_calls_them():
    trajectory, *_ = held().share(UpdatePlan(3, 0, (key("b"), key("a")), (0.0, 0.0), 2))
    assert [k.prompt.text for k in trajectory.keys] == ["text of b", "text of a"]


def test_a_plan_of_another_step_is_refused():
    with pytest.raises(WorkerError, match="step 4"):
        held().share(UpdatePlan(4, 0, (key("a"),), (0.0,), 1))


def test_a_text_is_encoded_alone_so_that_its_neighbours_and_a_restart_change_nothing():
    class Family:
        calls = []

        def encode_text(self, texts):
            self.calls.append(list(texts))
            return {"h": torch.tensor([[float(len(t))] for t in texts])}

    cache = TextCache(Family())
    assert cache.rows(["a", "bb", "a"])["h"].flatten().tolist() == [1.0, 2.0, 1.0]
    cache.rows(["bb", "ccc"])
    assert Family.calls == [["a"], ["bb"], ["ccc"]]
