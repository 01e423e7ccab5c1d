"""Errors that a caller can act on. Each message is one line: what, found, wanted."""

from __future__ import annotations


class SparseOptError(Exception):
    """Base of the errors this package raises for bad data or failed work."""


class BackendUnavailable(SparseOptError, RuntimeError):
    """An explicitly chosen backend cannot run here; the message carries the cause."""


class MaskError(SparseOptError, ValueError):
    """A mask is malformed, or does not belong to the model it is used with."""


class DeltaLogError(SparseOptError, ValueError):
    """A delta log file is damaged, missing, or belongs to another run; names the file and the step."""


class DataError(SparseOptError, ValueError):
    """A dataset, checkpoint or mask source lacks what the work needs; names the file and the key."""


class ConfigError(SparseOptError, ValueError):
    """A configuration key or value is wrong. The command line exits with 2 on it, and with 1 on the others."""
