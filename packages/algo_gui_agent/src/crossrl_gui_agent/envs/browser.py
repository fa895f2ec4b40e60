"""One headless Chromium and its contexts: leased, recycled, and replaced when they break."""

from __future__ import annotations

import asyncio
import base64
import logging
import shutil
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Any, TypeVar

from crossrl.errors import WorkerError
from crossrl.section import PositiveInt, Section
from crossrl_gui_agent.config import Seconds
from crossrl_gui_agent.envs import EpisodeError, EpisodeTimeout

log = logging.getLogger(__name__)

T = TypeVar("T")
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
RECYCLE = 200
"""Episodes a context serves: the renderer of one that serves thousands runs out of memory."""
FLAGS = (
    "--disable-gpu",
    "--disable-quic",
    "--disable-lcd-text",  # equal pages are equal pixels
    "--font-render-hinting=none",
    "--force-color-profile=srgb",
    "--hide-scrollbars",
)
CLOSING_S = 5.0


class BrowserConfig(Section):
    """Options of every environment in a browser."""

    executable: str | None = None  # None: the first Chromium or Chrome on the PATH
    contexts: PositiveInt = 16  # episodes that may act at the same time, about 60 MB each
    deadline_s: Seconds = 30.0  # for each call of the browser


@dataclass(slots=True)
class Tab:
    """A page in a context of its own. `url` is what is loaded, `served` counts episodes."""

    context: Any
    page: Any
    cdp: Any
    url: str = ""
    served: int = 0


def missing_browser(executable: str | None = None) -> str | None:
    """What is wrong with the browser of this machine, and what to install; None if there is one."""
    if executable and not shutil.which(executable):
        return f"no program {executable!r}"
    if executable is None and not any(map(shutil.which, NAMES)):
        return (
            "no Chromium on the PATH: install it (Debian, Ubuntu: apt-get install chromium) or set gui.env.executable"
        )
    return None


class Browser:
    """Starts when first needed, and again after it died. Belongs to one event loop."""

    def __init__(self, config: BrowserConfig, width: int, height: int) -> None:
        self.config, self.width, self.height = config, width, height
        self.starts = 0
        self._free = asyncio.Semaphore(config.contexts)
        self._starting = asyncio.Lock()
        self._idle: list[Tab] = []
        self._driver: Any = None
        self._browser: Any = None

    async def within(self, call: Awaitable[T], seconds: float | None = None) -> T:
        """The call's result; `EpisodeTimeout` past the deadline, `EpisodeError` for what Playwright raises."""
        from playwright.async_api import Error

        try:
            return await asyncio.wait_for(call, seconds or self.config.deadline_s)
        except TimeoutError as error:
            raise EpisodeTimeout("the browser did not answer in time", where="browser") from error
        except Error as error:
            raise EpisodeError(str(error).splitlines()[0], where="browser") from error

    async def lease(self) -> Tab:
        """A tab of one's own, when one is free."""
        await self._free.acquire()
        try:
            await self._alive()
            return self._idle.pop() if self._idle else await self._open()
        except BaseException:
            self._free.release()
            raise

    async def give_back(self, tab: Tab, broken: bool) -> None:
        """Return a tab; a broken or worn one is closed. Never raises."""
        try:
            if broken or tab.served >= RECYCLE:
                await self.within(tab.context.close(), CLOSING_S)
            else:
                self._idle.append(tab)
        except EpisodeError as error:
            log.warning("a browser context could not be closed (%s): the browser is started again", error)
            await self._stop()
        finally:
            self._free.release()

    async def screenshot(self, tab: Tab) -> bytes:
        """The viewport as PNG."""
        # the protocol's own call: page.screenshot waits for fonts, and costs a third more
        shot = tab.cdp.send("Page.captureScreenshot", {"format": "png", "optimizeForSpeed": True})
        return base64.b64decode((await self.within(shot))["data"])

    async def close(self) -> None:
        """Stop the browser; a later lease starts it again."""
        await self._stop()
        if self._driver is not None:
            driver, self._driver = self._driver, None
            await driver.stop()

    async def _alive(self) -> None:
        async with self._starting:
            if self._browser is not None and self._browser.is_connected():
                return
            await self._stop()
            if reason := missing_browser(self.config.executable):
                raise WorkerError(reason, where="gui.env.executable")
            if self._driver is None:
                from playwright.async_api import async_playwright

                self._driver = await async_playwright().start()
            path = self.config.executable or next(filter(None, map(shutil.which, NAMES)))
            launch = self._driver.chromium.launch(executable_path=path, args=list(FLAGS))
            self._browser = await self.within(launch, 2 * self.config.deadline_s)
            self.starts += 1

    async def _open(self) -> Tab:
        # offline: what a policy does on a page must not reach the network
        size = {"width": self.width, "height": self.height}
        context = await self.within(self._browser.new_context(viewport=size, offline=True))
        page = await self.within(context.new_page())
        page.on("dialog", lambda dialog: asyncio.ensure_future(_dismiss(dialog)))
        return Tab(context, page, await self.within(context.new_cdp_session(page)))

    async def _stop(self) -> None:
        browser, self._browser = self._browser, None
        self._idle.clear()
        if browser is None:
            return
        try:
            await self.within(browser.close(), CLOSING_S)
        except EpisodeError as error:
            log.warning("the browser could not be closed: %s", error)


async def _dismiss(dialog: Any) -> None:
    """A JavaScript alert blocks its page until it is answered."""
    from playwright.async_api import Error

    try:
        await dialog.dismiss()
    except Error as error:  # gone with its page
        log.debug("a dialog could not be dismissed: %s", error)
