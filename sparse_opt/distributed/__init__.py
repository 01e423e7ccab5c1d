"""What several ranks save: state of optimizers, and full states of sharded models."""

from .checkpoint import full_optimizer_state_dict, load_optimizer
from .rank_0 import full_state, on_rank_0

__all__ = [
    "full_optimizer_state_dict",
    "full_state",
    "load_optimizer",
    "on_rank_0",
]
