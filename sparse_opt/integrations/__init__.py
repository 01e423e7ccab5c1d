"""SparseAdamW in other people's trainers: transformers' Trainer, and TRL's SFTTrainer, DPOTrainer and GRPOTrainer.

    from sparse_opt.integrations import SparseArguments, sparse_trainer

    trainer = sparse_trainer(DPOTrainer)(model, args=args, train_dataset=rows, mask="mask.safetensors")

A delta log of any other run of theirs:

    from sparse_opt.integrations import DeltaLogCallback

    trainer.add_callback(DeltaLogCallback("delta_logs", "every:10,last"))

Nothing here is imported by `import sparse_opt`, and nothing of transformers or TRL by importing this: `sparse_trainer`
takes the class that is already loaded and makes a subclass of it. No function or class of theirs is changed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .arguments import SparseArguments
from .factory import sparse_trainer

if TYPE_CHECKING:
    from .callback import DeltaLogCallback

__all__ = ["DeltaLogCallback", "SparseArguments", "sparse_trainer"]


def __getattr__(name: str) -> Any:
    # A callback is a class of transformers', which nothing here imports before it is asked for.
    if name != "DeltaLogCallback":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .callback import DeltaLogCallback

    return DeltaLogCallback
