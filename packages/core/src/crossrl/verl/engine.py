"""Every backend in verl's EngineRegistry, as `model_type="diffusion"`, `backend="crossrl_<name>"`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils
from verl.utils.device import get_device_name
from verl.workers.engine import BaseEngine, EngineRegistry

from crossrl.build import build_engine
from crossrl.errors import DeviceLeakError
from crossrl.leaks import device_leaks
from crossrl.registry import status
from crossrl.types import Prompt, Rows, SampleKey
from crossrl.verl.config import STRATEGY_PREFIX, CrossRLEngineConfig


class BridgeEngine(BaseEngine):
    """A `DiffusionEngine` behind verl's engine interface, so that verl's own TrainingWorker can train rows.

    A batch is a TensorDict of CPU tensors `x` [n, C, F, H, W], `sigma` [n] and `target.<name>` [n, ...], and the list
    `prompts` of n texts as non-tensor data. The loss is the configured algorithm's; `loss_function` is not used.
    """

    def __init__(self, model_config: Any, engine_config: CrossRLEngineConfig, optimizer_config, checkpoint_config):
        self.engine = build_engine(engine_config.run, get_device_name())
        self.mode: str | None = None

    def initialize(self) -> None:
        """Built already: TrainingWorker asks for the data-parallel rank before it initializes."""

    @property
    def is_param_offload_enabled(self) -> bool:
        """False: the engine moves what is offloaded by itself."""
        return False

    @property
    def is_optimizer_offload_enabled(self) -> bool:
        """False: the engine moves what is offloaded by itself."""
        return False

    def train_mode(self, **kwargs):
        """Nothing to switch: there is no dropout in RL, rollout and update run the same code."""
        return nullcontext()

    eval_mode = train_mode

    def optimizer_zero_grad(self) -> None:
        """Done by `forward_backward_batch`."""

    def forward_backward_batch(self, data: TensorDict, loss_function: Callable | None, forward_only: bool = False):
        """Mean loss of the batch over all ranks; gradients are accumulated in micro-batches of `batch.update_micro`."""
        if leaks := device_leaks(data):
            raise DeviceLeakError(f"the batch holds tensors that are not on the CPU: {', '.join(leaks)}")
        prompts = tensordict_utils.get(data, "prompts")
        keys = [SampleKey(Prompt(f"row/{i}", text), i) for i, text in enumerate(prompts)]
        targets = {k.removeprefix("target."): v for k, v in data.items() if k.startswith("target.")}
        rows = Rows(data["x"], data["sigma"], torch.arange(len(keys)), targets)
        weights = torch.full((len(keys),), 1.0 / (len(keys) * self.engine.data_parallel.size))
        with torch.set_grad_enabled(not forward_only):
            stats = self.engine.accumulate(rows, keys, weights, backward=not forward_only)
        loss = stats.sums.pop("loss") * self.engine.data_parallel.size
        metrics = {k: [v * self.engine.data_parallel.size] for k, v in stats.sums.items()}
        return {"model_output": {}, "loss": [loss], "metrics": metrics}

    def optimizer_step(self) -> float:
        """Clip and step; the gradient norm before clipping."""
        return self.engine.optimizer_step()["grad_norm"]

    def lr_scheduler_step(self) -> float:
        """The learning rate in force; it is a function of the number of optimizer steps."""
        return self.engine.optimizer.param_groups[0]["lr"]

    def get_data_parallel_size(self) -> int:
        """Ranks that see different samples."""
        return self.engine.data_parallel.size

    def get_data_parallel_rank(self) -> int:
        """This rank's place among them."""
        return self.engine.data_parallel.rank

    def get_data_parallel_group(self):
        """Their process group."""
        return self.engine.data_parallel.group

    def is_mp_src_rank_with_outputs(self) -> bool:
        """False on the further ranks of a sequence-parallel group."""
        return self.engine.data_parallel.primary

    def to(self, device: str, model: bool = True, optimizer: bool = True, grad: bool = True) -> None:
        """Move by hand."""
        self.engine.move(device, optimizer=optimizer)

    def save_checkpoint(self, local_path, hdfs_path=None, global_step=0, max_ckpt_to_keep=None, **kwargs) -> None:
        """Into `local_path`; publishing is the caller's."""
        Path(local_path).mkdir(parents=True, exist_ok=True)
        self.engine.save_checkpoint(Path(local_path))

    def load_checkpoint(self, local_path, hdfs_path=None, del_local_after_load=False, **kwargs) -> None:
        """From `local_path`, which is kept."""
        self.engine.load_checkpoint(Path(local_path))


def register_engines() -> None:
    """One registration for each installed backend; nothing of a backend is imported."""
    known = EngineRegistry._engines.get("diffusion", {})
    for name in {offer.name for offer in status("crossrl.backends")}:
        if STRATEGY_PREFIX + name not in known:
            EngineRegistry.register("diffusion", STRATEGY_PREFIX + name, device=["cpu", "cuda", "npu"])(BridgeEngine)


register_engines()
