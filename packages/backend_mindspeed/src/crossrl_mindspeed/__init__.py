"""MindSpeed-MM (its native FSDP2 route) behind CrossRL's Backend contract."""

from crossrl.protocols import Capabilities, Plugin
from crossrl_mindspeed.source import obstacle

plugin = Plugin(
    name="mindspeed",
    summary="MindSpeed-MM (native FSDP2 route, from source): Ulysses, LoRA, sharded checkpoints; NPU and CPU",
    target="crossrl_mindspeed.backend:backend",
    requires=("diffusers>=0.38", "peft>=0.17", "transformers>=4.57", "einops", "tqdm"),
    capabilities=Capabilities(
        families=("wan",),
        kinds=("diffusion",),
        devices=("cpu", "cuda", "npu"),
        parallelism=("fsdp2", "ulysses"),
        lora=True,
        export=("diffusers",),
    ),
    available=obstacle,
)

layout = Plugin(
    name="mindspeed",
    summary="MindSpeed-MM's names for Wan's tensors; needs no source of it",
    target="crossrl_mindspeed.convert:layout",
    requires=("diffusers>=0.38",),
)
