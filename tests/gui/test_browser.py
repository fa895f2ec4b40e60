"""MiniWoB++ in a real Chromium: experts succeed, episodes repeat, and whatever breaks ends an episode with a reason."""

import asyncio
import io
import random

import numpy as np
import pytest
from PIL import Image

from crossrl.errors import ConfigError
from crossrl_gui_agent.actions import Action, Kind
from crossrl_gui_agent.demos import blurred, expert
from crossrl_gui_agent.envs import StopReason, play
from crossrl_gui_agent.envs.miniwob import MiniWob
from crossrl_gui_agent.envs.pages import Pages

pytestmark = [pytest.mark.browser, pytest.mark.usefixtures("browser")]

CORNER = Action(Kind.CLICK, x=1000, y=1000)


def run(scenario, kind=MiniWob, **options):
    """`await scenario(world)` with a world of its own."""

    async def main():
        world = kind(kind.Config(**({"contexts": 4, "deadline_s": 10} | options)))
        try:
            return await asyncio.wait_for(scenario(world), 120)
        finally:
            await world.close()

    return asyncio.run(main())


def always(action, answer="answer"):
    async def policy(_seen, _episode):
        return answer, action

    return policy


def pixels(png):
    return np.asarray(Image.open(io.BytesIO(png)).convert("RGB"))


@pytest.mark.parametrize(
    ("task", "least"),
    [
        ("click-test", 1.0),
        ("click-test-2", 0.7),  # the page itself sometimes puts one button over the other
        ("click-button", 1.0),
        ("click-dialog", 1.0),
        ("click-dialog-2", 1.0),
        ("click-collapsible-nodelay", 1.0),
        ("click-checkboxes", 1.0),
        ("click-link", 1.0),
        ("focus-text", 1.0),
        ("enter-text", 1.0),
    ],
)
def test_the_expert_succeeds_by_real_clicks(task, least):
    async def scenario(world):
        envs = [world.env() for _ in range(10)]
        return await asyncio.gather(*(play(e, expert(e, str), s, task, 10) for s, e in enumerate(envs)))

    episodes = run(scenario)
    assert np.mean([e.stop is StopReason.SUCCESS for e in episodes]) >= least
    assert all(e.reward == (e.stop is StopReason.SUCCESS) for e in episodes)


@pytest.mark.parametrize("task", ["form", "settings", "shop"])
def test_own_pages_need_several_steps_and_their_exact_outcome(task):
    async def hasty(_seen, _episode):  # ends the episode as early as can be
        return "answer", Action(Kind.TERMINATE, status="success")

    async def scenario(world):
        assert world.tasks() == ["form", "settings", "shop"]
        envs = [world.env() for _ in range(12)]
        played = await asyncio.gather(*(play(e, expert(e, str), s, task, 12) for s, e in enumerate(envs)))
        again = await play(envs[0], expert(envs[0], str), 0, task, 12)
        return played, again, await play(world.env(), hasty, 0, task, 12)

    played, again, early = run(scenario, Pages)
    assert {e.stop for e in played} == {StopReason.SUCCESS}
    assert min(len(e.steps) for e in played) >= 2
    both = zip(played[0].steps, again.steps, strict=True)
    assert all(np.array_equal(pixels(a.screen), pixels(b.screen)) for a, b in both)
    assert len({e.goal for e in played}) > 4
    assert early.reward == 0


def test_a_form_sent_wrongly_is_a_failure():
    async def scenario(world):
        env = world.env()

        async def send(_seen, _episode):
            await env.oracle()  # takes a tab
            box = await env.tab.page.evaluate("() => at(document.querySelector('button.main'))")
            return "answer", Action(Kind.CLICK, x=round(box["x"] / 0.32), y=round(box["y"] / 0.32))

        return await play(env, send, 0, "form", 3)

    episode = run(scenario, Pages)
    assert (episode.stop, episode.reward) == (StopReason.FAILURE, 0.0)


