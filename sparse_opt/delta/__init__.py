"""Delta logs: the weights of a run, step by step, bit for bit."""

from .log import DeltaLog

__all__ = ["DeltaLog"]
