"""Attention for VeOmni's diffusion models: PyTorch SDPA with Ulysses, on any device, and the choice among functions.

Ulysses (DeepSpeed-Ulysses, arXiv:2309.14509): ranks hold a slice of the tokens; all-to-all trades tokens for heads
before attention and back after it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import is_flash_attn_2_available, is_torch_npu_available
from veomni.distributed.parallel_state import get_parallel_state
from veomni.ops.kernels.attention.ulysses import prepare_ulysses_qkv, restore_ulysses_output

from crossrl.errors import ConfigError

SDPA = "crossrl_attention"
"""Our function's name; transformers refuses names with "sdpa" in them for Wan."""

FLASH = "flash_attention_2"
_ULYSSES_AWARE = {SDPA, FLASH}
_KNOWN = (*sorted(_ULYSSES_AWARE), "eager")
_FLASH_AVAILABLE = {"cuda": is_flash_attn_2_available, "npu": is_torch_npu_available}


def attention(
    module: torch.nn.Module | None,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool = False,
    skip_ulysses: bool = False,
) -> tuple[torch.Tensor, None]:
    """[B, heads, tokens, dim] query, key, value -> ([B, tokens, heads, dim], None), transformers' convention.

    With sequence parallelism on, `tokens` is this rank's slice unless `skip_ulysses` (cross-attention: every rank
    holds all keys). Arguments of packed attention (`cu_seq_lens_q`...) are refused by the signature.
    """
    state = get_parallel_state()
    split = state.ulysses_enabled and not skip_ulysses
    if split:
        query, key, value, _ = prepare_ulysses_qkv(
            query.transpose(1, 2),
            key.transpose(1, 2),
            value.transpose(1, 2),
            group=state.ulysses_group,
            ulysses_size=state.ulysses_size,
        )
        query, key, value = (t.transpose(1, 2) for t in (query, key, value))
    out = F.scaled_dot_product_attention(
        query, key, value, attn_mask=attention_mask, dropout_p=dropout, scale=scaling, is_causal=is_causal
    ).transpose(1, 2)
    return (restore_ulysses_output(out.contiguous(), group=state.ulysses_group) if split else out), None


def choose(name: str | None, *, device: str, dtype: str, ulysses: int, heads: int) -> str:
    """The attention function to build with; `name` None = flash attention where it can run, else ours.

    Raises `ConfigError` for a name that is unknown, or that cannot do what is asked: a function that does not know
    Ulysses gives wrong numbers silently.
    """
    kind = torch.device(device).type
    if name is None:
        able = dtype == "bfloat16" and _FLASH_AVAILABLE.get(kind, lambda: False)()
        name = FLASH if able else SDPA
    if name not in _KNOWN:
        raise ConfigError(f"unknown attention function {name!r}", where="model.attention", fix=f"one of {_KNOWN}")
    if name == FLASH and dtype != "bfloat16":
        raise ConfigError(f"{FLASH} needs bfloat16", where="model.attention", fix="model.dtype=bfloat16")
    if ulysses > 1 and name not in _ULYSSES_AWARE:
        raise ConfigError(
            f"attention {name!r} does not know Ulysses: with parallel.ulysses={ulysses} it would be silently wrong",
            where="model.attention",
            fix=f"one of {sorted(_ULYSSES_AWARE)}, or leave it out",
        )
    if heads % ulysses:
        raise ConfigError(
            f"{heads} attention heads cannot be split by parallel.ulysses={ulysses}",
            where="parallel.ulysses",
            fix=f"a divisor of {heads}",
        )
    return name


ALL_ATTENTION_FUNCTIONS.register(SDPA, attention)
