"""GRPO for GUI agents behind CrossRL's Algorithm contract."""

from crossrl.protocols import Plugin


def _not_yet() -> str:
    return "not yet: the GUI agent has no trainer in this release"


plugin = Plugin(
    name="gui_grpo",
    summary="GRPO for a Qwen3-VL GUI agent: announced, not in this release",
    target="crossrl_gui_agent.grpo:GuiGRPO",
    available=_not_yet,
)
