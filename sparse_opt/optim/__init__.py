"""Optimizers that train the active elements of a mask."""

from .adamw import SparseAdamW
from .sgd import SparseSGD
from .sparse_optimizer import SparseOptimizer

__all__ = ["SparseAdamW", "SparseOptimizer", "SparseSGD"]
