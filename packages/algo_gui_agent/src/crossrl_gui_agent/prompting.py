"""What the policy reads at one step: the instruction, the k newest screenshots, and a line for each older action."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from PIL import Image

from crossrl.errors import ConfigError

Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Turn:
    """A step taken: the screen it saw, what the policy answered, and the action in short."""

    screen: Image.Image
    answer: str
    action: str


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids with images expanded, and the images in the order of their tokens."""

    ids: list[int]
    images: list[Image.Image]


def open_screen(png: bytes) -> Image.Image:
    """The screenshot as an RGB image, decoded."""
    return Image.open(io.BytesIO(png)).convert("RGB")


def messages(
    instruction: str, past: Sequence[Turn], screen: Image.Image, keep: int, system: str
) -> tuple[list[Message], list[Image.Image]]:
    """Chat messages and their images for the next step, with the `keep` newest screenshots.

    Screens after the first come in the tool's role, as the answer to the action before.
    """
    window = list(past[max(0, len(past) - keep + 1) :]) if keep > 1 else []
    older = past[: len(past) - len(window)]
    lines = [instruction, *(["Previous actions:"] if older else [])]
    lines += [f"Step {number}: {turn.action}" for number, turn in enumerate(older, 1)]
    screens = [*(turn.screen for turn in window), screen]
    chat: list[Message] = [{"role": "system", "content": system}] if system else []
    chat.append({"role": "user", "content": [_image(screens[0]), {"type": "text", "text": "\n".join(lines)}]})
    for turn, after in zip(window, screens[1:], strict=True):
        chat.append({"role": "assistant", "content": turn.answer})
        chat.append({"role": "tool", "content": [_image(after)]})
    return chat, screens


class Prompter:
    """Renders prompts of at most `limit` tokens; `render` is the tokenizer's part (messages, images) -> ids."""

    def __init__(self, render: Callable[[list[Message], list[Image.Image]], list[int]], image_start: int, limit: int):
        self.render, self.image_start, self.limit = render, image_start, limit

    def __call__(self, instruction: str, past: Sequence[Turn], screen: Image.Image, keep: int, system: str) -> Prompt:
        """The prompt with as many of the `keep` newest screenshots as fit: whole ones, never a part of one.

        Raises `ConfigError` if not even one fits, or if the chat template drops an image.
        """
        for kept in range(min(keep, len(past) + 1), 0, -1):
            chat, images = messages(instruction, past, screen, kept, system)
            ids = self.render(chat, images)
            shown = ids.count(self.image_start)
            if shown != len(images):
                raise ConfigError(
                    f"the chat template shows {shown} of {len(images)} images",
                    where="chat template",
                    fix="it must render images in the roles user and tool",
                )
            if len(ids) <= self.limit:
                return Prompt(ids, images)
        raise ConfigError(
            f"a prompt with one screenshot has {len(ids)} tokens, more than data.max_prompt_length={self.limit}",
            where="data.max_prompt_length",
            fix="raise it, or lower the screenshot's size",
        )


def _image(screen: Image.Image) -> Message:
    return {"type": "image", "image": screen}
