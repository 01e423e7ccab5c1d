"""Sparse fine-tuning: optimizers, masks and ops whose cost scales with the number of active weights.

Names are imported on first use, so that `import sparse_opt` is fast and needs neither torch nor the extension.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import ops
    from .delta import DeltaLog, DeltaSet, SparseDelta
    from .errors import BackendUnavailable
    from .masks import MaskSet, RandomMask
    from .optim import GraphedStep, SparseAdamW, SparseLion, SparseSGD

__version__ = "0.1.0"

__all__ = [
    "BackendUnavailable",
    "DeltaLog",
    "DeltaSet",
    "GraphedStep",
    "MaskSet",
    "RandomMask",
    "SparseAdamW",
    "SparseDelta",
    "SparseLion",
    "SparseSGD",
    "ops",
]

_HOMES = {
    "BackendUnavailable": "errors",
    "DeltaLog": "delta",
    "DeltaSet": "delta",
    "GraphedStep": "optim",
    "MaskSet": "masks",
    "RandomMask": "masks",
    "SparseAdamW": "optim",
    "SparseDelta": "delta",
    "SparseLion": "optim",
    "SparseSGD": "optim",
    "ops": "ops",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f".{_HOMES[name]}", __name__)
    value = module if name == _HOMES[name] else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
