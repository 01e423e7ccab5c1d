"""SparseAdamW in other libraries' trainers: transformers' Trainer, and TRL's SFTTrainer, DPOTrainer and GRPOTrainer.

    from sparse_opt.integrations import SparseArguments, sparse_trainer

    trainer = sparse_trainer(DPOTrainer)(model, args=args, train_dataset=rows, mask="mask.safetensors")

To keep a delta log of a run that is not sparse:

    from sparse_opt.integrations import DeltaLogCallback

    trainer.add_callback(DeltaLogCallback("delta_logs", "every:10,last"))

`import sparse_opt` does not import this package, and importing this package does not import transformers or TRL:
`sparse_trainer` makes a subclass of the class passed to it. No function or class of these libraries is patched.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .arguments import SparseArguments
    from .callback import DeltaLogCallback
    from .checkpoints import VerifiedCheckpointCallback
    from .factory import sparse_trainer
    from .trl.margins import MarginsCallback
    from .trl.memory import MemoryCallback
    from .trl.update_statistics import UpdateStatisticsCallback

__all__ = [
    "DeltaLogCallback",
    "MarginsCallback",
    "MemoryCallback",
    "SparseArguments",
    "UpdateStatisticsCallback",
    "VerifiedCheckpointCallback",
    "sparse_trainer",
]

# Imported when a name is accessed: the callbacks derive from a class of transformers.
_HOMES = {
    "DeltaLogCallback": "callback",
    "MarginsCallback": "trl.margins",
    "MemoryCallback": "trl.memory",
    "SparseArguments": "arguments",
    "UpdateStatisticsCallback": "trl.update_statistics",
    "VerifiedCheckpointCallback": "checkpoints",
    "sparse_trainer": "factory",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
