"""Wan for RL: VeOmni's sharded, sequence-parallel Wan with a plain velocity for output.

VeOmni's own class returns a supervised loss, and building it replaces diffusers' forward for the whole process. This
subclass is registered under its own model type, so neither happens. Parameter names are diffusers' own.
"""

from __future__ import annotations

import json
from pathlib import Path

import diffusers
import torch
from veomni.distributed.parallel_state import get_parallel_state
from veomni.models.diffusers.wan_t2v.wan_transformer.configuration_wan_transformer import (
    WAN_INIT_SIGNATURE,
    WanTransformer3DModelConfig,
)
from veomni.models.diffusers.wan_t2v.wan_transformer.modeling_wan_transformer import (
    WanTransformer3DModel,
    WanTransformer3DModel_forward,
)
from veomni.models.loader import MODEL_CONFIG_REGISTRY, MODELING_REGISTRY

from crossrl.errors import ConfigError


class WanConfig(WanTransformer3DModelConfig):
    """diffusers' init arguments under a model type of our own."""

    model_type = "crossrl_wan"


class Wan(WanTransformer3DModel):
    """Velocity network. Sources: diffusers' `WanTransformer3DModel`, VeOmni's `WanTransformer3DModel_forward`."""

    config_class = WanConfig
    _no_split_modules = ["WanTransformerBlock"]

    def __init__(self, config: WanConfig, **kwargs: object) -> None:
        super().__init__(config, **kwargs)
        self.patch_embedding.register_forward_hook(_tokens_last)

    def forward(
        self,
        hidden_states: torch.Tensor,
        timestep: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        encoder_hidden_states_image: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Velocity [n, C, F, H, W] fp32 of latents [n, C, F, H, W] at timestep [n] (1000 sigma, fp32).

        Text [n, L, D] and image states are cast to the compute dtype, the timestep never is. Raises `ConfigError` if
        the tokens cannot be split over the sequence-parallel ranks.
        """
        check_tokens(self.config, hidden_states.shape[2:], get_parallel_state().ulysses_size)
        dtype = self.patch_embedding.weight.dtype
        image = encoder_hidden_states_image
        velocity = WanTransformer3DModel_forward(
            self,
            hidden_states.to(dtype),
            timestep.float(),
            encoder_hidden_states.to(dtype),
            None if image is None else image.to(dtype),
        )
        return velocity.to(torch.float32, copy=True)  # FSDP loses its backward hook if a view is changed in place


def _tokens_last(module: torch.nn.Module, args: object, out: torch.Tensor) -> torch.Tensor:
    # else the token sequence [n, tokens, D] is a transposed view, which slows every block by a tenth
    return out.contiguous(memory_format=torch.channels_last_3d)


def check_tokens(config: WanConfig, shape: tuple[int, ...], ulysses: int) -> None:
    """Raise `ConfigError` unless latents [F, H, W] make tokens that `ulysses` ranks can share evenly."""
    sizes = [size // patch for size, patch in zip(shape, config.patch_size, strict=True)]
    tokens = sizes[0] * sizes[1] * sizes[2]
    if any(size % patch for size, patch in zip(shape, config.patch_size, strict=True)):
        raise ConfigError(f"latents {tuple(shape)} are not a multiple of the patch {tuple(config.patch_size)}")
    if tokens % ulysses:
        raise ConfigError(
            f"{sizes[0]} x {sizes[1]} x {sizes[2]} = {tokens} tokens cannot be split by parallel.ulysses={ulysses}",
            where="video",
            fix="change frames, height or width, or use another parallel.ulysses",
        )


def load_config(folder: Path, layers: int | None) -> WanConfig:
    """The config of the diffusers `transformer/` at `folder`, cut to the first `layers` blocks if given."""
    path = folder / "config.json"
    if not path.exists():
        raise ConfigError("no diffusers transformer here: config.json is missing", where=str(folder))
    values = {k: v for k, v in json.loads(path.read_text()).items() if not k.startswith("_")}
    unknown = sorted(values.keys() - WAN_INIT_SIGNATURE.parameters.keys())
    if unknown:
        raise ConfigError(f"not a Wan transformer: unknown settings {unknown}", where=str(path))
    config = WanConfig(**values)
    if layers is not None:
        if layers > config.num_layers:
            raise ConfigError(f"model.layers={layers}, but the model has {config.num_layers}", where="model.layers")
        config.num_layers = layers
    return config


def to_diffusers(config: WanConfig, weights: dict[str, torch.Tensor]) -> diffusers.WanTransformer3DModel:
    """diffusers' own model around `weights` (not copied), to save it; the names must match exactly."""
    with torch.device("meta"):
        model = diffusers.WanTransformer3DModel(**config.to_diffuser_dict())
    model.load_state_dict(weights, strict=True, assign=True)
    return model


MODEL_CONFIG_REGISTRY.register(WanConfig.model_type, lambda: WanConfig)
MODELING_REGISTRY.register(WanConfig.model_type, lambda architecture: Wan)
