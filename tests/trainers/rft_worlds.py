"""Reward functions and an engine with scripted completions, for tests of rejection sampling."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sparse_opt.trainers.rollouts import Completions


def short(completions: Sequence[Any], **columns: Any) -> list[float]:
    """1 where a completion has an even number of characters: of a random model's, about half."""
    texts = [completion if isinstance(completion, str) else completion[-1]["content"] for completion in completions]
    return [float(len(text) % 2 == 0) for text in texts]


def graded(completions: Sequence[str], **columns: Any) -> list[float | None]:
    """2 for a long right answer, 1 for a right one, none where a completion says "skip"."""
    return [None if "skip" in text else ("42" in text) * (1.0 + (len(text) > 4)) for text in completions]


class ScriptedEngine:
    """Gives the completions of a list in turn, each with EOS, but for those that end in "..."."""

    def __init__(self, tokenizer: Any, completions: Sequence[str]):
        self.tokenizer = tokenizer
        self.eos_ids = (tokenizer.eos_token_id,)
        self.left = list(completions)
        self.closed = False

    def generate(self, prompts: Sequence[Sequence[int]], n: int, sampling: Any) -> Completions:
        texts, self.left = self.left[: len(prompts) * n], self.left[len(prompts) * n :]
        return Completions(
            [
                self.tokenizer(text, add_special_tokens=False).input_ids
                + ([] if text.endswith("...") else [*self.eos_ids])
                for text in texts
            ]
        )

    def close(self) -> None:
        self.closed = True
