"""Optimizers that train the active elements of a mask."""

from .adamw import SparseAdamW
from .sgd import SparseSGD
from .sparse_optimizer import SparseOptimizer

OPTIMIZERS = (SparseAdamW, SparseSGD)

__all__ = ["OPTIMIZERS", "SparseAdamW", "SparseOptimizer", "SparseSGD"]
