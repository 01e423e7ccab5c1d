"""Optimizers that train the active elements of a mask.

docs/architecture.md follows a gradient from `backward()` to `step()`, with the file of each stage.

Under FSDP2 each rank stores a `Shard` (ranks/sharding.py) of each parameter, and autograd accumulates gradients into
another, unsharded parameter. Gradients are those of the whole, unsharded parameters; the op, the state and the base
weights are those of the shards' local tensors. Without FSDP2 all three are the parameter itself.
"""

from .adamw import SparseAdamW
from .graphed_step import GraphedStep
from .lion import SparseLion
from .options import SharedOptions
from .quantised import save_merged
from .sgd import SparseSGD
from .sparse_optimizer import SparseOptimizer

OPTIMIZERS = (SparseAdamW, SparseLion, SparseSGD)

__all__ = [
    "OPTIMIZERS",
    "GraphedStep",
    "SharedOptions",
    "SparseAdamW",
    "SparseLion",
    "SparseOptimizer",
    "SparseSGD",
    "save_merged",
]
