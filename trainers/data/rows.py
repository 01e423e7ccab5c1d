"""Load the rows of a dataset from the hub or a local file as examples, and count those that are dropped."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from sparse_opt.errors import DataError
from sparse_opt.files import one_line

from .order import permutation

ExampleT = TypeVar("ExampleT")
# Called with a dataset's columns and name; returns the function that makes the example of a row, or None to drop it.
RowEncoder = Callable[[Iterable[str], str], Callable[[dict[str, Any]], ExampleT | None]]

_LOCAL_READERS = {".json": "json", ".jsonl": "json", ".parquet": "parquet"}


def counter(text: str) -> int:
    """A field of a `DataReport` that counts rows; `text` describes a count above 0."""
    count: int = field(default=0, metadata={"text": text})
    return count


@dataclass
class DataReport:
    """Counts of a dataset's used and dropped rows; subclasses add a `counter` for each reason."""

    n_rows: int = 0
    n_examples: int = 0
    noun: ClassVar[str] = "examples"

    def __str__(self) -> str:
        counts = [(field.metadata.get("text"), getattr(self, field.name)) for field in fields(self)]
        parts = [f"{self.n_examples} {self.noun} from {self.n_rows} rows"]
        return "; ".join([*parts, *(text.format(count) for text, count in counts if text and count)])


def load_rows(
    dataset: str, split: str, subset_size: int | None, seed: int, encoder: RowEncoder[ExampleT], report: DataReport
) -> list[ExampleT]:
    """The examples of a dataset's rows; counts rows and examples in the report.

    Args:
        dataset, split: see `load_records`.
        subset_size: number of rows, drawn with `seed`; None takes all rows in order, and so does a number larger than
            the dataset, with a UserWarning.

    Raises:
        DataError: see `load_records`; the encoder refuses the columns or a row (the message has its number), or drops
            every row.
    """
    records = load_records(dataset, split)
    encode = encoder(records.column_names, dataset)
    examples = []
    for row in chosen_rows(records, dataset, subset_size, seed):
        report.n_rows += 1
        try:
            example = encode(read_record(records, row))
        except DataError as error:
            raise DataError(f"dataset {dataset}, row {row}: {error}") from error
        if example is not None:
            examples.append(example)
    report.n_examples = len(examples)
    if not examples:
        raise DataError(f"dataset {dataset}: no {report.noun} left; {report}")
    return examples


def load_records(dataset: str, split: str = "train") -> Any:
    """The rows of a local .json, .jsonl or .parquet file, or of a hub dataset's split, as a `datasets.Dataset`.

    Raises:
        DataError: no such file or dataset, a file that cannot be read, or no rows.
    """
    import datasets

    path = Path(dataset).expanduser()
    reader = _LOCAL_READERS.get(path.suffix)
    if reader is None and path.is_file():
        raise DataError(f"dataset {path}: unknown file type '{path.suffix}', expected {', '.join(_LOCAL_READERS)}")
    if reader is not None and not path.is_file():
        raise DataError(f"dataset {path}: no such file")
    if reader is not None and path.stat().st_size == 0:
        raise DataError(f"dataset {path}: the file is empty")
    if not dataset.strip():
        raise DataError("dataset: its name is empty")
    try:
        if reader == "json":
            _require_json_text(path)
        with _without_logging(datasets):
            if reader is not None:
                records = datasets.load_dataset(reader, data_files=str(path), split="train")
            else:
                records = datasets.load_dataset(dataset, split=split)
    except DataError:
        raise
    # The readers of `datasets` check little, so an invalid file can raise nearly any type of error.
    except (
        OSError, ValueError, RuntimeError, TypeError, LookupError, AttributeError, ArithmeticError, StopIteration,
        datasets.exceptions.DatasetsError,
    ) as error:  # fmt: skip
        cause = error.__cause__ or error
        raise DataError(f"dataset {dataset}: cannot be read: {one_line(cause)}") from error
    if len(records) == 0:
        raise DataError(f"dataset {dataset}: no rows")
    return records


def read_record(records: Any, row: int) -> dict[str, Any]:
    """A row of `load_records` by its columns. Raises DataError if its text cannot be decoded."""
    try:
        record: dict[str, Any] = records[row]
    except (ValueError, RecursionError) as error:  # an Arrow file may declare any bytes as text
        raise DataError(f"cannot be read: {one_line(error)}") from error
    return record


def _require_json_text(path: Path) -> None:
    """Refuse files that the readers of `datasets` accept or crash on: other encodings, NULs, text other than JSON rows.

    This is one pass over the file, at 0.4 GB/s.
    """
    first = ""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            where = f"dataset {path}, line {number}"
            try:
                text = line.decode()
            except UnicodeDecodeError as error:
                raise DataError(
                    f"{where}: not UTF-8: byte 0x{line[error.start]:02x} at column {error.start + 1}"
                ) from error
            if "\0" in text:
                raise DataError(f"{where}: has a NUL byte, expected JSON")
            first = first or text.removeprefix("\ufeff").lstrip()[:1]
            if first not in ("", "{", "["):
                raise DataError(f"{where}: begins with {first!r}, expected JSON rows")
    if not first:
        raise DataError(f"dataset {path}: no rows, only blank lines")


def chosen_rows(records: Any, name: str, subset_size: int | None, seed: int) -> Sequence[int]:
    """The numbers of `subset_size` rows drawn with `seed`; None takes all rows in order.

    If the dataset, called `name` in messages, has fewer rows, all are taken, with a UserWarning.
    """
    if subset_size is not None and subset_size < len(records):
        return permutation(len(records), seed, 0)[:subset_size]
    if subset_size is not None and subset_size > len(records):
        warnings.warn(f"dataset {name}: has {len(records)} rows, not subset_size {subset_size}", stacklevel=3)
    return range(len(records))


@contextmanager
def _without_logging(datasets: Any) -> Iterator[None]:
    """A context in which `datasets` does not log the errors that it raises."""
    before = datasets.logging.get_verbosity()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    try:
        yield
    finally:
        datasets.logging.set_verbosity(before)
