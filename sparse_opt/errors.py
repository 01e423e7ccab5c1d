"""The exceptions of the package. Each message is one line that names the object, its value and the expected value."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager


class SparseOptError(Exception):
    """Base class of the errors that this package raises for invalid data or failed operations."""


class BackendUnavailable(SparseOptError, RuntimeError):
    """An explicitly chosen backend cannot run here; the message gives the cause."""


class MaskError(SparseOptError, ValueError):
    """A mask is malformed, or does not fit the model it is used with."""


class BuildError(SparseOptError, RuntimeError):
    """The native gradients could not be compiled; names what is missing, or the first error and the log."""


class DeltaLogError(SparseOptError, ValueError):
    """A delta log file is damaged, missing, or belongs to another run; names the file and the step."""


class DeltaError(SparseOptError, ValueError):
    """A `SparseDelta` is damaged, or is not for the model it is used with; names the file or the tensor."""


class DataError(SparseOptError, ValueError):
    """A dataset, checkpoint or mask source misses required data; names the file and the key."""


class WeightSyncError(SparseOptError, ValueError):
    """Weights could not be shipped: a message was refused, or a sender or receiver is lost; names it.

    A receiver that refuses a message keeps its weights and its version.
    """


class DamagedMessage(WeightSyncError):
    """The bytes, digests or sizes of a message do not agree; the same message may be sent again."""


class OutOfOrderMessage(WeightSyncError):
    """An update does not follow the receiver's version, which needs a state message; names both versions."""


class ForeignMessage(WeightSyncError):
    """A message is for another mask, or names a weight, shape or dtype that the receiver does not have."""


class ConfigError(SparseOptError, ValueError):
    """A configuration key or value is invalid. The command line exits with 2 on this error, with 1 on the others."""


def listed(items: Sequence[str], separator: str = ", ", most: int = 3) -> str:
    """Join the first items for a message, followed by the number of the others."""
    more = len(items) - most
    return separator.join(items[:most]) + (f"{separator}and {more} more" if more > 0 else "")


@contextmanager
def memory_errors() -> Iterator[None]:
    """Raise torch.OutOfMemoryError if the native library cannot allocate: the stable ABI has no types of errors."""
    try:
        yield
    except RuntimeError as error:
        if "torch failed to allocate" not in str(error):
            raise
        import torch  # not at the top: errors are imported without torch

        raise torch.OutOfMemoryError(str(error).partition("\n")[0]) from error
