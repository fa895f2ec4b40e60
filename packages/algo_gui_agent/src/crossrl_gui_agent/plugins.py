"""The plug-ins of this package, described; nothing heavy is imported."""

from crossrl.protocols import Plugin


def _missing_browser() -> str | None:
    from crossrl_gui_agent.envs.browser import missing_browser

    return missing_browser()


gui_grpo = Plugin(
    name="gui_grpo",
    summary="GRPO on whole episodes of a GUI agent (arXiv 2402.03300)",
    target="crossrl_gui_agent.grpo:GuiGRPO",
)
gigpo = Plugin(
    name="gigpo",
    summary="GiGPO (arXiv 2505.10978): GRPO on episodes and on the steps that saw the same screen",
    target="crossrl_gui_agent.grpo:GiGPO",
)
miniwob = Plugin(
    name="miniwob",
    summary="MiniWoB++ pages in a headless Chromium",
    target="crossrl_gui_agent.envs.miniwob:MiniWob",
    requires=("miniwob>=1.1", "playwright>=1.50"),
    available=_missing_browser,
)
pages = Plugin(
    name="pages",
    summary="own pages of several steps: a form, a shop, a settings dialog",
    target="crossrl_gui_agent.envs.pages:Pages",
    requires=("playwright>=1.50",),
    available=_missing_browser,
)
gui = Plugin(
    name="gui",
    summary="reinforcement learning of a GUI agent, on verl's own engines",
    target="crossrl_gui_agent.job:GuiKind",
)
