"""Episodes on a web page that offers `window.crossrl`: `start(seed)`, `judge()`, `oracle()`."""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections import OrderedDict
from typing import Any, ClassVar

from crossrl.errors import ConfigError
from crossrl_gui_agent.actions import FINAL, Action, Kind, from_pixels, to_pixels
from crossrl_gui_agent.envs import EpisodeError, Observation, StepResult, StopReason
from crossrl_gui_agent.envs.browser import Browser, BrowserConfig, Tab

log = logging.getLogger(__name__)

FIRST_SCREENS = 4096
"""How many first screens are remembered: the attempts at one prompt all begin with the same."""
LONGEST_WAIT_S = 2.0
"""A page that is waited for shows nothing new after this."""

_NAMED = {
    "pageup": "PageUp",
    "pagedown": "PageDown",
    "up": "ArrowUp",
    "down": "ArrowDown",
    "left": "ArrowLeft",
    "right": "ArrowRight",
    "ctrl": "Control",
}
_CLICKS = {
    Kind.CLICK: {},
    Kind.DOUBLE_CLICK: {"click_count": 2},
    Kind.TRIPLE_CLICK: {"click_count": 3},
    Kind.RIGHT_CLICK: {"button": "right"},
    Kind.MIDDLE_CLICK: {"button": "middle"},
}


class PageWorld(ABC):
    """Pages in one browser. A page's script offers, as `window.crossrl`,

    - `start(seed)`: set the episode up and return its instruction;
    - `judge()`: `{reward: 0..1, done: bool}`;
    - `oracle()`: the expert's next step as `{kind, x, y}` (pixels), `{kind: "type", text}`, ..., or null.
    """

    Config = BrowserConfig
    size: ClassVar[tuple[int, int]]
    script: ClassVar[str] = ""  # run in every page before its own
    style: ClassVar[str] = "* { caret-color: transparent !important; }"  # a blinking caret is no news
    actions = frozenset(Kind) - {Kind.LONG_PRESS, Kind.SYSTEM, Kind.OPEN}

    def __init__(self, config: BrowserConfig) -> None:
        self.browser = Browser(config, *self.size)
        self._firsts: OrderedDict[tuple[str, int], asyncio.Future[tuple[str, bytes]]] = OrderedDict()

    @abstractmethod
    def tasks(self) -> list[str]:
        """The tasks there are."""

    @abstractmethod
    def url(self, task: str) -> str:
        """Where the task's page is."""

    def env(self) -> PageEnv:
        """One more screen."""
        return PageEnv(self)

    async def close(self) -> None:
        """Stop the browser."""
        await self.browser.close()

    async def first(self, task: str, seed: int) -> tuple[str, bytes]:
        """Instruction and first screen of an episode: looked at once, however many attempts are made at it."""
        key = (task, seed)
        if key not in self._firsts:
            self._firsts[key] = asyncio.ensure_future(self._look(task, seed))
            while len(self._firsts) > FIRST_SCREENS:
                self._firsts.popitem(last=False)
        try:
            return await asyncio.shield(self._firsts[key])
        except BaseException:
            self._firsts.pop(key, None)
            raise

    async def _look(self, task: str, seed: int) -> tuple[str, bytes]:
        for attempt in (1, 2):
            env = self.env()
            try:
                goal = await env.start(task, seed)
                return goal, await self.browser.screenshot(env.tab)
            except EpisodeError as error:
                env.broken = True
                if attempt == 2:
                    raise
                log.warning("%s %d: %s; tried again", task, seed, error)
            finally:
                await env.close()
        raise AssertionError

    async def load(self, tab: Tab, task: str, seed: int) -> str:
        """Show the task's page, start the episode, return its instruction."""
        if tab.url != (url := self.url(task)):
            await self.browser.within(tab.page.goto(url))
            if self.script:
                await self.browser.within(tab.page.evaluate(self.script))
            await self.browser.within(tab.page.add_style_tag(content=self.style))
            tab.url = url
        tab.served += 1
        await self.browser.within(tab.page.mouse.move(0, 0))  # no element hovers
        return await self.browser.within(tab.page.evaluate("seed => window.crossrl.start(seed)", seed))


