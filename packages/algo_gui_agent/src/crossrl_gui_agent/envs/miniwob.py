"""MiniWoB++ (PyPI `miniwob`): its pages, driven by Playwright; no selenium, no server."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path

from crossrl_gui_agent.envs.page import PageWorld


@cache
def _pages() -> dict[str, Path]:
    folder = Path(next(iter(find_spec("miniwob").submodule_search_locations))) / "html" / "miniwob"
    return {page.stem: page for page in sorted(folder.glob("*.html"))}


class MiniWob(PageWorld):
    """The instruction bar is part of the screen. Success is the page's full raw reward, without its clock.

    The page's own time limit would punish a slow policy, partial credit is not success, and what MiniWoB++ draws over
    a page (score board, click marker, START cover) is hidden: the marker would tell where the last click went.
    """

    size = (160, 224)  # multiples of 32 around the task's 160 x 210: no resize, 35 image tokens of Qwen3-VL
    script = files("crossrl_gui_agent").joinpath("envs/miniwob.js").read_text()
    style = PageWorld.style + " #reward-display, #click-canvas, #sync-task-cover { display: none !important; }"

    def tasks(self) -> list[str]:
        """Its pages."""
        return list(_pages())

    def url(self, task: str) -> str:
        """The page's file."""
        return _pages()[task].as_uri()
