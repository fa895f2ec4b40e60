"""Sharded parameters (FSDP2, DTensor): this rank's part, full values, and FSDP's way back to rest."""

from __future__ import annotations

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor

from crossrl.errors import WorkerError


def world_size(backend: str) -> int:
    """Ranks of the process group that must exist; raises `WorkerError`, in the name of `backend`, without one."""
    if not torch.distributed.is_initialized():
        raise WorkerError(
            f"no process group: {backend} shards over torch.distributed, also in a single process",
            where="engine",
            fix="call torch.distributed.init_process_group first (gloo on CPU, with world_size=1 in one process)",
        )
    return torch.distributed.get_world_size()


def reshard(module: torch.nn.Module) -> None:
    """Free gathered weights: the root keeps its own after a forward, and would go on using them after an update."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


def reset(module: torch.nn.Module) -> None:
    """Bring FSDP back to rest after an error in forward or backward; gradients under way are lost.

    Raises `WorkerError` where this torch offers no way back.
    """
    if not isinstance(module, FSDPModule) or module._get_fsdp_state()._is_root is None:  # None: no forward yet
        return
    if not hasattr(module, "reset_iter_state"):
        raise WorkerError(
            "a forward or backward failed and this torch cannot reset FSDP",
            where="engine",
            fix="restart the worker from its last checkpoint, or use torch >= 2.14",
        )
    module.reset_iter_state()
    for part in module.modules():
        if isinstance(part, FSDPModule):
            for group in part._get_fsdp_state()._fsdp_param_groups:
                for parameter in group.fsdp_params:  # torch 2.14 forgets these: they would join the next step
                    parameter.unsharded_accumulated_grad = None
                    if hasattr(parameter, "_unsharded_param"):
                        parameter._unsharded_param.grad = None


def local_shard(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a parameter, without autograd; shares memory with it."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def like_sharded(local: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """`local` as a tensor that is sharded as `parameter` is."""
    if not isinstance(parameter, DTensor):
        return local
    mesh, placements = parameter.device_mesh, parameter.placements
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
    )


@torch.no_grad()
def copy_full(full: torch.Tensor, parameter: torch.Tensor) -> None:
    """Copy `full`, the same on every rank, into a parameter that may be sharded."""
    if isinstance(parameter, DTensor):
        full = distribute_tensor(
            full.to(parameter.device), parameter.device_mesh, parameter.placements, src_data_rank=None
        )
    parameter.copy_(full)
