"""Delta logs: store the weights of a run at every logged step, bit for bit, as changes.

`DeltaLog` is imported when it is first used, because optimizers need the digests of this package alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .log import DeltaLog

__all__ = ["DeltaLog"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .log import DeltaLog

    return DeltaLog
