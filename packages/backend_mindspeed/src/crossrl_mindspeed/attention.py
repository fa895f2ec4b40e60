"""Attention in MindSpeed-MM's Wan: the choice among its functions, and fp32 where it would round to bf16."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from types import ModuleType

import torch
import torch.nn.functional as F

from crossrl.errors import ConfigError, PluginError

EAGER = "eager"
"""PyTorch's SDPA, on any device."""

FLASH = "flash_attention_2"
_FLASH_FROM = {"cuda": "flash_attn", "npu": "torch_npu"}


def device_type(device: str) -> str:
    """ "npu" of "npu:1"; torch itself knows the name only once torch_npu is imported."""
    return device.partition(":")[0]


def choose(name: str | None, *, device: str, dtype: str, ulysses: int, heads: int) -> str:
    """The attention function to build with; `name` None = flash attention where it can run, else SDPA.

    Raises `ConfigError` for a name that is unknown or that cannot do what is asked.
    """
    kind = device_type(device)
    if name is None:
        able = dtype == "bfloat16" and kind in _FLASH_FROM and find_spec(_FLASH_FROM[kind]) is not None
        name = FLASH if able else EAGER
    if name not in (EAGER, FLASH):
        raise ConfigError(
            f"unknown attention function {name!r}", where="model.attention", fix=f"one of {(EAGER, FLASH)}"
        )
    if name == FLASH and (dtype != "bfloat16" or kind not in _FLASH_FROM):
        raise ConfigError(
            f"{FLASH} needs bfloat16 on one of {sorted(_FLASH_FROM)}",
            where="model.attention",
            fix="model.dtype=bfloat16 there, or leave it out",
        )
    if heads % ulysses:
        raise ConfigError(
            f"{heads} attention heads cannot be split by parallel.ulysses={ulysses}",
            where="parallel.ulysses",
            fix=f"a divisor of {heads}",
        )
    return name


def check(modeling: ModuleType) -> None:
    """Raise `PluginError` unless both attentions call the module's `flash_attention`, which `in_fp32` replaces."""
    for cls in ("WanSelfAttention", "WanCrossAttention"):
        forward = getattr(getattr(modeling, cls, None), "forward", None)
        if not hasattr(modeling, "flash_attention") or "flash_attention" not in getattr(
            getattr(forward, "__code__", None), "co_names", ()
        ):
            raise PluginError(
                f"this MindSpeed-MM's {cls} does not call flash_attention: fp32 attention cannot be had from it",
                where=modeling.__name__,
                fix="model.dtype=bfloat16, or a checkout near commit 57069cd5",
            )


@contextmanager
def in_fp32(modeling: ModuleType) -> Iterator[None]:
    """Within it, MindSpeed-MM's Wan attends in the precision of its inputs; its own SDPA path rounds to bf16.

    Needed in the backward too, where recomputed blocks attend again. Put back on leaving, come what may.
    """
    kept = modeling.flash_attention
    modeling.flash_attention = _sdpa
    try:
        yield
    finally:
        modeling.flash_attention = kept


def _sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **kwargs: object) -> torch.Tensor:
    """[B, tokens, heads, dim] each; the lengths in `kwargs` are all equal here: one latent shape, text never masked."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).contiguous()
