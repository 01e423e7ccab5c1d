"""Options shared by the training loops: of the model and data, of training, and of sampling completions."""

from .completions import CompletionOptions, RolloutOptions
from .graphs import GraphOptions
from .model import ModelOptions, model_slug
from .training import LoggedOptions, ReferenceOptions, TrainingOptions

__all__ = [
    "CompletionOptions",
    "GraphOptions",
    "LoggedOptions",
    "ModelOptions",
    "ReferenceOptions",
    "RolloutOptions",
    "TrainingOptions",
    "model_slug",
]
