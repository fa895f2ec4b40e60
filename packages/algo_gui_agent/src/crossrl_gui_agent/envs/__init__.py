"""Environments: what an episode is, and the contract of a `crossrl.envs` plug-in."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, ClassVar, Protocol

from crossrl.errors import WorkerError
from crossrl.section import Section
from crossrl_gui_agent.actions import Action, Kind


class StopReason(StrEnum):
    """Why an episode ended."""

    SUCCESS = "success"
    FAILURE = "failure"
    TERMINATED = "terminated"  # the agent gave up, or claimed to be done when the task was not
    MAX_STEPS = "max_steps"
    MALFORMED = "malformed"  # an answer that is no action
    TIMEOUT = "timeout"  # the environment did not answer within its deadline
    CRASHED = "crashed"  # the environment died

    @property
    def blameless(self) -> bool:
        """Whether the agent had no part in it: such an episode teaches nothing."""
        return self in (StopReason.TIMEOUT, StopReason.CRASHED)


class EpisodeError(WorkerError):
    """No screen could be had; `stop` is the reason that the episode ends with."""

    stop: ClassVar[StopReason] = StopReason.CRASHED


class EpisodeTimeout(EpisodeError):
    """The environment did not answer within its deadline."""

    stop = StopReason.TIMEOUT


class Observation:
    """What there is to see: the instruction, the screen's size, and `screenshot()`, taken when first asked for."""

    def __init__(self, goal: str, width: int, height: int, take: Callable[[], Awaitable[bytes]]) -> None:
        self.goal, self.width, self.height = goal, width, height
        self._take, self._png, self._lock = take, None, asyncio.Lock()

    async def screenshot(self) -> bytes:
        """The screen as PNG. Raises `EpisodeError` if it cannot be had: also when a later step has changed it."""
        async with self._lock:
            if self._png is None:
                self._png = await self._take()
            return self._png


@dataclass(frozen=True, slots=True)
class StepResult:
    """After an action: what is to see now, the reward in [0, 1] of this step, and why the episode ended, if it did."""

    observation: Observation
    reward: float = 0.0
    stop: StopReason | None = None

    @property
    def done(self) -> bool:
        """Whether the episode is over."""
        return self.stop is not None


class Env(Protocol):
    """One screen that plays episode after episode."""

    async def reset(self, seed: int, task: str) -> Observation:
        """Start an episode. Equal seeds give equal episodes.

        Raises `EpisodeError` if that fails even with a fresh screen, `ConfigError` if there is no such task.
        """

    async def step(self, action: Action) -> StepResult:
        """Carry out an action. Never raises for what happens to the environment: the episode ends with a reason."""

    async def oracle(self) -> Action | None:
        """What a scripted expert would do next; None if there is none for this task."""

    async def close(self) -> None:
        """Give back what it holds; a later `reset` works."""


class World(Protocol):
    """A `crossrl.envs` plug-in: what its environments share, such as one browser. Built from its `Config`."""

    Config: ClassVar[type[Section]]
    actions: ClassVar[frozenset[Kind]]  # those its environments carry out

    def __init__(self, config: Any) -> None: ...

    def tasks(self) -> list[str]:
        """The tasks there are."""

    def env(self) -> Env:
        """One more screen; takes nothing until it is reset."""

    async def close(self) -> None:
        """Stop what is shared."""


@dataclass(slots=True)
class Step:
    """A step as it is kept: the screen before it, the answer and the action in it, and its reward."""

    screen: bytes
    answer: str
    action: Action | None
    reward: float = 0.0


@dataclass(slots=True)
class Episode:
    """An episode as it was played."""

    task: str
    seed: int
    goal: str = ""
    steps: list[Step] = field(default_factory=list)
    stop: StopReason = StopReason.MAX_STEPS
    last: bytes | None = None  # the screen at its end, where there was one

    @property
    def reward(self) -> float:
        """The sum over its steps."""
        return sum(step.reward for step in self.steps)


Policy = Callable[[Observation, Episode], Awaitable[tuple[str, Action | None]]]
"""(what is seen, the episode so far) -> (the answer, the action in it or None)."""


async def play(env: Env, policy: Policy, seed: int, task: str, max_steps: int = 10, keep_last: bool = False) -> Episode:
    """One episode, with the screen at its end if `keep_last`.

    Whatever befalls the environment becomes the episode's stop reason; what the policy raises is raised.
    """
    episode = Episode(task, seed)
    try:
        seen = await env.reset(seed, task)
        episode.goal = seen.goal
        for _ in range(max_steps):
            screen = await seen.screenshot()
            answer, action = await policy(seen, episode)
            episode.steps.append(Step(screen, answer, action))
            if action is None:
                episode.stop = StopReason.MALFORMED
                return episode
            result = await env.step(action)
            episode.steps[-1].reward, seen = result.reward, result.observation
            if result.stop is not None:
                episode.stop = result.stop
                break
        if keep_last and not episode.stop.blameless:
            episode.last = await seen.screenshot()
    except EpisodeError as error:
        episode.stop = error.stop
    finally:
        await env.close()
    return episode
