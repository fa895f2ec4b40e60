"""The GUI agent as verl's agent loop: one episode a session, one sample a step of it."""

from __future__ import annotations

import time
from collections import OrderedDict
from dataclasses import dataclass, field
from functools import cache
from hashlib import blake2b
from typing import Any

from omegaconf import OmegaConf
from PIL import Image
from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput, register

from crossrl_gui_agent.actions import Action, Parsed
from crossrl_gui_agent.codecs import CODECS
from crossrl_gui_agent.config import GuiConfig
from crossrl_gui_agent.envs import Episode, Observation, Step, StopReason, World, play
from crossrl_gui_agent.episodes import Recorder
from crossrl_gui_agent.job import build_world, load_config, system_prompt
from crossrl_gui_agent.prompting import Prompt, Prompter, Turn, open_screen

REMEMBERED = 1024
"""Successes kept for replay in each agent-loop worker."""


@dataclass(slots=True)
class _Group:
    """The attempts at one prompt that this worker has finished."""

    finished: int = 0
    succeeded: bool = False


@dataclass(slots=True)
class Shared:
    """What the loops of one process share: the environments, and the memory of the replay."""

    config: GuiConfig
    world: World
    recorder: Recorder
    groups: dict[str, _Group] = field(default_factory=dict)
    successes: OrderedDict[tuple[str, int], list[AgentLoopOutput]] = field(default_factory=OrderedDict)

    def replayed(self, uid: str, of: int, episode: Episode, own: list[AgentLoopOutput]) -> list[AgentLoopOutput]:
        """The session's samples; the last of a group that failed throughout becomes an earlier success, if there is.

        `of`: sessions in the group. A group without a success has no signal however often it is tried (ARPO,
        arXiv 2505.16282).
        """
        key, group = (episode.task, episode.seed), self.groups.setdefault(uid, _Group())
        group.finished += 1
        group.succeeded |= episode.stop is StopReason.SUCCESS
        if episode.stop is StopReason.SUCCESS:
            self.successes[key] = own
            self.successes.move_to_end(key)
            if len(self.successes) > REMEMBERED:
                self.successes.popitem(last=False)
        if group.finished < of:
            return own
        del self.groups[uid]
        if group.succeeded or key not in self.successes:
            return own
        again = [output.model_copy(deep=True) for output in self.successes[key]]
        for old in again:
            old.extra_fields |= {"replayed": True, **_version(own[-1].extra_fields)}
        return again


@cache
def shared(config: str) -> Shared:
    """Built once a process, from the `gui` node as YAML."""
    gui = load_config(OmegaConf.create({"gui": OmegaConf.create(config)}), "gui")
    return Shared(gui, build_world(gui), Recorder(gui.run_dir, gui.record))


