"""Tables of records, as text and as CSV files.

A record maps the keys of the CSV and JSON files to raw values. `COLUMNS` gives each key the heading and the kind that
it has in tables.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from .output_files import write_text

Kind = Literal["text", "shape", "count", "percent", "number", "interval"]
Record = dict[str, Any]


class Column(NamedTuple):
    """Heading and kind of the values. Values of the kind `percent` are fractions of 1."""

    heading: str
    kind: Kind = "text"


# Key of a record -> its column in every table; other keys are headings themselves, of text.
COLUMNS = {
    "shape": Column("shape", "shape"),
    "numel": Column("elements", "count"),
    "weights": Column("weights", "count"),
    "share": Column("share", "percent"),
    "in_out": Column("in -> out"),
    "density_bits": Column("bits", "percent"),
    "sparsity_bits": Column("bits", "percent"),
    "sign_flips": Column("flips", "percent"),
    "active": Column("active", "count"),
    "density": Column("density", "percent"),
    "shared_with_final": Column("shared", "count"),
    "coverage": Column("coverage", "percent"),
    "matrices": Column("matrices", "count"),
    "rank": Column("rank", "interval"),
    "full_rank": Column("of", "count"),
    "rank_of_full": Column("rank", "percent"),
    "effective_rank": Column("effective rank", "interval"),
    "effective_rank_of_full": Column("effective rank", "percent"),
    "stable_rank": Column("stable rank", "interval"),
    "mean_stable_rank": Column("stable rank", "number"),
    "frobenius_norm": Column("Frobenius norm", "number"),
    "spectral_norm": Column("spectral norm", "interval"),
    "share_large": Column("large", "percent"),
}


class Table:
    """Records of equal keys, with a title that describes the values and their unit.

    Args:
        columns: columns that only this table has; see `COLUMNS`.
        keys: the keys to show, all by default.
    """

    def __init__(
        self,
        title: str,
        records: Sequence[Record],
        columns: Mapping[str, Column] = MappingProxyType({}),
        keys: Iterable[str] | None = None,
    ) -> None:
        self.title, self.records = title, records
        shown = (records[0] if records else ()) if keys is None else keys
        self.columns = {key: columns.get(key) or COLUMNS.get(key) or Column(key) for key in shown}

    @property
    def headings(self) -> list[str]:
        return [column.heading for column in self.columns.values()]

    @property
    def texts(self) -> list[list[str]]:
        """The cells of each row as text."""
        return [[_text(record[key], column.kind) for key, column in self.columns.items()] for record in self.records]

    @property
    def is_text(self) -> list[bool]:
        """Whether each column is text, which tables align left."""
        return [column.kind in ("text", "shape") for column in self.columns.values()]

    @property
    def n_words(self) -> int:
        """Number of columns, from the left, that are text."""
        return [*self.is_text, False].index(False)


def write_csv(table: Table, path: Path) -> None:
    """Write raw values: shares as fractions of 1, an interval as three columns. Raises DataError as `write_text`."""
    buffer = io.StringIO(newline="")
    writer = csv.writer(buffer, lineterminator="\n")
    ends = {key: ("", "_low", "_high") if c.kind == "interval" else ("",) for key, c in table.columns.items()}
    writer.writerow([key + end for key in table.columns for end in ends[key]])
    for record in table.records:
        writer.writerow([value for key, c in table.columns.items() for value in _raw(record[key], c.kind)])
    write_text(path, buffer.getvalue(), "table")


def _raw(value: Any, kind: Kind) -> Sequence[Any]:
    if kind == "interval":
        return value.value, value.low, value.high
    return (_text(value, kind) if kind == "shape" else value,)


def _text(value: Any, kind: Kind) -> str:
    if kind == "shape":
        return "x".join(map(str, value))
    if kind == "count":
        return f"{value:,}"
    if kind == "percent":
        return f"{100 * value:.3f} %" if math.isfinite(value) else "-"
    if kind == "number":
        return f"{value:.4g}"
    if kind == "interval":
        ends = (value.value, value.low, value.high)
        at, low, high = (str(x) if isinstance(x, int) else f"{x:.4g}" for x in ends)
        return at if low == high == at else f"{at} [{low}, {high}]"
    return "" if value is None else str(value)
