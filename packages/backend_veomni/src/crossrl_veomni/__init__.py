"""VeOmni behind CrossRL's Backend contract."""

from crossrl.protocols import Capabilities, Plugin

plugin = Plugin(
    name="veomni",
    summary="VeOmni: FSDP2, Ulysses, LoRA, sharded checkpoints; CUDA, NPU and CPU",
    target="crossrl_veomni.backend:backend",
    requires=("veomni>=0.1.12,<0.2", "diffusers>=0.38", "peft>=0.17", "transformers>=5.5.3,<5.11"),
    capabilities=Capabilities(
        families=("wan",),
        kinds=("diffusion",),
        devices=("cpu", "cuda", "npu"),
        parallelism=("fsdp2", "ulysses"),
        lora=True,
        export=("diffusers",),
    ),
)

layout = Plugin(
    name="veomni",
    summary="VeOmni's own Wan: the names and files of diffusers",
    target="crossrl_veomni.backend:layout",
)
