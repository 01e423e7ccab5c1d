"""What several ranks save: state of optimizers, full states of sharded models, and delta logs."""

from .checkpoint import full_optimizer_state_dict, load_optimizer
from .delta_log import DistributedDeltaLog, full_state

__all__ = [
    "DistributedDeltaLog",
    "full_optimizer_state_dict",
    "full_state",
    "load_optimizer",
]
