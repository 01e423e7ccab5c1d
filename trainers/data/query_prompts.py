"""Prompts made from the beginnings of texts, as in TRL's sentiment example with IMDB reviews."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from sparse_opt.errors import DataError

from .prompts import PromptExample
from .rows import DataReport, counter, load_rows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TEXT_COLUMN = "text"


@dataclass
class QueryReport(DataReport):
    """Counts of a dataset's used and dropped texts."""

    noun: ClassVar[str] = "queries"
    n_dropped_short: int = counter("{} dropped as too short")


def load_queries(
    dataset: str,
    split: str,
    tokenizer: PreTrainedTokenizerBase,
    subset_size: int | None = None,
    seed: int = 0,
    *,
    min_tokens: int,
    max_tokens: int,
    min_characters: int,
    n_words: int | None = None,
    prefix: str = "",
) -> tuple[list[PromptExample], QueryReport]:
    """The first tokens of each text; their number is drawn uniformly from min_tokens .. max_tokens with `seed`.

    The count includes a BOS added by the tokenizer. A query keeps the columns of its row. With `n_words` a query is
    `prefix` and the first words of each text, separated by single spaces.

    Args:
        dataset, split, subset_size, seed: see `load_rows`; rows have a column `text`.
        min_characters: only texts with more characters are used, and without `n_words` only those with at least
            `max_tokens` tokens.

    Raises:
        DataError: see `load_rows`; the column is missing, or a row has no text.
    """
    generator = random.Random(seed)
    report = QueryReport()

    def encoder(columns: Iterable[str], name: str) -> Callable[[dict[str, Any]], PromptExample | None]:
        if not is_text_data(columns):
            raise DataError(f"dataset {name}: found columns ({', '.join(sorted(columns))}); expected text")
        return encode_row

    def encode_row(row: dict[str, Any]) -> PromptExample | None:
        text = row[TEXT_COLUMN]
        if not isinstance(text, str):
            raise DataError(f"text is {text!r}, expected a string")
        if n_words is not None:
            if len(text) <= min_characters or not text.split():
                report.n_dropped_short += 1
                return None
            query = prefix + " ".join(text.split()[:n_words])
            return PromptExample(list(tokenizer(query)["input_ids"]), query, row)
        # Drawn for every row, so that the length of one row does not affect the others.
        n_tokens = generator.randint(min_tokens, max_tokens)
        # Encode the whole text: a tokenizer that appends EOS would append it to a truncated text. `verbose` would warn
        # about its length.
        ids = tokenizer(text, verbose=False)["input_ids"]
        if len(text) <= min_characters or len(ids) < max_tokens:
            report.n_dropped_short += 1
            return None
        first = list(ids[:n_tokens])
        return PromptExample(first, str(tokenizer.decode(first)), row)

    return load_rows(dataset, split, subset_size, seed, encoder, report), report


def is_text_data(columns: Iterable[str]) -> bool:
    """Whether a dataset's rows are texts instead of prompts."""
    found = set(columns)
    return TEXT_COLUMN in found and not found & {"prompt", "question", "problem", "messages", "conversations"}
