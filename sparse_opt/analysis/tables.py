"""Tables of raw values, and how they read on a terminal, on a page and in a CSV file."""

from __future__ import annotations

import csv
import io
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ..result_files import write_text
from .ranks import Figure

Kind = Literal["text", "count", "percent", "number", "interval"]


@dataclass(frozen=True)
class Column:
    """A column's heading, its name in CSV files, and how a value reads: shares are percent, where text is meant."""

    heading: str
    key: str
    kind: Kind = "text"


@dataclass(frozen=True)
class Table:
    """Raw values under columns; `title` says what the figures are, and in which unit."""

    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Any, ...], ...]

    @property
    def headings(self) -> list[str]:
        return [column.heading for column in self.columns]

    @property
    def texts(self) -> list[list[str]]:
        """The rows as people read them."""
        return [[_text(v, c.kind) for v, c in zip(row, self.columns, strict=True)] for row in self.rows]

    @property
    def words(self) -> int:
        """How many columns, from the left, are text."""
        return next((i for i, column in enumerate(self.columns) if column.kind != "text"), len(self.columns))


def write_csv(table: Table, path: Path) -> None:
    """The raw values, shares as fractions of 1, intervals as three columns. Raises DataError as `write_text`."""
    buffer = io.StringIO(newline="")
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow([key for column in table.columns for key in _keys(column)])
    for row in table.rows:
        writer.writerow([v for value, c in zip(row, table.columns, strict=True) for v in _values(value, c)])
    write_text(path, buffer.getvalue(), "table")


def _keys(column: Column) -> list[str]:
    ends = ("", "_low", "_high") if column.kind == "interval" else ("",)
    return [column.key + end for end in ends]


def _values(value: Any, column: Column) -> list[Any]:
    if column.kind == "interval":
        return [value.value, value.low, value.high]
    return [value]


def _text(value: Any, kind: Kind) -> str:
    if kind == "count":
        return f"{value:,}"
    if kind == "percent":
        return f"{100 * value:.3f} %" if math.isfinite(value) else "-"
    if kind == "number":
        return f"{value:.4g}"
    if kind == "interval":
        return _interval(value)
    return str(value)


def _interval(figure: Figure) -> str:
    value, low, high = (_short(x) for x in (figure.value, figure.low, figure.high))
    return value if low == high == value else f"{value} [{low}, {high}]"


def _short(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:.4g}"
