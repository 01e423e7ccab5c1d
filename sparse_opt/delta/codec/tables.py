"""Estimates the frequency tables of a patch from a sample; the patch stores them.

The sample consists of integer counts, and the tables are computed on the host, so that the same tensors give the same
tables on every device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .words import CLASSES, MAX_VALUE_TABLES, ROW_SCALE_BITS, VALUE_SCALE_BITS, WordKind

# Tensors with at least this many words get their own row, which takes less than a hundredth of their record.
OWN_ROW_NUMEL = 2**20

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class Sample:
    """Counts of a sample of the words.

    seen, changed: int64 [tensors, 256], number of words of each class, and of those that changed.
    symbols: int64 [256, S], number of changes of each class and symbol, in all tensors.
    """

    seen: Array
    changed: Array
    symbols: Array


@dataclass(frozen=True)
class Tables:
    """Frequencies of changes and of their symbols.

    row_of: uint16 [tensors]; rows: uint16 [R, 256], frequency of a change out of 65536, with values filled in for
    classes that are not in the row; class_table: uint8 [256]; values: uint16 [V, S], each row with the sum 16384.
    """

    row_of: Array
    rows: Array
    class_table: Array
    values: Array
    present: Array  # bool [R, 256]

    @classmethod
    def uniform(cls, tensors: int, kind: WordKind) -> Tables:
        """The tables of an empty sample, whose form in a file is empty: all symbols are equally frequent."""
        none = np.zeros((tensors, CLASSES), np.int64)
        return make_tables(Sample(none, none, np.zeros((CLASSES, kind.symbols), np.int64)), [0] * tensors, kind)

    def to_bytes(self) -> bytes:
        """Serialize as specified in docs/formats.md."""
        if not self.present.any():
            return b""
        parts = [
            np.array([len(self.rows), len(self.values)], "<u2"),
            self.row_of.astype("<u2"),
            self.class_table,
            self.values.astype("<u2"),
        ]
        for row, present in zip(self.rows, self.present, strict=True):
            parts += [np.packbits(present, bitorder="little"), row[present].astype("<u2")]
        return b"".join(part.tobytes() for part in parts)

    @classmethod
    def from_bytes(cls, data: bytes, tensors: int, kind: WordKind) -> Tables:
        """Parse the result of `to_bytes`. Raises ValueError on bytes that are invalid for this number of tensors."""
        if not data:
            return cls.uniform(tensors, kind)
        at = 0

        def take(dtype: str, count: int) -> Array:
            nonlocal at
            size = np.dtype(dtype).itemsize * count
            if at + size > len(data):
                raise ValueError(f"its tables end at byte {len(data)}, expected {at + size} or more")
            at += size
            return np.frombuffer(data, dtype, count, at - size)

        row_count, table_count = map(int, take("<u2", 2))
        if row_count < 1 or not 1 <= table_count <= MAX_VALUE_TABLES:
            raise ValueError(f"found {row_count} rows and {table_count} value tables, expected 1 to {MAX_VALUE_TABLES}")
        row_of, class_table = take("<u2", tensors), take("u1", CLASSES)
        if (row_of >= row_count).any() or (class_table >= table_count).any():
            raise ValueError("its tables refer to a row or a value table that does not exist")
        values = take("<u2", table_count * kind.symbols).reshape(table_count, kind.symbols)
        if (values == 0).any() or (values.sum(1, dtype=np.int64) != 1 << VALUE_SCALE_BITS).any():
            raise ValueError(f"its value tables have a frequency of 0 or a sum other than {1 << VALUE_SCALE_BITS}")
        presents: list[Array] = []
        rows: list[Array] = []
        for _ in range(row_count):
            presents.append(np.unpackbits(take("u1", CLASSES // 8), bitorder="little").astype(bool))
            frequencies = take("<u2", int(presents[-1].sum()))
            if (frequencies == 0).any():
                raise ValueError("its rows have a frequency of 0")
            row = rows[0].copy() if rows else np.full(CLASSES, 1 << (ROW_SCALE_BITS - 1), np.uint16)
            row[presents[-1]] = frequencies
            rows.append(row)
        if at != len(data):
            raise ValueError(f"its tables have {len(data)} bytes, expected {at}")
        return cls(row_of.copy(), np.stack(rows), class_table.copy(), values.copy(), np.stack(presents))


def make_tables(sample: Sample, numels: Sequence[int], kind: WordKind) -> Tables:
    """Build the tables. Row 0 and value table 0 are those of all tensors and classes together."""
    large = [i for i, numel in enumerate(numels) if numel >= OWN_ROW_NUMEL][: 2**16 - 1]
    row_of = np.zeros(len(numels), np.uint16)
    row_of[large] = np.arange(1, len(large) + 1)
    seen = np.concatenate([sample.seen.sum(0, keepdims=True), sample.seen[large]])
    changed = np.concatenate([sample.changed.sum(0, keepdims=True), sample.changed[large]])
    present = seen > 0
    # (changed + 1/2) / (seen + 1), rounded, of 65536; never certain.
    one = 1 << ROW_SCALE_BITS
    frequencies = np.clip((one * (2 * changed + 1) + seen + 1) // (2 * (seen + 1)), 1, one - 1).astype(np.uint16)
    rows = np.where(present, frequencies, np.where(present[0], frequencies[0], one // 2).astype(np.uint16))

    words_per_sampled = sum(numels) / max(1, int(sample.seen.sum()))
    pooled = _normalised(sample.symbols.sum(0))
    own = {c: _normalised(sample.symbols[c]) for c in np.flatnonzero(sample.symbols.sum(1)).tolist()}
    # Bits that a class saves by having its own table, minus the bits of the table.
    saved = {
        c: words_per_sampled * float(sample.symbols[c] @ np.log2(table / pooled)) - 16 * kind.symbols
        for c, table in own.items()
    }
    tabled = sorted(sorted(own, key=lambda c: (-saved[c], c))[: MAX_VALUE_TABLES - 1])
    tabled = [c for c in tabled if saved[c] > 0]
    class_table = np.zeros(CLASSES, np.uint8)
    class_table[tabled] = np.arange(1, len(tabled) + 1)
    values = [pooled, *(own[c] for c in tabled)]
    return Tables(row_of, rows, class_table, np.stack(values), present)


def _normalised(counts: Array) -> Array:
    """Return uint16 frequencies with the sum 16384, none of them 0."""
    total, symbols, one = int(counts.sum()), len(counts), 1 << VALUE_SCALE_BITS
    if total == 0:
        counts, total = np.ones(symbols, np.int64), symbols
    frequencies = 1 + counts * (one - symbols) // total
    frequencies[int(np.argmax(counts))] += one - int(frequencies.sum())
    return frequencies.astype(np.uint16)
