"""A rollout for verl without a server: `rollout.name=transformers` samples with transformers' `generate` in an actor.

For machines without an accelerator and for tiny models; elsewhere the same job runs on verl's vLLM or SGLang rollout.
One actor a replica, which takes the requests that arrive within a few milliseconds as one batch.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from typing import Any

import ray
import torch
from transformers import AutoModelForImageTextToText
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.torch_dtypes import PrecisionType
from verl.workers.config import HFModelConfig, RolloutConfig
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.replica import RolloutReplica, TokenOutput

from crossrl.errors import WorkerError
from crossrl_gui_agent.generate import Generator, Request, SamplingParams

log = logging.getLogger(__name__)

NAME = "transformers"
GATHER_S = 0.01
"""How long a batch waits for more requests; a forward of the smallest model takes about as long."""


def actor_name(replica_rank: int) -> str:
    """The Ray name of a replica's actor."""
    return f"crossrl_transformers_{replica_rank}"


@ray.remote(num_cpus=0)
class TransformersServer:
    """The actor: holds its own copy of the policy, which the trainer replaces after each step."""

    def __init__(self, config: RolloutConfig, model_config: HFModelConfig) -> None:
        torch.set_num_threads(config.engine_kwargs[NAME]["threads"])
        config = omega_conf_to_dataclass(config)
        model_config = omega_conf_to_dataclass(model_config, dataclass_type=HFModelConfig)
        model = AutoModelForImageTextToText.from_pretrained(
            model_config.local_path,
            dtype=PrecisionType.to_dtype(config.dtype),
            attn_implementation=model_config.hf_config._attn_implementation,
        )
        self.config, self.version = config, 0
        self.generator = Generator(model, model_config.processor)
        self.waiting: list[tuple[Request, asyncio.Future]] = []
        self.lock = asyncio.Lock()

    async def generate(
        self,
        request_id: str,
        prompt_ids: list[int],
        sampling_params: dict[str, Any],
        image_data: list[Any] | None = None,
        video_data: list[Any] | None = None,
        **_: Any,
    ) -> TokenOutput:
        """Complete one prompt; batched with others that ask for the same sampling."""
        limit = sampling_params.get("max_tokens") or self.config.response_length
        params = SamplingParams(
            max_tokens=limit,
            temperature=sampling_params["temperature"],
            top_k=max(0, sampling_params["top_k"]),  # verl: -1 is off
            top_p=sampling_params["top_p"],
        )
        seed = f"{self.config.seed}/{request_id}"
        done = asyncio.get_running_loop().create_future()
        self.waiting.append((Request(prompt_ids, image_data or [], seed, params), done))
        if len(self.waiting) == 1:
            asyncio.get_running_loop().call_later(GATHER_S, lambda: asyncio.ensure_future(self._serve()))
        completion = await done
        return TokenOutput(
            token_ids=completion.token_ids,
            log_probs=completion.log_probs if sampling_params.get("logprobs") else None,
            stop_reason="completed" if completion.finished else "length",
            extra_fields={"global_steps": self.version},
        )

    async def _serve(self) -> None:
        async with self.lock:  # what arrives during a batch joins the next one
            waiting, self.waiting = self.waiting, []
            batches: dict[SamplingParams, list[tuple[Request, asyncio.Future]]] = {}
            for request, done in waiting:
                batches.setdefault(request.params, []).append((request, done))
            for batch in batches.values():
                for start in range(0, len(batch), self.config.max_num_seqs):
                    await self._complete(batch[start : start + self.config.max_num_seqs])

    async def _complete(self, batch: list[tuple[Request, asyncio.Future]]) -> None:
        try:
            completions = await asyncio.to_thread(self.generator.complete, [request for request, _ in batch])
        except Exception as error:  # the waiting episodes must hear of it, whatever it is
            for _, done in batch:
                done.set_exception(error)
            return
        for (_, done), completion in zip(batch, completions, strict=True):
            done.set_result(completion)

    async def update_weights(self, weights: dict[str, torch.Tensor], version: int | None) -> None:
        """Replace all weights; `WorkerError` if names are missing or unknown."""
        async with self.lock:
            missing, unexpected = self.generator.model.load_state_dict(weights, strict=False)
            tied = set(self.generator.model.all_tied_weights_keys or ())
            if set(missing) - tied or unexpected:
                raise WorkerError(
                    f"the trainer's weights do not fit the rollout's model: missing {missing}, unknown {unexpected}",
                    where=f"rollout.name={NAME}",
                )
            self.version = version or 0

    async def idle(self, **_: Any) -> None:
        """There is no memory to give back, no cache to clear and nothing to profile."""

    wake_up = sleep = clear_kv_cache = release_kv_cache = resume_kv_cache = idle
    abort_all_requests = resume_generation = start_profile = stop_profile = idle


class TransformersReplica(RolloutReplica):
    """verl's handle of one actor."""

    async def launch_servers(self) -> None:
        """Start the actor."""
        server = TransformersServer.options(name=actor_name(self.replica_rank), max_concurrency=self.max_concurrency)
        self._server_handle = server.remote(self.config, self.model_config)
        self.servers, self._server_address = [self._server_handle], actor_name(self.replica_rank)

    def rollout_worker_use_gpu(self) -> bool:
        """No."""
        return False


class TransformersAdapter(BaseRollout):
    """The trainer's side, one on each rank: hands the policy's weights to the replica of the same rank."""

    async def update_weights(
        self, weights: Iterable[tuple[str, torch.Tensor]], global_steps: int | None = None, **_: Any
    ) -> None:
        """Collect full tensors (all ranks together) and send them."""
        found = {name: tensor.detach().to("cpu", copy=True) for name, tensor in weights}
        server = ray.get_actor(actor_name(torch.distributed.get_rank()))
        await server.update_weights.remote(found, global_steps)

    async def resume(self, tags: list[str]) -> None:
        """Nothing was released."""

    release = resume
