"""What several ranks save: the full state of sharded models, and delta logs."""

from .delta_log import DistributedDeltaLog
from .full_state import full_state

__all__ = ["DistributedDeltaLog", "full_state"]
