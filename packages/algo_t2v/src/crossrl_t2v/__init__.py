"""RL for text-to-video and text-to-image diffusion models."""
