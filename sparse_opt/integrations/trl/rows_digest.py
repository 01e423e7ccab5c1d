"""`RowsDigest`: recognizes the rows of a run when it is resumed."""

from __future__ import annotations

import json
import warnings
from typing import Any

import xxhash
from datasets import Dataset, IterableDataset
from transformers import TrainerCallback

from ...errors import DataError

N_DIGESTED = 1000  # rows of a stream that are read


def rows_digest(rows: Dataset | IterableDataset) -> str:
    """A digest of the rows and their order; of a stream, of its first 1,000 rows."""
    digest = xxhash.xxh3_128()
    if not isinstance(rows, Dataset):
        rows = rows.take(N_DIGESTED)
    for table in rows.with_format("arrow").iter(batch_size=1000):
        for row in table.to_pylist():
            digest.update(json.dumps(row, default=str).encode() + b"\n")
    return digest.hexdigest()


class RowsDigest(TrainerCallback):
    """Stores the digest of the rows in each checkpoint's `trainer_state.json`.

    Resuming from a checkpoint of other rows raises a DataError before the first step.
    """

    def __init__(self, rows: Dataset | IterableDataset) -> None:
        self.digest = rows_digest(rows)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        saved = state.stateful_callbacks.get("rows_digest")
        if state.global_step and saved is None:
            warnings.warn("the checkpoint has no digest of its rows, which are not compared", stacklevel=2)
        elif saved is not None and saved != self.digest:
            raise DataError(
                f"the rows of the dataset are not those of the checkpoint of step {state.global_step} "
                f"(digest {self.digest}, expected {saved}): restore them, or start a new run"
            )
        state.stateful_callbacks["rows_digest"] = self.digest
