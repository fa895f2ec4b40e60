"""Demonstrations: a scripted expert's episodes, as (prompt, action) pairs."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from crossrl.errors import DataError
from crossrl_gui_agent.actions import SCALE, Action
from crossrl_gui_agent.envs import Env, Episode, Observation, StopReason, World, play
from crossrl_gui_agent.prompting import Prompt, Prompter, Turn, open_screen


@dataclass(frozen=True, slots=True)
class Demonstration:
    """What the expert saw and did at one step."""

    prompt: Prompt
    action: Action


def expert(env: Env, render: Callable[[Action], str]):
    """A policy that does what the environment's oracle says; `DataError` for a task without one."""

    async def policy(_: Observation, episode: Episode) -> tuple[str, Action]:
        action = await env.oracle()
        if action is None:
            raise DataError(f"no scripted expert for {episode.task!r}", where="sft", fix="leave the task out")
        return render(action), action

    return policy


async def collect(
    world: World,
    episodes: Iterable[tuple[str, int]],
    prompter: Prompter,
    render: Callable[[Action], str],
    *,
    system: str,
    screenshots: int,
    max_steps: int,
) -> list[Demonstration]:
    """The steps of the expert's successful episodes, in the order of `episodes`."""

    async def one(task: str, seed: int) -> Episode:
        env = world.env()
        return await play(env, expert(env, render), seed, task, max_steps)

    played = await asyncio.gather(*(one(task, seed) for task, seed in episodes))
    found: list[Demonstration] = []
    for episode in played:
        past: list[Turn] = []
        for step in episode.steps if episode.stop is StopReason.SUCCESS else ():
            screen = open_screen(step.screen)
            prompt = prompter(episode.goal, past, screen, screenshots, system)
            found.append(Demonstration(prompt, step.action))
            past.append(Turn(screen, step.answer, step.action.short()))
    return found


def blurred(action: Action, spread: float, rng: random.Random) -> Action:
    """The action with its point moved by normal noise of standard deviation `spread` (in 1/1000 of the screen).

    Cloning an expert of unsteady hand gives a policy that looks, and still has something to explore.
    """
    if action.x is None or spread == 0:
        return action
    moved = {name: min(SCALE, max(0, round(rng.gauss(getattr(action, name), spread)))) for name in ("x", "y")}
    return replace(action, **moved)
