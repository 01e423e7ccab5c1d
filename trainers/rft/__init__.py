"""Rejection-sampling fine-tuning in three stages: `datagen`, `train` and `test`."""

from .train import STAGES

__all__ = ["STAGES"]
