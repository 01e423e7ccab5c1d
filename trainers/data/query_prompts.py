"""Prompts made from the beginnings of texts, as in TRL's sentiment example with IMDB reviews."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sparse_opt.errors import DataError

from .prompts import PromptExample
from .records import chosen_rows, load_records, read_record

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TEXT_COLUMN = "text"


@dataclass
class QueryReport:
    """Counts of a dataset's used and dropped rows."""

    n_rows: int = 0
    n_examples: int = 0
    n_dropped_short: int = 0

    def __str__(self) -> str:
        return f"{self.n_examples} queries from {self.n_rows} texts; {self.n_dropped_short} dropped as too short"


def load_queries(
    dataset: str,
    split: str,
    tokenizer: PreTrainedTokenizerBase,
    *,
    min_tokens: int,
    max_tokens: int,
    min_characters: int,
    subset_size: int | None = None,
    seed: int = 0,
) -> tuple[list[PromptExample], QueryReport]:
    """The first tokens of each text; their number is drawn uniformly from min_tokens .. max_tokens with `seed`.

    The count includes a BOS added by the tokenizer. A query keeps the columns of its row.

    Args:
        dataset, split: see `load_records`; rows have a column `text`.
        min_characters: only texts with more characters and at least `max_tokens` tokens are used.
        subset_size, seed: see `chosen_rows`.

    Raises:
        DataError: see `load_records`; the column is missing, a row has no text, or no text is long enough.
    """
    records = load_records(dataset, split)
    if not is_text_data(records.column_names):
        raise DataError(f"dataset {dataset}: found columns ({', '.join(sorted(records.column_names))}); expected text")
    rows = chosen_rows(records, dataset, subset_size, seed)
    generator = random.Random(seed)
    report = QueryReport(n_rows=len(rows))
    examples = []
    for row in rows:
        try:
            columns = read_record(records, row)
        except DataError as error:
            raise DataError(f"dataset {dataset}, row {row}: {error}") from error
        text = columns[TEXT_COLUMN]
        if not isinstance(text, str):
            raise DataError(f"dataset {dataset}, row {row}: text is {text!r}, expected a string")
        # Drawn for every row, so that the length of one row does not affect the others.
        n_tokens = generator.randint(min_tokens, max_tokens)
        # The whole text: cut by the tokenizer, it would end with an EOS where it adds one. No warning of its length.
        ids = tokenizer(text, verbose=False)["input_ids"]
        if len(text) <= min_characters or len(ids) < max_tokens:
            report.n_dropped_short += 1
            continue
        query = list(ids[:n_tokens])
        examples.append(PromptExample(query, str(tokenizer.decode(query)), columns))
    report.n_examples = len(examples)
    if not examples:
        raise DataError(f"dataset {dataset}: no text of more than {min_characters} characters; {report}")
    return examples, report


def is_text_data(columns: Iterable[str]) -> bool:
    """Whether a dataset's rows are texts instead of prompts."""
    found = set(columns)
    return TEXT_COLUMN in found and not found & {"prompt", "question", "problem", "messages", "conversations"}
