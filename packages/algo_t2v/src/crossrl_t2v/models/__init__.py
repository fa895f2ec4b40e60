"""Model families: prompts, latents and decoding around the trained network."""
