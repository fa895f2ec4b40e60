"""Names of Wan's tensors in diffusers (and VeOmni, which uses the same) and in MindSpeed-MM, both ways.

The tensors are equal, only the names differ: a conversion moves bits and computes nothing. Sources: diffusers'
`WanTransformer3DModel`, MindSpeed-MM's `DIFFUSERS_CONVERT_MAPPING` (fsdp/models/wan2_2/diffusers_ckpt_trans.py).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from crossrl.errors import CheckpointError
from crossrl.fsdp2.checkpoint import check_shapes, shapes

T = TypeVar("T")

MODEL = {
    "patch_embedding": "patch_embedding",
    "condition_embedder.text_embedder.linear_1": "text_embedding.0",
    "condition_embedder.text_embedder.linear_2": "text_embedding.2",
    "condition_embedder.time_embedder.linear_1": "time_embedding.0",
    "condition_embedder.time_embedder.linear_2": "time_embedding.2",
    "condition_embedder.time_proj": "time_projection.1",
    "scale_shift_table": "head.modulation",
    "proj_out": "head.head",
}
"""Modules and parameters outside of the blocks: diffusers -> MindSpeed-MM."""

BLOCK = {
    **{
        f"{theirs}.{a}": f"{ours}.{b}"
        for theirs, ours in (("attn1", "self_attn"), ("attn2", "cross_attn"))
        for a, b in (
            ("to_q", "q"),
            ("to_k", "k"),
            ("to_v", "v"),
            ("to_out.0", "o"),
            ("norm_q", "norm_q"),
            ("norm_k", "norm_k"),
        )
    },
    "ffn.net.0.proj": "ffn.0",
    "ffn.net.2": "ffn.2",
    "norm2": "norm3",
    "scale_shift_table": "modulation",
}
"""Modules and parameters of one block, without `blocks.N.`: diffusers -> MindSpeed-MM."""

_BLOCK = re.compile(r"(blocks\.\d+)\.(.+)")


def to_mindspeed(name: str) -> str:
    """MindSpeed-MM's name for diffusers' `name` of a tensor or module; `CheckpointError` if it is none of Wan's."""
    return _renamed(name, MODEL, BLOCK, "diffusers")


def to_diffusers(name: str) -> str:
    """Diffusers' name for MindSpeed-MM's `name` of a tensor or module; `CheckpointError` if it is none of Wan's."""
    return _renamed(name, _MODEL_BACK, _BLOCK_BACK, "MindSpeed-MM")


_MODEL_BACK = {b: a for a, b in MODEL.items()}
_BLOCK_BACK = {b: a for a, b in BLOCK.items()}


def _renamed(name: str, model: Mapping[str, str], block: Mapping[str, str], whose: str) -> str:
    match = _BLOCK.fullmatch(name)
    head, rest, table = (f"{match[1]}.", match[2], block) if match else ("", name, model)
    for known, other in table.items():
        if rest == known or rest.startswith(f"{known}."):
            return f"{head}{other}{rest[len(known) :]}"
    raise CheckpointError(f"{name} is no tensor of {whose}'s Wan text-to-video transformer", where="weight conversion")


def converted(weights: Mapping[str, T], rename: Callable[[str], str]) -> dict[str, T]:
    """`weights` under their other names, the values untouched; `CheckpointError` names all that have none."""
    names, unknown = {}, []
    for name in weights:
        try:
            names[name] = rename(name)
        except CheckpointError:
            unknown.append(name)
    if unknown:
        raise CheckpointError(f"unexpected {', '.join(unknown[:5])}", where=f"weight conversion ({len(unknown)} names)")
    return {names[name]: value for name, value in weights.items()}


def expected_shapes(config: Mapping[str, object]) -> dict[str, torch.Size]:
    """Diffusers' names and shapes of a transformer with `config` (its `config.json`), built without memory."""
    import diffusers

    with torch.device("meta"):
        model = diffusers.WanTransformer3DModel(**{k: v for k, v in config.items() if not k.startswith("_")})
    return {name: tensor.shape for name, tensor in model.state_dict().items()}


def convert_folder(source: Path, target: Path, to: str) -> None:
    """Convert a transformer's folder (`config.json` of diffusers and safetensors) to "mindspeed" or "diffusers".

    File by file, so that a whole model is never in memory. Raises `CheckpointError`, before anything is written, for
    missing, unexpected and wrong-shaped tensors.
    """
    rename = {"mindspeed": to_mindspeed, "diffusers": to_diffusers}[to]
    config = json.loads((source / "config.json").read_text())
    wanted = expected_shapes(config)
    if to == "diffusers":
        wanted = converted(wanted, to_mindspeed)
    check_shapes(shapes(source), wanted, str(source))
    target.mkdir(parents=True, exist_ok=True)
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    for path in sorted(source.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            save_file(converted(tensors, rename), target / path.name, metadata=file.metadata())
    for path in source.glob("*.safetensors.index.json"):
        index = json.loads(path.read_text())
        index["weight_map"] = converted(index["weight_map"], rename)
        (target / path.name).write_text(json.dumps(index, indent=2) + "\n")


class MindSpeedLayout:
    """MindSpeed-MM's names (`crossrl.layouts.Layout`)."""

    def is_of(self, folder: Path) -> bool:
        """Whether the files have MindSpeed-MM's name of the text projection."""
        return any(name.startswith("text_embedding.") for name in shapes(folder))

    def from_diffusers(self, source: Path, target: Path) -> None:
        """See `convert_folder`."""
        convert_folder(source, target, "mindspeed")

    def to_diffusers(self, source: Path, target: Path) -> None:
        """See `convert_folder`."""
        convert_folder(source, target, "diffusers")


layout = MindSpeedLayout()
