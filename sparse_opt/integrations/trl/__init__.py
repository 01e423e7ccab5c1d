"""TRL's SFT, DPO and GRPO trainers under a mask: their data, the command line, and callbacks for any Trainer.

Names are imported when they are first used: the callbacks derive from a class of transformers.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .margins import MarginsCallback
    from .memory import MemoryCallback
    from .update_statistics import UpdateStatisticsCallback

__all__ = ["MarginsCallback", "MemoryCallback", "UpdateStatisticsCallback"]

_HOMES = {
    "MarginsCallback": "margins",
    "MemoryCallback": "memory",
    "UpdateStatisticsCallback": "update_statistics",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
