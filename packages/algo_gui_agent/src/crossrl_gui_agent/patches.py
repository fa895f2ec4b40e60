"""The patch embedding of Qwen's vision tower as the matrix product that it is."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def multiply_patches(model: torch.nn.Module) -> None:
    """Replace the call of each patch embedding in place; weights and their names stay.

    Its convolution's kernel is as large as its stride, so a patch is one row of a product, for which torch's
    `Conv3d` is slow on a CPU.
    """
    for module in model.modules():
        convolution = getattr(module, "proj", None)
        if isinstance(convolution, torch.nn.Conv3d) and convolution.kernel_size == convolution.stride:
            module.forward = _product(convolution)


def _product(convolution: torch.nn.Conv3d):
    def forward(pixels: Tensor) -> Tensor:
        weight = convolution.weight
        return functional.linear(pixels.to(weight.dtype), weight.flatten(1), convolution.bias)

    return forward
