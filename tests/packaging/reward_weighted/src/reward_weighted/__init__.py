"""Describes the plug-in; importing it loads nothing heavy."""

from crossrl.protocols import Plugin

plugin = Plugin(
    name="reward_weighted",
    summary="flow matching on own samples, weighted by their positive advantage",
    target="reward_weighted.algorithm:RewardWeighted",
)
