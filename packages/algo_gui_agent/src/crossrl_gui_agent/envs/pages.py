"""Own pages of several steps: a form, a shop and a settings dialog, each with a checker and an expert."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from crossrl_gui_agent.envs.page import PageWorld

FOLDER = Path(str(files("crossrl_gui_agent").joinpath("envs/pages")))


class Pages(PageWorld):
    """The instruction is on the page. Success is the exact final state at the moment it is committed."""

    size = (320, 320)  # 100 image tokens of Qwen3-VL, no resize

    def tasks(self) -> list[str]:
        """Its pages."""
        return sorted(script.stem for script in FOLDER.glob("*.js") if script.stem != "common")

    def url(self, task: str) -> str:
        """The page with the task's script."""
        return (FOLDER / "page.html").as_uri() + f"?{task}"
