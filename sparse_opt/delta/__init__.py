"""Delta logs: store the weights of a run at every logged step, bit for bit, as changes.

Names are imported when they are first used, because optimizers need the digests of this package alone.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .export import export_values
    from .log import DeltaLog
    from .state_log import StateLog

__all__ = ["DeltaLog", "StateLog", "export_values"]

_HOMES = {"DeltaLog": "log", "StateLog": "state_log", "export_values": "export"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
