"""A toy text-to-video world that is small enough to learn on a CPU, and made of the same parts as a real one.

`world` makes prompts and videos, `rewards` scores them in closed form, `build` makes the tiny Wan model. Importing
this package, `world` or `rewards` loads numpy only.
"""

from pathlib import Path

MODEL_FOLDER = Path(__file__).parent / "assets" / "wan_tiny"
"""The shipped model, a diffusers folder."""

TEXT_LENGTH = 8
"""Tokens a prompt is padded to; pass it to `WanPipeline` as `max_sequence_length`."""