@register("crossrl_gui")
class GuiAgentLoop(AgentLoopBase):
    """Plays an episode; what befalls the environment ends it with a reason, and never loses the group."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.shared = shared(OmegaConf.to_yaml(self.config.gui, resolve=True))
        self.gui, self.codec = self.shared.config, CODECS[self.shared.config.codec]
        self.allowed = self.shared.world.actions & self.codec.kinds
        self.system = system_prompt(self.gui, self.shared.world)
        image_start = self.tokenizer.convert_tokens_to_ids("<|vision_start|>")
        self.prompter = Prompter(self._render, image_start, self.rollout_config.prompt_length)

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> list[AgentLoopOutput]:
        """One episode of the row's task and seed: a sample for every step."""
        # names the draws: equal seeds draw equal answers, whatever verl's random uid of the group is
        name = "{global_steps}/{task}/{seed}/{session_id}".format_map(row)
        player = _Player(self, sampling_params, name)
        env = self.shared.world.env()
        held_out = row["held_out"]
        episode = await play(env, player.policy, row["seed"], row["task"], self.gui.max_steps, keep_last=held_out)
        outputs = self._samples(episode, player)
        if held_out and not self.gui.swap_screenshots:
            self.shared.recorder.keep(episode, row["global_steps"])
        elif self.gui.replay and not held_out and not episode.stop.blameless:
            outputs = self.shared.replayed(row["uid"], self.rollout_config.n, episode, outputs)
        return outputs

    def _render(self, chat: list[dict[str, Any]], images: list[Image.Image]) -> list[int]:
        return self.continuous_token_builder.build_initial_tokens(chat, images=images)

    def _samples(self, episode: Episode, player: _Player) -> list[AgentLoopOutput]:
        malformed = episode.stop is StopReason.MALFORMED
        shaped = episode.reward - (self.gui.malformed_penalty if malformed else 0.0)
        about = {
            "success": float(episode.stop is StopReason.SUCCESS),
            "steps": float(len(episode.steps)),
            "malformed": float(malformed),
        }
        about |= {"env_s": player.elapsed - player.thinking}
        taken = list(zip(player.samples, episode.steps, strict=True)) or [self._nothing()]
        return [
            self._output(sample, step, episode, {"turn": turn, "episode_return": shaped, "reward_extra_info": about})
            for turn, (sample, step) in enumerate(taken)
        ]

    def _output(self, sample: _Sample, step: Step, episode: Episode, fields: dict[str, Any]) -> AgentLoopOutput:
        fields |= {
            "anchor": blake2b(step.screen, digest_size=8).hexdigest(),
            "step_reward": step.reward,
            "stop": str(episode.stop),
            "action": step.action.short() if step.action else "",
            "clamped": sample.parsed.clamped,
            "replayed": False,
        }
        return AgentLoopOutput(
            prompt_ids=sample.prompt.ids,
            response_ids=sample.response,
            response_mask=[0 if episode.stop.blameless else 1] * len(sample.response),
            response_logprobs=sample.log_probs,
            multi_modal_data={"images": sample.prompt.images},
            reward_score=episode.reward,
            num_turns=2 * max(1, len(episode.steps)),
            metrics=AgentLoopMetrics(generate_sequences=sample.seconds),
            extra_fields=sample.extra | fields,
        )

    def _nothing(self) -> tuple[_Sample, Step]:
        """What trains nothing, for an episode that never had a screen: verl wants a sample of every session."""
        prompt = self.prompter("", [], Image.new("RGB", (64, 64), "white"), 1, self.system)
        return _Sample(prompt, [self.tokenizer.eos_token_id], [0.0], Parsed(None), 0.0, _version({})), Step(
            b"", "", None
        )


@dataclass(slots=True)
class _Sample:
    """One answer of the policy, as it was drawn."""

    prompt: Prompt
    response: list[int]
    log_probs: list[float] | None
    parsed: Parsed
    seconds: float
    extra: dict[str, Any]


class _Player:
    """The policy of one episode: prompts the model, reads its answer, keeps both."""

    def __init__(self, loop: GuiAgentLoop, sampling_params: dict[str, Any], name: str) -> None:
        self.loop, self.sampling_params, self.name = loop, sampling_params, name
        self.samples: list[_Sample] = []
        self.past: list[Turn] = []
        self.started, self.thinking = time.monotonic(), 0.0

    @property
    def elapsed(self) -> float:
        """Seconds since the episode began."""
        return time.monotonic() - self.started

    async def policy(self, seen: Observation, episode: Episode) -> tuple[str, Action | None]:
        """Ask the model."""
        loop, begun = self.loop, time.monotonic()
        screen = open_screen(await self._screenshot(seen, episode))
        prompt = loop.prompter(seen.goal, self.past, screen, loop.gui.screenshots, loop.system)
        answer = await loop.server_manager.generate(
            request_id=f"{self.name}/{len(self.samples)}",
            prompt_ids=prompt.ids,
            sampling_params=dict(self.sampling_params),
            image_data=prompt.images,
        )
        limit = loop.rollout_config.response_length
        tokens = answer.token_ids[:limit]
        text = loop.tokenizer.decode(tokens, skip_special_tokens=True)
        parsed = loop.codec.parse(text, loop.allowed)
        spent = time.monotonic() - begun
        self.thinking += spent
        log_probs = answer.log_probs[:limit] if answer.log_probs else None
        self.samples.append(_Sample(prompt, tokens, log_probs, parsed, spent, dict(answer.extra_fields)))
        if parsed.action is not None:
            self.past.append(Turn(screen, text, parsed.action.short()))
        return text, parsed.action

    async def _screenshot(self, seen: Observation, episode: Episode) -> bytes:
        if not self.loop.gui.swap_screenshots:
            return await seen.screenshot()
        env = self.loop.shared.world.env()
        try:
            return await (await env.reset(episode.seed + 1, episode.task)).screenshot()
        finally:
            await env.close()


def _version(of: dict[str, Any]) -> dict[str, int]:
    """The weights' version, which verl's staleness metrics need of every sample."""
    return {name: of.get(name) or 0 for name in ("global_steps", "min_global_steps", "max_global_steps")}
