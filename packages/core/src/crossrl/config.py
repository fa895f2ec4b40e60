"""The whole run as one validated tree. Every key here is read somewhere; an unknown key is an error with a suggestion.

The same tree is the `crossrl:` node of a verl config. `workers` is verl's `trainer.n_gpus_per_node * nnodes` and
arrives from there. Sizes are in samples, pixels, frames; times in seconds.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from crossrl.errors import ConfigError
from crossrl.guard import GuardConfig
from crossrl.section import PositiveInt, Section, merged

FilePath = Annotated[str, AfterValidator(lambda p: str(Path(p).absolute()) if "/" in p and Path(p).exists() else p)]
"""A file, a folder or a known name; made absolute in the driver, since workers may run in another directory."""
Beta = Annotated[float, Field(ge=0.0, lt=1.0)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]


class Lora(Section):
    """Low-rank adapters instead of full fine-tuning."""

    rank: PositiveInt = 32
    alpha: PositiveInt = 64
    targets: tuple[str, ...] = ("to_q", "to_k", "to_v", "to_out.0")


class Model(Section):
    """The model to train."""

    family: str = "wan"
    path: FilePath  # a diffusers pipeline folder, or "toy" for the tiny model that ships with crossrl-t2v
    dtype: Literal["float32", "bfloat16"] = "float32"  # of compute; master weights are fp32
    gradient_checkpointing: bool = False
    lora: Lora | None = None
    ema: Annotated[float, Field(ge=0.0, lt=1.0)] | None = None  # decay of an evaluation copy; None = no copy
    layers: PositiveInt | None = None  # keep only the first n blocks, to bring a job up
    attention: str | None = None  # attention function; None = the backend's choice for the device


class Video(Section):
    """Shape of what is generated."""

    frames: PositiveInt = 9
    height: PositiveInt = 32
    width: PositiveInt = 32
    fps: Annotated[float, Field(gt=0)] = 8.0


class SamplingConfig(Section):
    """How samples are drawn. Classifier-free guidance is off (1.0) in RL on purpose; evaluation has its own."""

    steps: PositiveInt = 8
    shift: Annotated[float, Field(gt=0)] = 1.0
    guidance: Annotated[float, Field(ge=1.0)] = 1.0


class Data(Section):
    """Prompts: `toy:train`, or a .txt / .jsonl / .parquet file with a `prompt` column (and optionally `id`)."""

    train: FilePath
    heldout: FilePath | None = None
    sft: str | None = None  # captioned clips for `crossrl sft`, as `name:split`
    sft_clips: PositiveInt = 2048  # how many of them
    bad_rows: Literal["stop", "skip"] = "stop"


class RewardConfig(Section):
    """One reward by its entry-point name; `options` go to its constructor."""

    name: str
    weight: float = 1.0  # 0: computed and logged, never trained on; the guard watches it for reward hacking
    options: dict[str, Any] = {}


class Batch(Section):
    """Sizes. One iteration draws prompts x samples videos and makes `updates` optimizer steps on them."""

    prompts: PositiveInt = 8
    samples: PositiveInt = 16
    updates: PositiveInt = 1
    refill: Annotated[int, Field(ge=0)] = 0  # times to draw other prompts for groups that teach nothing
    rollout_micro: PositiveInt = 64  # samples a forward, a rank
    decode_micro: PositiveInt = 32  # videos a VAE call, a rank
    reward_micro: PositiveInt = 64  # videos a reward call
    update_micro: PositiveInt = 64  # rows a forward + backward, a rank


class Optimizer(Section):
    """AdamW. `warmup` and `total` count optimizer steps."""

    lr: Annotated[float, Field(gt=0)] = 1e-5
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    eps: Annotated[float, Field(gt=0)] = 1e-8
    weight_decay: Annotated[float, Field(ge=0)] = 1e-4
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup: Annotated[int, Field(ge=0)] = 0
    total: PositiveInt | None = None  # needed by linear and cosine


class Parallel(Section):
    """How the model is laid over the workers."""

    ulysses: PositiveInt = 1
    offload: Literal["none", "params", "all"] = "none"  # what waits on the host while it is not used
    reshard_after_forward: bool = True
    cpu_threads: PositiveInt | None = None  # of a worker on the CPU; None = an equal share of the cores


class Eval(Section):
    """Held-out evaluation with the deterministic sampler."""

    every: Annotated[int, Field(ge=0)] = 10  # iterations; 0 = only before and after
    samples: PositiveInt = 4  # a prompt
    guidance: Annotated[float, Field(ge=1.0)] = 1.0
    steps: PositiveInt | None = None  # None = sampling.steps


class Checkpoint(Section):
    """What is kept on disk."""

    every: Annotated[int, Field(ge=0)] = 10  # iterations; 0 = only at the end
    keep: PositiveInt = 2  # the newest; and the one that the guard would roll back to


class RewardRuntime(Section):
    """How rewards run."""

    workers: PositiveInt = 1
    timeout_s: Annotated[float, Field(gt=0)] = 600.0
    max_bad_fraction: Fraction = 0.25  # stop when more of a batch than this cannot be scored


class RunConfig(Section):
    """A whole run. `algorithm` and `rewards` name entry points; the algorithm's Config checks its own options."""

    algorithm: dict[str, Any]
    backend: str
    model: Model
    data: Data
    rewards: tuple[RewardConfig, ...] = Field(min_length=1)
    video: Video = Video()
    sampling: SamplingConfig = SamplingConfig()
    batch: Batch = Batch()
    optimizer: Optimizer = Optimizer()
    parallel: Parallel = Parallel()
    eval: Eval = Eval()
    checkpoint: Checkpoint = Checkpoint()
    reward_runtime: RewardRuntime = RewardRuntime()
    guard: GuardConfig = GuardConfig()
    gate: bool = True  # try engine and rewards before step 1, and refuse to start if they would spoil the training
    steps: PositiveInt = 50
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    run_dir: Annotated[str, Field(min_length=1), AfterValidator(lambda p: str(Path(p).absolute()))] = "runs/default"
    resume: FilePath = "never"  # "never", "auto" (newest checkpoint), "latest_valid" (newest intact one) or a folder
    step_timeout_s: Annotated[float, Field(gt=0)] = 3600.0

    @model_validator(mode="before")
    @classmethod
    def _choose_algorithm(cls, values: Any) -> Any:
        """`algorithm: name` is short for `{name: name}`; `for_algorithm.<name>` holds what a job sets for each."""
        values = dict(values)
        if isinstance(values.get("algorithm"), str):
            values["algorithm"] = {"name": values["algorithm"]}
        presets = values.pop("for_algorithm", {})
        if not isinstance(values.get("algorithm"), dict):
            raise ValueError("algorithm: give a name, e.g. algorithm=dance_grpo")
        name = values["algorithm"].get("name")
        return merged(presets.get(name, {}), values)

    @model_validator(mode="after")
    def _possible(self) -> RunConfig:
        if not isinstance(self.algorithm.get("name"), str):
            raise ValueError("algorithm.name is missing, e.g. algorithm=dance_grpo")
        if self.optimizer.schedule != "constant" and self.optimizer.total is None:
            raise ValueError(f"optimizer.schedule={self.optimizer.schedule} needs optimizer.total (optimizer steps)")
        if not any(reward.weight for reward in self.rewards):
            raise ValueError("every reward has weight 0: there is nothing to train for")
        if self.batch.samples % self.batch.updates:
            raise ValueError(
                f"batch.updates={self.batch.updates} must divide batch.samples={self.batch.samples}: "
                "every optimizer step takes an equal part of every group"
            )
        if self.batch.refill and not self.algorithm.get("drop_zero_std"):
            raise ValueError("batch.refill replaces dropped groups: it needs algorithm.drop_zero_std=true")
        if self.resume not in ("never", "auto", "latest_valid") and not Path(self.resume, "manifest.json").is_file():
            raise ValueError(f"resume={self.resume!r} is neither never, auto, latest_valid nor a checkpoint folder")
        return self

    def check_world_size(self, world_size: int) -> None:
        """Raise `ConfigError` unless `world_size` workers can share the batch evenly."""
        dp, rest = divmod(world_size, self.parallel.ulysses)
        if rest:
            raise ConfigError(
                f"{world_size} workers cannot be split by parallel.ulysses={self.parallel.ulysses}",
                where="parallel.ulysses",
                fix="choose a divisor of the number of workers",
            )
        if self.batch.prompts % dp:
            raise ConfigError(
                f"batch.prompts={self.batch.prompts} is not divisible by the {dp} data-parallel workers",
                where="batch.prompts",
                fix=f"use a multiple of {dp}, e.g. {dp * max(1, round(self.batch.prompts / dp))}",
            )
