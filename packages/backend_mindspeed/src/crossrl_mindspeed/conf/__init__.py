"""Hydra files that let verl's `model_engine=crossrl_mindspeed` compose."""
