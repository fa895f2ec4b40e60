"""verl's training worker for a vision-language model, and for machines without an accelerator."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict
from verl.single_controller.ray import RayResourcePool, ResourcePoolManager
from verl.utils.device import get_device_name
from verl.utils.tensordict_utils import nested_tensor_from_tensor_list
from verl.workers.engine_workers import ActorRolloutRefWorker, TrainingWorker

from crossrl import env


class GuiTrainingWorker(TrainingWorker):
    """verl's, with whole position ids; on a CPU with gloo, where verl asks for "cpu:gloo,cpu:gloo" (torch refuses)."""

    def __init__(self, config: Any) -> None:
        if get_device_name() == "cpu":
            torch.set_num_threads(max(1, env.cpu_count() // env.local_world_size()))
            if not torch.distributed.is_initialized():
                torch.distributed.init_process_group("gloo")
        super().__init__(config)

    def train_mini_batch(self, data: TensorDict) -> TensorDict:
        """See verl."""
        return super().train_mini_batch(with_whole_positions(data))

    def infer_batch(self, data: TensorDict) -> TensorDict:
        """See verl."""
        return super().infer_batch(with_whole_positions(data))


class GuiWorker(ActorRolloutRefWorker):
    """verl's actor, rollout and reference worker."""

    actor_worker_cls = ref_worker_cls = GuiTrainingWorker


class CpuPools(ResourcePoolManager):
    """Pools of processes that need no accelerator."""

    def create_resource_pool(self) -> None:
        """As verl's, with `use_gpu=False`."""
        for name, processes in self.resource_pool_spec.items():
            self.resource_pool_dict[name] = RayResourcePool(
                processes, use_gpu=False, max_colocate_count=self.max_colocate_count, name_prefix=name
            )


def with_whole_positions(data: TensorDict) -> TensorDict:
    """The batch with M-RoPE `position_ids` [n, 4, ragged], also when all n sequences are of one length L.

    From n tensors [4, L] torch builds a nested tensor that is ragged in the 4, and verl then reads it along L.
    """
    positions, lengths = data["position_ids"], data["input_ids"].offsets().diff()
    if positions.dim() == 3 and not torch.equal(positions.offsets().diff(), lengths):
        rows = positions.values().reshape(len(lengths), -1, int(lengths[0]))
        data["position_ids"] = nested_tensor_from_tensor_list(list(rows), ragged_idx=2)
    return data
