"""What a GUI-agent job sets beyond verl's own keys: the `gui:` node of its config."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from crossrl.section import PositiveInt, Section

Seconds = Annotated[float, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]


class SftConfig(Section):
    """The warm start, `crossrl sft`: clone a scripted expert's answers."""

    tasks: list[str] = ["click-test"]
    episodes: PositiveInt = 512  # of the expert, of each task
    first_seed: Annotated[int, Field(ge=0)] = 1_000_000  # theirs; far from those of training and evaluation
    steps: PositiveInt = 200
    batch: PositiveInt = 32
    lr: Annotated[float, Field(gt=0)] = 1e-3
    spread: Annotated[float, Field(ge=0)] = 0.0  # standard deviation of the expert's hand, in 1/1000 of the screen


class GuiConfig(Section):
    """The environment, what the agent sees of it, and how its episodes are scored and credited."""

    run_dir: str = "runs/gui_agent"
    seed: int = 0
    env: dict[str, Any] = {"name": "miniwob"}  # a `crossrl.envs` plug-in and its options
    codec: str = "computer_use"  # the action format
    system_prompt: str | None = None  # None: the codec's own, which describes every action
    max_steps: PositiveInt = 1  # actions an episode
    screenshots: PositiveInt = 1  # the newest ones in a prompt; older steps are one line of text each
    malformed_penalty: Fraction = 0.1  # taken off the return of an episode that ends in an unreadable answer
    swap_screenshots: bool = False  # show another episode's screen: what does the policy do when it cannot see?
    algorithm: dict[str, Any] = {"name": "gui_grpo"}  # a `crossrl.algorithms` plug-in and its options
    replay: bool = True  # an all-fail group gets an earlier success of the same prompt
    max_refill: PositiveInt = 4  # batches of prompts a step may draw to replace groups without a signal
    record: Annotated[int, Field(ge=0)] = 6  # held-out episodes of each task kept for people, at each evaluation
    sft: SftConfig = SftConfig()
