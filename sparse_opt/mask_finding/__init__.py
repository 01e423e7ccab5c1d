"""Mask finding: scores of elements, from a delta log or from a model, and the selection of the best ones."""

from .experts import FoundExperts, find_experts
from .find import find_from_log, find_from_model
from .log_scores import LOG_METHODS
from .model_scores import CALIBRATION_METHODS
from .select import FoundMask, find_mask

__all__ = [
    "CALIBRATION_METHODS",
    "LOG_METHODS",
    "FoundExperts",
    "FoundMask",
    "find_experts",
    "find_from_log",
    "find_from_model",
    "find_mask",
]
