"""`data_loader`: the function that loads a dataset's examples, by the kind of its rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from ..options import RolloutOptions, TrainingOptions
from .encoding import load_examples

DataKind = Literal["preference", "demonstration", "prompt"]


# (dataset, split, tokenizer, subset_size, seed) -> examples, and a report (a dataclass with n_rows and n_examples)
LoadData = Callable[[str, str, Any, int | None, int], tuple[list[Any], Any]]


def data_loader(kind: DataKind, config: TrainingOptions) -> LoadData:
    """A loader of datasets of this kind with the run's options. An example is a list [chosen, rejected] or
    [completion] of token sequences, or a `PromptExample`."""

    def load(dataset: str, split: str, tokenizer: Any, subset_size: int | None, seed: int) -> tuple[list[Any], Any]:
        if kind == "prompt":
            from .prompts import load_prompts

            assert isinstance(config, RolloutOptions)
            return load_prompts(
                dataset,
                split,
                tokenizer,
                max_prompt_length=config.max_prompt_length,
                subset_size=subset_size,
                seed=seed,
            )
        return load_examples(
            kind,
            dataset,
            split,
            tokenizer,
            max_length=config.max_length,
            truncation_mode=config.truncation_mode,
            subset_size=subset_size,
            seed=seed,
        )

    return load
