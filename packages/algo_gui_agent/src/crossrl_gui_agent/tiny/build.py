"""Writes a tiny Qwen3-VL as a transformers folder: `python -m crossrl_gui_agent.tiny.build FOLDER --seed 0`."""

from __future__ import annotations

import argparse
import logging
from importlib.resources import files
from pathlib import Path

import torch
from transformers import (
    PreTrainedTokenizerFast,
    Qwen2VLImageProcessor,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLProcessor,
    Qwen3VLVideoProcessor,
)

from crossrl_gui_agent.tiny.tokenizer import build_tokenizer

log = logging.getLogger(__name__)

PATCH, MERGE = 16, 2
"""Pixels a side of a patch, patches a side of an image token: one token for 32 x 32 pixels, as in Qwen3-VL."""

WEIGHT_STD, POSITION_STD, PATCH_STD = 0.1, 0.5, 0.05
"""transformers' 0.02 leaves so small a network blind: it learns one constant answer and never looks at the image."""

WHITE, SPREAD = 1.0, 0.3
"""Image mean and standard deviation. Pages are white: with white at 0 a grey button stands out from nothing."""


def build_config(tokenizer: PreTrainedTokenizerFast) -> Qwen3VLConfig:
    """0.9 million parameters in the shape of Qwen3-VL; every token id is the tokenizer's."""
    ids = {name: tokenizer.convert_tokens_to_ids(f"<|{name}|>") for name in ("image_pad", "video_pad")}
    ids |= {name: tokenizer.convert_tokens_to_ids(f"<|{name}|>") for name in ("vision_start", "vision_end")}
    return Qwen3VLConfig(
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": 128,
            "intermediate_size": 512,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "max_position_embeddings": 4096,
            "initializer_range": WEIGHT_STD,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "mrope_section": [6, 5, 5],
                "mrope_interleaved": True,
            },
            "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id,
        },
        vision_config={
            "depth": 2,
            "hidden_size": 64,
            "intermediate_size": 256,
            "num_heads": 4,
            "patch_size": PATCH,
            "spatial_merge_size": MERGE,
            "out_hidden_size": 128,
            "num_position_embeddings": 256,
            "deepstack_visual_indexes": [0],
            "initializer_range": WEIGHT_STD,
        },
        image_token_id=ids["image_pad"],
        video_token_id=ids["video_pad"],
        vision_start_token_id=ids["vision_start"],
        vision_end_token_id=ids["vision_end"],
        tie_word_embeddings=True,
    )


def build_processor(tokenizer: PreTrainedTokenizerFast) -> Qwen3VLProcessor:
    """Tokenizer and image processor; an image whose sides are multiples of 32 is not resized."""
    image = Qwen2VLImageProcessor(
        patch_size=PATCH,
        merge_size=MERGE,
        image_mean=[WHITE] * 3,
        image_std=[SPREAD] * 3,
        min_pixels=32 * 32,
        max_pixels=512 * 512,
    )
    video = Qwen3VLVideoProcessor(patch_size=PATCH, merge_size=MERGE)
    return Qwen3VLProcessor(image, tokenizer, video, chat_template=tokenizer.chat_template)


def build_model(config: Qwen3VLConfig, seed: int) -> Qwen3VLForConditionalGeneration:
    """Weights by `seed`, fp32."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3VLForConditionalGeneration(config)
        visual = model.model.visual
        torch.nn.init.normal_(visual.pos_embed.weight, std=POSITION_STD)
        torch.nn.init.normal_(visual.patch_embed.proj.weight, std=PATCH_STD)
    return model.float()


def build(folder: Path, seed: int) -> None:
    """Write config, weights (safetensors), tokenizer and processor into `folder`."""
    template = files("crossrl_gui_agent").joinpath("assets/chat_template.jinja").read_text()
    tokenizer = build_tokenizer(template)
    config = build_config(tokenizer)
    model = build_model(config, seed)
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    build_processor(tokenizer).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    log.info("%s: %d parameters", folder, sum(p.numel() for p in model.parameters()))


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    build(arguments.folder, arguments.seed)


if __name__ == "__main__":
    main()
