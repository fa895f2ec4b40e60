"""CrossRL: any RL algorithm on any training backend, driven by verl. Importing this loads no torch, ray or verl."""

__version__ = "0.1.0"
