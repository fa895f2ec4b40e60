"""MindSpeed-MM behind CrossRL's Backend contract."""

from crossrl.protocols import Plugin


def _not_yet() -> str:
    return "not yet: the MindSpeed-MM backend has no engine in this release; use backend=veomni"


plugin = Plugin(
    name="mindspeed",
    summary="MindSpeed-MM (native FSDP2 route): announced, not in this release",
    target="crossrl_mindspeed.backend:backend",
    available=_not_yet,
)
