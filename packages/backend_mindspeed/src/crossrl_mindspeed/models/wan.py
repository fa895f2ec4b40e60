"""Wan text-to-video: from a diffusers folder to MindSpeed-MM's `WanDiTFSDP2` and back."""

from __future__ import annotations

import inspect
import json
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType
from typing import Any

import diffusers
import torch
from safetensors import safe_open

from crossrl.cache import Condition
from crossrl.errors import ConfigError
from crossrl.fsdp2.checkpoint import check_weights
from crossrl.fsdp2.shards import copy_full
from crossrl_mindspeed.convert import layout, to_diffusers

BLOCKS = "blocks.{*}"
"""Every block, in MindSpeed-MM's pattern language."""

LONGEST = 1024  # positions a side that MindSpeed-MM's rotary table holds
_DEFAULTS = {
    name: p.default
    for name, p in inspect.signature(diffusers.WanTransformer3DModel.__init__).parameters.items()
    if name != "self"
}
_IMAGE = ("image_dim", "added_kv_proj_dim", "pos_embed_seq_len")


def load_config(pipeline: Path, layers: int | None) -> dict[str, Any]:
    """Diffusers' settings of the transformer of `pipeline`, complete, cut to the first `layers` blocks if given.

    Raises `ConfigError` for what MindSpeed-MM's Wan cannot do.
    """
    path = pipeline / "transformer" / "config.json"
    if not path.exists():
        raise ConfigError("no diffusers transformer here: config.json is missing", where=str(path.parent))
    values = {k: v for k, v in json.loads(path.read_text()).items() if not k.startswith("_")}
    if unknown := sorted(values.keys() - _DEFAULTS.keys()):
        raise ConfigError(f"not a Wan transformer: unknown settings {unknown}", where=str(path))
    config = _DEFAULTS | values
    _refuse(config, pipeline)
    if layers is not None:
        if layers > config["num_layers"]:
            raise ConfigError(f"model.layers={layers}, but the model has {config['num_layers']}", where="model.layers")
        config["num_layers"] = layers
    return config


def _refuse(config: dict[str, Any], pipeline: Path) -> None:
    use_veomni = "train it with backend=veomni"
    index = pipeline / "model_index.json"
    if (pipeline / "transformer_2").is_dir():
        raise ConfigError(
            "a pipeline with two transformers (Wan 2.2 A14B) is not supported: only the first would be trained",
            where=str(pipeline),
        )
    if index.exists() and json.loads(index.read_text()).get("expand_timesteps"):
        raise ConfigError(
            "a model with a timestep for every token (Wan 2.2 TI2V-5B) is not supported: MindSpeed-MM's Wan "
            "reads the first token's timestep for all of them",
            where=str(index),
            fix=use_veomni,
        )
    if image := [name for name in _IMAGE if config[name] is not None]:
        raise ConfigError(f"an image-to-video transformer ({', '.join(image)}) is not supported", where=str(pipeline))
    if config["qk_norm"] != "rms_norm_across_heads":
        raise ConfigError(f"qk_norm={config['qk_norm']!r} is not supported", where=str(pipeline), fix=use_veomni)


def arguments(config: dict[str, Any], attention: str) -> dict[str, Any]:
    """MindSpeed-MM's names for diffusers' settings."""
    return {
        "model_type": "t2v",
        "patch_size": tuple(config["patch_size"]),
        "in_dim": config["in_channels"],
        "out_dim": config["out_channels"],
        "hidden_size": config["num_attention_heads"] * config["attention_head_dim"],
        "num_heads": config["num_attention_heads"],
        "num_layers": config["num_layers"],
        "ffn_dim": config["ffn_dim"],
        "freq_dim": config["freq_dim"],
        "text_dim": config["text_dim"],
        "qk_norm": True,
        "cross_attn_norm": config["cross_attn_norm"],
        "eps": config["eps"],
        "attn_implementation": attention,
    }


