"""What all backends on torch's FSDP2 share: weight slots, sharded checkpoints, LoRA and the engine's base."""
