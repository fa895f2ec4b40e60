"""Low-rank adapters (PEFT): wrapping, initial values, and merging for export."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.utils import get_peft_model_state_dict
from safetensors.torch import save_file

from crossrl.config import Lora
from crossrl.errors import ConfigError
from crossrl.noise import generator
from crossrl_veomni.compat import copy_full

_PREFIX = "base_model.model."


def wrap(module: torch.nn.Module, settings: Lora) -> PeftModel:
    """`module` (on meta) with an adapter on every target; only the adapter trains."""
    config = LoraConfig(r=settings.rank, lora_alpha=settings.alpha, target_modules=list(settings.targets))
    try:
        return get_peft_model(module, config)
    except ValueError as error:
        raise ConfigError(str(error), where="model.lora.targets") from error


@torch.no_grad()
def initialise(module: PeftModel, seed: int) -> None:
    """A uniform in +-1/sqrt(inputs), B zero (PEFT's default, arXiv:2106.09685), the same at any world size."""
    for name, parameter in module.named_parameters():
        if "lora_A" in name:
            bound = 1.0 / math.sqrt(parameter.shape[1:].numel())
            full = torch.empty(parameter.shape).uniform_(-bound, bound, generator=generator(seed, "lora", name))
            copy_full(full, parameter)
        elif "lora_B" in name:
            parameter.zero_()


def merged(module: PeftModel, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Full `weights` of a wrapped module as plain fp32 weights of the wrapped one: W + alpha/r B A."""
    adapter = module.peft_config[module.active_adapter]
    scale = adapter.lora_alpha / adapter.r
    plain = {}
    for name, value in weights.items():
        if "lora_" in name:
            continue
        name = name.removeprefix(_PREFIX)
        stem = name.removesuffix(".base_layer.weight")
        if stem != name:
            a, b = (weights[f"{_PREFIX}{stem}.lora_{part}.{module.active_adapter}.weight"] for part in "AB")
            value = value + scale * (b @ a)
        plain[name.replace(".base_layer.", ".")] = value
    return plain


def save_adapter(module: PeftModel, weights: dict[str, torch.Tensor], folder: Path) -> None:
    """Write the adapter alone, for `PeftModel.from_pretrained`."""
    folder.mkdir(parents=True, exist_ok=True)
    module.peft_config[module.active_adapter].save_pretrained(folder)
    adapter = get_peft_model_state_dict(module, state_dict=weights)
    save_file({k: v.contiguous() for k, v in adapter.items()}, folder / "adapter_model.safetensors")
