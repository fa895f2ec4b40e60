"""The `verl.plugins` entry of the GUI agent: verl imports it in every process, so it only says what to load when."""

from crossrl.verl.plugin import load_after

load_after("verl.trainer.ppo.v1", "crossrl_gui_agent.verl.trainer", trainer="crossrl_gui")
load_after("verl.workers.engine", "crossrl_gui_agent.verl.engine")
load_after("verl.experimental.agent_loop", "crossrl_gui_agent.verl.agent")
