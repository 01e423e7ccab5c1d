"""Delta logs, which store the weights of a run at every logged step, bit for bit, and deltas, which share one change.

Names are imported when they are first used, because optimizers need the digests of this package alone.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .delta_set import DeltaSet
    from .log import DeltaLog
    from .sparse_delta import SparseDelta
    from .state_log import StateLog

__all__ = ["DeltaLog", "DeltaSet", "SparseDelta", "StateLog"]

_HOMES = {
    "DeltaLog": "log",
    "DeltaSet": "delta_set",
    "SparseDelta": "sparse_delta",
    "StateLog": "state_log",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
