"""GRPO for a Qwen3-VL GUI agent in a real browser, on verl's own trainer, engines and rollout."""