class PageEnv:
    """An `Env`: takes a tab of the browser at its first action, since until then all attempts see the same screen."""

    def __init__(self, world: PageWorld) -> None:
        self.world, self.browser = world, world.browser
        self.tab: Tab | None = None
        self.broken = False
        self.task, self.seed, self.goal, self.steps = "", 0, "", 0

    async def reset(self, seed: int, task: str) -> Observation:
        """Start an episode."""
        if task not in self.world.tasks():
            raise ConfigError(f"there is no task {task!r}", where="task", fix=f"one of {', '.join(self.world.tasks())}")
        await self.close()
        self.task, self.seed, self.steps = task, seed, 0
        self.goal, screen = await self.world.first(task, seed)

        async def known() -> bytes:
            return screen

        return Observation(self.goal, *self.world.size, known)

    async def start(self, task: str, seed: int) -> str:
        """Take a tab and set the episode up in it; its instruction."""
        self.tab = await self.browser.lease()
        self.broken = True  # until it is known to be fine
        goal = await self.world.load(self.tab, task, seed)
        self.broken = False
        return goal

    async def step(self, action: Action) -> StepResult:
        """Carry out an action."""
        try:
            await self._begun()
            if action.kind not in FINAL:
                await self.browser.within(self._perform(action))
            verdict = await self.browser.within(self.tab.page.evaluate("() => window.crossrl.judge()"))
        except EpisodeError as error:
            self.broken = True
            log.info("%s %d: %s", self.task, self.seed, error)
            return StepResult(self._seen(), 0.0, error.stop)
        self.steps += 1
        reward, stop = float(verdict["reward"]), None
        if verdict["done"]:
            stop = StopReason.SUCCESS if reward >= 1 else StopReason.FAILURE
        elif action.kind in FINAL:
            stop = StopReason.TERMINATED
        return StepResult(self._seen(), reward if stop is StopReason.SUCCESS else 0.0, stop)

    async def oracle(self) -> Action | None:
        """What the page's expert would do next."""
        await self._begun()
        advice = await self.browser.within(self.tab.page.evaluate("() => window.crossrl.oracle()"))
        if advice is None:
            return None
        given = dict(advice)
        if "x" in given:
            given["x"], given["y"] = from_pixels(given["x"], given["y"], *self.world.size)
        if "keys" in given:
            given["keys"] = tuple(given["keys"])
        return Action(Kind(given.pop("kind")), **given)

    async def close(self) -> None:
        """Give the tab back."""
        if self.tab is not None:
            tab, self.tab = self.tab, None
            await self.browser.give_back(tab, self.broken)
            self.broken = False

    async def _begun(self) -> None:
        """Set the episode up before its first action; a tab that fails at that is replaced once."""
        if self.tab is not None:
            return
        try:
            await self.start(self.task, self.seed)
        except EpisodeError as error:
            log.warning("%s %d: %s; tried again", self.task, self.seed, error)
            await self.close()
            await self.start(self.task, self.seed)

    def _seen(self) -> Observation:
        step, tab = self.steps, self.tab

        async def take() -> bytes:
            if self.tab is not tab or self.steps != step:
                raise EpisodeError("that screen is gone", where="screenshot")
            try:
                return await self.browser.screenshot(tab)
            except EpisodeError:
                self.broken = True
                raise

        return Observation(self.goal, *self.world.size, take)

    async def _perform(self, action: Action) -> None:
        page, kind = self.tab.page, action.kind
        if action.x is not None:
            x, y = to_pixels(action.x, action.y, *self.world.size)
            await page.mouse.move(x, y)
        if kind in _CLICKS:
            await page.mouse.click(x, y, **_CLICKS[kind])
        elif kind is Kind.DRAG:
            await page.mouse.down()
            await page.mouse.move(*to_pixels(action.x2, action.y2, *self.world.size), steps=4)
            await page.mouse.up()
        elif kind is Kind.TYPE:
            await page.keyboard.type(action.text)
        elif kind is Kind.KEY:
            await page.keyboard.press("+".join(_key(key) for key in action.keys))
        elif kind in (Kind.SCROLL, Kind.HSCROLL):
            wheel = (0, -action.pixels) if kind is Kind.SCROLL else (-action.pixels, 0)
            await page.mouse.wheel(*wheel)
        elif kind is Kind.WAIT:
            await asyncio.sleep(min(action.seconds or 1.0, LONGEST_WAIT_S))


def _key(name: str) -> Any:
    return _NAMED.get(name, name if len(name) == 1 else name.title())
