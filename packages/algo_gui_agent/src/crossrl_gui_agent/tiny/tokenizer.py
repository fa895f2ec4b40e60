"""A byte-level BPE of 512 entries with Qwen's pre-tokenizer and special tokens, trained where it is needed."""

from __future__ import annotations

from tokenizers import AddedToken, Regex, Tokenizer, decoders, pre_tokenizers, processors, trainers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

VOCABULARY = 512  # without the special tokens

SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|object_ref_start|>",
    "<|object_ref_end|>",
    "<|box_start|>",
    "<|box_end|>",
    "<|quad_start|>",
    "<|quad_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
"""Qwen's, in Qwen's order; dropped by `decode(skip_special_tokens=True)`."""

MARKUP = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
"""One token each as in Qwen3, but kept when decoding: they are text to a parser."""

_PIECES = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Qwen's pre-tokenizer: each digit is a piece, hence a token, of its own."""

_ACTIONS = (
    '{"name": "computer_use", "arguments": {"action": "left_click", "coordinate": [5, 0]}}',
    '{"name": "computer_use", "arguments": {"action": "double_click", "coordinate": [9, 9]}}',
    '{"name": "computer_use", "arguments": {"action": "right_click", "coordinate": [1, 2]}}',
    '{"name": "computer_use", "arguments": {"action": "middle_click", "coordinate": [1, 2]}}',
    '{"name": "computer_use", "arguments": {"action": "mouse_move", "coordinate": [3, 4]}}',
    '{"name": "computer_use", "arguments": {"action": "left_click_drag", "coordinate": [3, 4]}}',
    '{"name": "computer_use", "arguments": {"action": "type", "text": "hello"}}',
    '{"name": "computer_use", "arguments": {"action": "key", "keys": ["ctrl", "enter"]}}',
    '{"name": "computer_use", "arguments": {"action": "scroll", "pixels": -5}}',
    '{"name": "computer_use", "arguments": {"action": "wait", "time": 1}}',
    '{"name": "computer_use", "arguments": {"action": "terminate", "status": "success"}}',
    '{"name": "computer_use", "arguments": {"action": "answer", "text": "yes"}}',
)
_TEXT = (
    "system\nuser\nassistant\nYou control a browser. Answer with one action. Instruction: Previous actions: Step 1:",
    "Click the button. Click button ONE. Click button TWO. Click on the link. Click on the tab with text",
    "Select the following checkboxes and click Submit. Close the dialog box by clicking the x.",
    "Enter the text into the text field and press Submit. Enter the username and the password and press login.",
    "Find the email by and reply to them with the text. Select the color red, green, blue, yellow, cyan, magenta.",
)


def build_tokenizer(chat_template: str) -> PreTrainedTokenizerFast:
    """The tokenizer, the same at every call; "\\n" and each digit are one token, as Qwen's chat format needs."""
    core = Tokenizer(BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    core.decoder = decoders.ByteLevel()
    core.post_processor = processors.ByteLevel(trim_offsets=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, initial_alphabet=sorted(alphabet), show_progress=False)
    core.train_from_iterator([*_ACTIONS * 8, *_TEXT], trainer)
    core.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL])
    core.add_tokens([AddedToken(t, special=False, normalized=False) for t in MARKUP])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=[t for t in SPECIAL if t not in ("<|im_end|>", "<|endoftext|>")],
        chat_template=chat_template,
        clean_up_tokenization_spaces=False,
        model_max_length=4096,
    )
