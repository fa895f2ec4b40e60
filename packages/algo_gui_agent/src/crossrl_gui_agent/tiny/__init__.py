"""A Qwen3-VL of a million parameters, its tokenizer and its processor: the large ones' code paths on a CPU."""