def test_equal_seeds_are_equal_pixels_also_after_other_episodes():
    async def scenario(world):
        first = [await play(world.env(), always(CORNER), s, "click-test", 1, keep_last=True) for s in (1, 2)]
        world._firsts.clear()
        again = [await play(world.env(), always(CORNER), s, "click-test", 1, keep_last=True) for s in (2, 1)]
        return first, again[::-1]

    first, again = run(scenario)
    for a, b in zip(first, again, strict=True):
        assert np.array_equal(pixels(a.steps[0].screen), pixels(b.steps[0].screen))
        assert np.array_equal(pixels(a.last), pixels(b.last))
    assert not np.array_equal(pixels(first[0].steps[0].screen), pixels(first[1].steps[0].screen))
    assert pixels(first[0].steps[0].screen).shape == (224, 160, 3)


def test_a_miss_goes_on_and_the_last_step_ends_it():
    episode = run(lambda world: play(world.env(), always(CORNER), 0, "click-test", 3))
    assert (episode.stop, len(episode.steps), episode.reward) == (StopReason.MAX_STEPS, 3, 0.0)


def test_an_unreadable_answer_ends_the_episode():
    episode = run(lambda world: play(world.env(), always(None, "x" * 10_000), 0, "click-test", 3))
    assert (episode.stop, len(episode.steps), episode.reward) == (StopReason.MALFORMED, 1, 0.0)


def test_giving_up_is_no_success():
    done = Action(Kind.TERMINATE, status="success")
    episode = run(lambda world: play(world.env(), always(done), 0, "click-test", 3))
    assert (episode.stop, episode.reward) == (StopReason.TERMINATED, 0.0)


def test_an_unknown_task_is_refused_by_name():
    with pytest.raises(ConfigError, match="no task 'click-tset'"):
        run(lambda world: play(world.env(), always(CORNER), 0, "click-tset", 1))


def test_a_page_that_hangs_ends_its_episode_and_the_tab_is_replaced():
    async def scenario(world):
        env = world.env()

        async def hang(_seen, _episode):
            if env.tab is None:
                await env._begun()
            busy = asyncio.ensure_future(env.tab.page.evaluate("() => { while (true) {} }"))
            busy.add_done_callback(lambda call: call.exception())
            await asyncio.sleep(0.2)
            return "answer", CORNER

        hung = await play(env, hang, 0, "click-test", 3)
        after = world.env()
        return hung, await play(after, expert(after, str), 1, "click-test", 1)

    hung, after = run(scenario, deadline_s=2, contexts=1)
    assert (hung.stop, hung.reward) == (StopReason.TIMEOUT, 0.0)
    assert hung.stop.blameless
    assert after.stop is StopReason.SUCCESS


def test_a_killed_browser_ends_what_it_played_and_is_started_again():
    async def scenario(world):
        async def kill(_seen, _episode):
            await world.browser._browser.close()
            return "answer", CORNER

        env = world.env()
        killed = await play(env, kill, 0, "click-test", 3)
        after = world.env()
        return killed, await play(after, expert(after, str), 1, "click-test", 1), world.browser.starts

    killed, after, starts = run(scenario)
    assert killed.stop in (StopReason.MAX_STEPS, StopReason.CRASHED)  # the first action found a new browser, or none
    assert after.stop is StopReason.SUCCESS
    assert starts >= 2


def test_a_full_house_waits_for_a_free_tab():
    async def scenario(world):
        envs = [world.env() for _ in range(12)]
        return await asyncio.gather(*(play(e, expert(e, str), s, "click-test", 1) for s, e in enumerate(envs)))

    assert all(e.stop is StopReason.SUCCESS for e in run(scenario, contexts=1))


def test_an_unsteady_hand_stays_on_the_screen():
    rng = random.Random(0)
    moved = [blurred(Action(Kind.CLICK, x=10, y=990), 200.0, rng) for _ in range(200)]
    assert {0 <= a.x <= 1000 and 0 <= a.y <= 1000 for a in moved} == {True}
    assert np.std([a.x for a in moved]) > 50
