"""`data_loader`: the function that loads a dataset's examples, by the kind of its rows."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

from ..options import RolloutOptions, TrainingOptions
from .encoding import load_examples
from .prompts import load_prompts

DataKind = Literal["preference", "demonstration", "prompt"]
# (dataset, split, tokenizer, subset_size, seed) -> examples, and a `DataReport`
LoadData = Callable[[str, str, Any, int | None, int], tuple[list[Any], Any]]


def data_loader(kind: DataKind, config: TrainingOptions) -> LoadData:
    """A loader of datasets of this kind with the run's options. An example is a list [chosen, rejected] or
    [completion] of token sequences, or a `PromptExample`."""
    if kind == "prompt":
        assert isinstance(config, RolloutOptions)
        return partial(load_prompts, max_prompt_length=config.max_prompt_length)
    return partial(load_examples, kind, max_length=config.max_length, truncation_mode=config.truncation_mode)
