"""Prompts: whole screenshots only, the newest ones, tool-role images kept; equal to what verl's builder makes."""

import pytest
from PIL import Image

from crossrl.errors import ConfigError
from crossrl_gui_agent.prompting import Prompter, Turn, messages
from crossrl_gui_agent.sft import processor_prompter

SCREENS = [Image.new("RGB", (160, 224), (i * 40, 255, 255)) for i in range(4)]
PAST = [Turn(screen, f"answer {i}", f"click ({i}, {i})") for i, screen in enumerate(SCREENS[:3])]
TOKENS = 35  # 160 x 224 pixels


def images_in(prompt, processor):
    return list(prompt.ids).count(processor.image_token_id) / TOKENS


def test_the_newest_screens_are_shown_and_older_steps_are_told():
    chat, shown = messages("Do it.", PAST, SCREENS[3], keep=2, system="You act.")
    assert shown == SCREENS[2:]
    assert [m["role"] for m in chat] == ["system", "user", "assistant", "tool"]
    told = chat[1]["content"][1]["text"]
    assert told == "Do it.\nPrevious actions:\nStep 1: click (0, 0)\nStep 2: click (1, 1)"
    assert chat[2]["content"] == "answer 2"


def test_screens_in_the_tools_role_reach_the_model(processor):
    prompt = processor_prompter(processor, 1000)("Do it.", PAST, SCREENS[3], 4, "")
    assert images_in(prompt, processor) == len(prompt.images) == 4


@pytest.mark.parametrize("limit", range(60, 260, 7))
def test_a_prompt_that_is_too_long_loses_whole_screens(processor, limit):
    prompter = processor_prompter(processor, limit)
    try:
        prompt = prompter("Do it.", PAST, SCREENS[3], 4, "")
    except ConfigError as error:
        assert "max_prompt_length" in str(error)
        return
    assert len(prompt.ids) <= limit
    assert images_in(prompt, processor) == len(prompt.images) >= 1
    assert prompt.images[-1] is SCREENS[3]


def test_a_template_that_drops_images_is_refused(processor):
    def forgetful(chat, images):
        text = processor.apply_chat_template(chat[:1], tokenize=False, add_generation_prompt=True)
        return processor(text=[text], images=images[:1])["input_ids"][0]

    start = processor.tokenizer.convert_tokens_to_ids("<|vision_start|>")
    with pytest.raises(ConfigError, match="shows 1 of 2 images"):
        Prompter(forgetful, start, 1000)("Do it.", PAST, SCREENS[3], 2, "")


@pytest.mark.parametrize("keep", [1, 2, 4])
def test_the_warm_start_reads_the_same_tokens_as_verls_agent_loop(processor, keep):
    from verl.utils.tokenizer.continuous_token_wiring import create_continuous_token_builder

    builder = create_continuous_token_builder(
        processor.tokenizer,
        hf_model_type="qwen3_vl",
        chat_template_kwargs={},
        mm_processor_kwargs={},
        processor=processor,
    )
    chat, images = messages("Do it.", PAST, SCREENS[3], keep, "You act.")
    ours = processor_prompter(processor, 1000)("Do it.", PAST, SCREENS[3], keep, "You act.")
    assert builder.build_initial_tokens(chat, images=images) == ours.ids
