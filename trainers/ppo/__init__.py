"""Proximal Policy Optimization: `losses` has the arithmetic, `loop` the options and the loop."""

from .loop import PPOConfig, train

__all__ = ["PPOConfig", "train"]
