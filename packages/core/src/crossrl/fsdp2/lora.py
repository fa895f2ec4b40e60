"""Low-rank adapters (PEFT) by diffusers' parameter names: initial values, merging, writing; the same in all backends.

Only a backend with `peft` among its requirements imports this.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from peft import LoraConfig
from safetensors.torch import save_file

from crossrl.config import Lora
from crossrl.fsdp2.shards import copy_full
from crossrl.noise import generator

PREFIX = "base_model.model."
"""What a `PeftModel` puts before every name of the module that it wraps."""

ADAPTER = "default"


def adapter_config(settings: Lora) -> LoraConfig:
    """PEFT's own settings for a diffusers model."""
    return LoraConfig(r=settings.rank, lora_alpha=settings.alpha, target_modules=list(settings.targets))


@torch.no_grad()
def initialise(parameters: Iterable[tuple[str, torch.Tensor]], seed: int) -> None:
    """A uniform in +-1/sqrt(inputs), B zero (PEFT's default, arXiv:2106.09685), the same at any world size.

    The values depend on `seed` and the names (with `PREFIX`), so two backends that use the same names start alike.
    """
    for name, parameter in parameters:
        if "lora_A" in name:
            bound = 1.0 / math.sqrt(parameter.shape[1:].numel())
            full = torch.empty(parameter.shape).uniform_(-bound, bound, generator=generator(seed, "lora", name))
            copy_full(full, parameter)
        elif "lora_B" in name:
            parameter.zero_()


def merged(weights: Mapping[str, torch.Tensor], settings: Lora) -> dict[str, torch.Tensor]:
    """Full `weights` of an adapted module (names without `PREFIX`) as plain fp32 weights: W + alpha/r B A."""
    scale = settings.alpha / settings.rank
    plain = {}
    for name, value in weights.items():
        if "lora_" in name:
            continue
        stem = name.removesuffix(".base_layer.weight")
        if stem != name:
            a, b = (weights[f"{stem}.lora_{part}.{ADAPTER}.weight"] for part in "AB")
            value = value + scale * (b @ a)
        plain[name.replace(".base_layer.", ".")] = value
    return plain


def save_adapter(weights: Mapping[str, torch.Tensor], settings: Lora, folder: Path) -> None:
    """Write the adapter alone (diffusers' names without `PREFIX`), for `PeftModel.from_pretrained`."""
    folder.mkdir(parents=True, exist_ok=True)
    adapter_config(settings).save_pretrained(folder)
    adapter = {PREFIX + n.replace(f".{ADAPTER}.", "."): t.contiguous() for n, t in weights.items() if "lora_" in n}
    save_file(adapter, folder / "adapter_model.safetensors")