def check_latents(config: dict[str, Any], shape: tuple[int, ...], ulysses: int) -> None:
    """Raise `ConfigError` unless latents [F, H, W] make tokens that fit the model and that `ulysses` ranks can share.

    MindSpeed-MM would pad what does not divide, and attend to the padding.
    """
    patch = config["patch_size"]
    sizes = [size // p for size, p in zip(shape, patch, strict=True)]
    tokens = sizes[0] * sizes[1] * sizes[2]
    if any(size % p for size, p in zip(shape, patch, strict=True)):
        raise ConfigError(f"latents {tuple(shape)} are not a multiple of the patch {tuple(patch)}", where="video")
    if max(sizes) > LONGEST:
        raise ConfigError(f"latents {tuple(shape)} are longer than {LONGEST} patches a side", where="video")
    if tokens % ulysses:
        raise ConfigError(
            f"{sizes[0]} x {sizes[1]} x {sizes[2]} = {tokens} tokens cannot be split by parallel.ulysses={ulysses}",
            where="video",
            fix="change frames, height or width, or use another parallel.ulysses",
        )


def build(modeling: ModuleType, config: dict[str, Any], attention: str) -> torch.nn.Module:
    """The network without weights, on meta."""
    with torch.device("meta"):
        return modeling.WanDiTFSDP2(**arguments(config, attention))


def check_folder(module: torch.nn.Module, folder: Path, partial: bool) -> None:
    """Raise `CheckpointError` unless the safetensors in `folder` (names of either) are just the module's."""
    name_of = str if layout.is_of(folder) else to_diffusers
    check_weights(folder, {name_of(n): t.shape for n, t in module.state_dict().items()}, partial)


@torch.no_grad()
def load_weights(module: torch.nn.Module, folder: Path) -> None:
    """Fill the module, sharded or not, from files with names of either: tensor by tensor, each rank reads them all."""
    name_of = str if layout.is_of(folder) else to_diffusers
    with ExitStack() as stack:
        files = [stack.enter_context(safe_open(p, framework="pt")) for p in sorted(folder.glob("*.safetensors"))]
        where = {name: file for file in files for name in file.keys()}  # noqa: SIM118
        for name, parameter in module.named_parameters():
            if "lora_" not in name:
                name = name_of(name.replace(".base_layer.", "."))
                copy_full(where[name].get_tensor(name).float(), parameter)


def adapter_targets(module: torch.nn.Module, targets: tuple[str, ...]) -> list[str]:
    """MindSpeed-MM's names of the linear layers that `targets`, in diffusers' names, mean by PEFT's rule."""
    linear = [name for name, part in module.named_modules() if isinstance(part, torch.nn.Linear)]
    found = [n for n in linear if any(f".{to_diffusers(n)}".endswith(f".{target}") for target in targets)]
    if not found:
        raise ConfigError(
            f"no layer is called {' or '.join(targets)}", where="model.lora.targets", fix="e.g. to_q, to_out.0"
        )
    return found


def predict(module: torch.nn.Module, x: torch.Tensor, timestep: torch.Tensor, condition: Condition) -> torch.Tensor:
    """Velocity [n, C, F, H, W] fp32 at latents x, timestep [n] fp32 and text states [n, L, D]."""
    if timestep.ndim != 1:
        raise ConfigError("MindSpeed-MM's Wan takes one timestep a sample, not one a token", where="predict")
    text = condition["encoder_hidden_states"]
    if further := sorted(condition.keys() - {"encoder_hidden_states"}):
        raise ConfigError(f"MindSpeed-MM's text-to-video Wan takes no {', '.join(further)}", where="predict")
    module.text_len = text.shape[1]  # it pads text to this length with zeros, and attends to them
    return module(x=x, timestep=timestep, prompt=text)


def to_diffusers_model(config: dict[str, Any], weights: dict[str, torch.Tensor]) -> diffusers.WanTransformer3DModel:
    """Diffusers' own model around `weights` (diffusers' names, not copied), to save it; they must match exactly."""
    with torch.device("meta"):
        model = diffusers.WanTransformer3DModel(**config)
    model.load_state_dict(weights, strict=True, assign=True)
    return model
