"""Delta logs: store the weights of a run at every logged step, bit for bit, as changes."""

from .log import DeltaLog

__all__ = ["DeltaLog"]
