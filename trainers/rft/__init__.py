"""Rejection-sampling fine-tuning in three stages: `datagen`, `train` and `test`."""

from . import train
from .show_optimizations import ShowConfig, show_optimizations

# Stage of `sparse-opt train rft` -> its options class, and the function that runs it and returns a summary.
STAGES = {**train.STAGES, "show_optimizations": (ShowConfig, show_optimizations)}

__all__ = ["STAGES"]
