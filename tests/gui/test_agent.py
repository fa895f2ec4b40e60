"""What the agent loop hands to verl, without a model or a browser: groups, replay, and steps for the credit."""

from collections import OrderedDict

import numpy as np
import pytest

from crossrl_gui_agent.config import GuiConfig
from crossrl_gui_agent.envs import Episode, StopReason


@pytest.fixture
def shared():
    from crossrl_gui_agent.verl.agent import Shared

    return Shared(GuiConfig(), world=None, recorder=None)


def outputs(name, steps=1, version=7):
    from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput

    extra = {"global_steps": version, "min_global_steps": version, "max_global_steps": version, "replayed": False}
    return [
        AgentLoopOutput(
            prompt_ids=[1],
            response_ids=[2],
            response_mask=[1],
            metrics=AgentLoopMetrics(),
            extra_fields=extra | {"n": name},
        )
        for _ in range(steps)
    ]


def episode(stop, seed=3):
    return Episode("click-test", seed, stop=stop)


FAILED, SUCCEEDED = StopReason.FAILURE, StopReason.SUCCESS


def group(shared, uid, stops, seed=3, version=7):
    """What each attempt of a group hands on."""
    return [
        shared.replayed(uid, len(stops), episode(stop, seed), outputs(f"{uid}{i}", version=version))
        for i, stop in enumerate(stops)
    ]


def names(handed):
    return [found[0].extra_fields["n"] for found in handed]


def test_a_group_that_failed_throughout_gets_an_earlier_success(shared):
    assert names(group(shared, "a", [FAILED, SUCCEEDED])) == ["a0", "a1"]
    handed = group(shared, "b", [FAILED, FAILED], version=9)
    assert names(handed) == ["b0", "a1"]
    replayed = handed[1][0].extra_fields
    assert replayed["replayed"] and replayed["global_steps"] == 9  # it trains with the present weights
    assert not shared.successes["click-test", 3][0].extra_fields["replayed"]


@pytest.mark.parametrize("stops", [[FAILED, FAILED], [SUCCEEDED, FAILED], [SUCCEEDED, SUCCEEDED]])
def test_nothing_is_replayed_without_need_or_memory(shared, stops):
    assert names(group(shared, "a", stops)) == ["a0", "a1"]
    assert not shared.groups  # nothing is kept of a finished group


def test_a_success_at_another_seed_is_no_help(shared):
    group(shared, "a", [SUCCEEDED], seed=1)
    assert names(group(shared, "b", [FAILED], seed=2)) == ["b0"]


def test_the_memory_is_bounded_and_forgets_the_oldest(shared, monkeypatch):
    monkeypatch.setattr("crossrl_gui_agent.verl.agent.REMEMBERED", 2)
    for seed in range(4):
        group(shared, f"a{seed}", [SUCCEEDED], seed=seed)
    assert shared.successes == OrderedDict((("click-test", s), shared.successes["click-test", s]) for s in (2, 3))


def fields(stop, turn=0, reward=0.0, shaped=0.0, **more):
    about = {"steps": 1.0, "success": float(stop == "success"), "env_s": 0.5}
    base = {"turn": turn, "anchor": "x", "step_reward": reward, "episode_return": shaped, "stop": stop}
    return base | {"reward_extra_info": about, "replayed": False, "clamped": False, "action": "a"} | more


def test_keys_of_verl_become_groups_episodes_and_steps():
    from crossrl_gui_agent.verl.trainer import rollout_metrics, steps_of

    keys = ["u_0_0", "u_0_1", "u_1_0", "v_0_0", "pad1_0_0"]
    extra = [
        fields("success"),
        fields("success", turn=1, reward=1.0),
        fields("malformed"),
        fields("crashed"),
        fields("success"),
    ]
    steps = steps_of(keys, extra, [True, True, True, True, False])
    assert steps.group.tolist() == ["u", "u", "u", "v", "pad1"]
    assert steps.episode.tolist() == ["u_0", "u_0", "u_1", "v_0", "pad1_0"]
    assert steps.valid.tolist() == [True, True, True, False, False]  # broken by the environment, padding
    metrics = rollout_metrics(steps, extra, [True, True, True, True, False])
    assert metrics["gui/success"] == metrics["gui/stop/success"] == pytest.approx(1 / 3)
    assert metrics["gui/stop/crashed"] == pytest.approx(1 / 3)
    assert np.isclose(sum(v for k, v in metrics.items() if k.startswith("gui/stop/")), 1.0)
