"""Reference implementation of the patch codec in numpy: defines the format; slow.

All functions take flat arrays of unsigned words, one per tensor.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .tables import Array, Sample, Tables
from .words import (
    CLASSES,
    LANE_ROWS,
    RAW_BIT,
    RECORD_UNIT,
    ROW_SCALE_BITS,
    SPAN_ROWS,
    TILE,
    VALUE_SCALE_BITS,
    WordKind,
)

# Tensors with more words than this are sampled: every sixteenth block of this many words.
SAMPLED_NUMEL = 2**20
SAMPLE_BLOCK = 4096
SAMPLE_STRIDE = 16

WORD = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_SIGNED = {1: np.int8, 2: np.int16, 4: np.int32, 8: np.int64}


class DamagedTile(ValueError):
    """The record of the tile with this number is invalid."""

    def __init__(self, tile: int, why: str) -> None:
        super().__init__(why)
        self.tile = tile


def differences(old: Array, new: Array, kind: WordKind) -> tuple[Array, Array]:
    """Return (sign, magnitude) of each change: bool, and words."""
    d = _ordered(new, kind) - _ordered(old, kind)
    negative = d.view(_SIGNED[kind.size]) < 0
    return negative, np.where(negative, np.zeros_like(d) - d, d)


def moved(old: Array, negative: Array, magnitude: Array, kind: WordKind) -> Array:
    """Return the new words."""
    ordered = _ordered(old, kind) + np.where(negative, np.zeros_like(magnitude) - magnitude, magnitude)
    return _ordered_back(ordered, kind)


def classes(old: Array, kind: WordKind) -> Array:
    """Return the class of each old word, int64."""
    if kind.class_shift >= kind.bits:
        return np.zeros(len(old), np.int64)
    return (old >> old.dtype.type(kind.class_shift)).astype(np.int64) % CLASSES


def symbols_of(negative: Array, magnitude: Array) -> tuple[Array, Array, Array]:
    """Return (symbol, number of extra bits, extra bits as uint64) of each change."""
    v = magnitude.astype(np.uint64) - np.uint64(1)
    length = _floor_log2(v)
    half = (v >> np.maximum(length - 1, 0).astype(np.uint64)) & np.uint64(1)
    bucket = np.where(v < 4, v.astype(np.int64), 4 + 2 * (length - 2) + half.astype(np.int64))
    extra = np.where(v < 4, 0, length - 1)
    low = v & ((np.uint64(1) << extra.astype(np.uint64)) - np.uint64(1))
    return 2 * bucket + negative, extra, low


def magnitude_of(bucket: int, low: int) -> int:
    """Return the magnitude of a bucket with these extra bits."""
    if bucket < 4:
        return bucket + 1
    length, half = 2 + (bucket - 4) // 2, bucket % 2
    return (1 << length) + (half << (length - 1)) + low + 1


def extra_bits(bucket: int) -> int:
    return 0 if bucket < 4 else 1 + (bucket - 4) // 2


def sample(old: Sequence[Array], new: Sequence[Array], kind: WordKind) -> Sample:
    """Count classes, changes and symbols in all words of small tensors and in some blocks of large ones."""
    seen = np.zeros((len(old), CLASSES), np.int64)
    changed = np.zeros_like(seen)
    symbols = np.zeros((CLASSES, kind.symbols), np.int64)
    for i, (a, b) in enumerate(zip(old, new, strict=True)):
        if len(a) > SAMPLED_NUMEL:
            chosen = np.arange(len(a)) // SAMPLE_BLOCK % SAMPLE_STRIDE == 0
            a, b = a[chosen], b[chosen]
        of = classes(a, kind)
        seen[i] = np.bincount(of, minlength=CLASSES)
        where = a != b
        changed[i] = np.bincount(of[where], minlength=CLASSES)
        symbol, _, _ = symbols_of(*differences(a[where], b[where], kind))
        np.add.at(symbols, (of[where], symbol), 1)
    return Sample(seen, changed, symbols)


def encode_tile(old: Array, new: Array, kind: WordKind, tables: Tables, row: int) -> bytes | None:
    """Return the record as u16 numbers, or None if nothing changed."""
    if (old == new).all():
        return None
    t = len(old)
    lanes = -(-t // LANE_ROWS)
    f = tables.rows[row].astype(np.int64)[classes(old, kind)]
    changed = old != new
    symbol, extra, low = (np.zeros(t, np.int64), np.zeros(t, np.int64), np.zeros(t, np.uint64))
    symbol[changed], extra[changed], low[changed] = symbols_of(*differences(old[changed], new[changed], kind))
    table = tables.class_table[classes(old, kind)]
    frequencies = tables.values.astype(np.int64)
    before = np.cumsum(frequencies, axis=1) - frequencies
    states = [1 << 16] * lanes
    numbers: list[int] = []  # last to be read first

    def push(lane: int, frequency: int, start: int, scale: int) -> None:
        if states[lane] >> (32 - scale) >= frequency:
            numbers.append(states[lane] & 0xFFFF)
            states[lane] >>= 16
        states[lane] = (states[lane] // frequency << scale) + states[lane] % frequency + start

    # The decoder's steps, from the last one to the first.
    span = SPAN_ROWS * lanes
    for begin in range((t - 1) // span * span, -1, -span):
        words = range(begin, min(begin + span, t))
        moving = [i for i in words if changed[i]]
        for first in range((len(moving) - 1) // lanes * lanes, -1, -lanes):
            together = list(enumerate(moving[first : first + lanes]))
            for have in range((max(int(extra[i]) for _, i in together) - 1) // 16 * 16, -1, -16):
                for lane, i in reversed([(lane, i) for lane, i in together if extra[i] > have]):
                    bits = min(16, int(extra[i]) - have)
                    push(lane, 1, int(low[i]) >> have & (1 << bits) - 1, bits)
            for lane, i in reversed(together):
                at = table[i], symbol[i]
                push(lane, int(frequencies[at]), int(before[at]), VALUE_SCALE_BITS)
        for i in reversed(words):
            unchanged = (1 << ROW_SCALE_BITS) - int(f[i])
            frequency, start = (int(f[i]), unchanged) if changed[i] else (unchanged, 0)
            push(i % lanes, frequency, start, ROW_SCALE_BITS)
    heads = [half for state in states for half in (state & 0xFFFF, state >> 16)]
    return np.array(heads + numbers[::-1], "<u2").tobytes()


def apply_tile(old: Array, record: Array, kind: WordKind, tables: Tables, row: int) -> Array:
    """Return the new words. Raises ValueError on an invalid record."""
    t = len(old)
    lanes = -(-t // LANE_ROWS)
    numbers = record.view("<u2").astype(np.int64).tolist()
    if len(numbers) < 2 * lanes:
        raise ValueError(f"its record has {len(numbers)} numbers, expected the states of {lanes} lanes")
    states = [numbers[2 * lane] + (numbers[2 * lane + 1] << 16) for lane in range(lanes)]
    at = 2 * lanes

    def refill(lanes_of_step: Sequence[int]) -> None:
        nonlocal at
        for lane in lanes_of_step:
            if states[lane] < 1 << 16:
                if at == len(numbers):
                    raise ValueError("its record ends too early")
                states[lane] = (states[lane] << 16) + numbers[at]
                at += 1

    new = old.copy()
    of = classes(old, kind)
    f = tables.rows[row].astype(np.int64)[of].tolist()
    frequencies = tables.values.astype(np.int64)
    ends = np.cumsum(frequencies, axis=1)
    span = SPAN_ROWS * lanes
    for begin in range(0, t, span):
        moving = []
        for row in range(begin, min(begin + span, t), lanes):
            row_words = range(row, min(row + lanes, t))
            for i in row_words:
                quotient, rest = divmod(states[i - row], 1 << ROW_SCALE_BITS)
                unchanged = (1 << ROW_SCALE_BITS) - f[i]
                if rest < unchanged:
                    states[i - row] = unchanged * quotient + rest
                else:
                    states[i - row] = f[i] * quotient + rest - unchanged
                    moving.append(i)
            refill(range(len(row_words)))
        for first in range(0, len(moving), lanes):
            together = moving[first : first + lanes]
            symbols, low, have = [], [0] * len(together), 0
            for lane, i in enumerate(together):
                quotient, rest = divmod(states[lane], 1 << VALUE_SCALE_BITS)
                table = tables.class_table[of[i]]
                symbols.append(int(np.searchsorted(ends[table], rest, side="right")))
                frequency = int(frequencies[table, symbols[lane]])
                states[lane] = frequency * quotient + rest - int(ends[table, symbols[lane]]) + frequency
            refill(range(len(together)))
            while missing := [lane for lane, symbol in enumerate(symbols) if extra_bits(symbol // 2) > have]:
                for lane in missing:
                    bits = min(16, extra_bits(symbols[lane] // 2) - have)
                    low[lane] |= states[lane] % (1 << bits) << have
                    states[lane] >>= bits
                refill(missing)
                have += 16
            negative = np.array([symbol % 2 == 1 for symbol in symbols])
            magnitude = [magnitude_of(symbol // 2, bits) for symbol, bits in zip(symbols, low, strict=True)]
            new[together] = moved(old[together], negative, np.array(magnitude, np.uint64).astype(old.dtype), kind)
    if at != len(numbers) or any(state != 1 << 16 for state in states):
        raise ValueError("its record does not end with its last word")
    return new


def encode_tiles(old: Sequence[Array], new: Sequence[Array], kind: WordKind, tables: Tables) -> tuple[Array, bytes]:
    """Encode all tiles: (sizes uint32, records)."""
    sizes, records = [], []
    for i, (a, b) in enumerate(zip(old, new, strict=True)):
        for begin in range(0, len(a), TILE):
            part = a[begin : begin + TILE], b[begin : begin + TILE]
            raw_bit, raw = 0, part[1].tobytes()
            raw += bytes(-len(raw) % RECORD_UNIT)
            record = encode_tile(*part, kind, tables, int(tables.row_of[i])) or b""
            if len(raw) < len(record):
                raw_bit, record = RAW_BIT, raw
            sizes.append(raw_bit | len(record) // RECORD_UNIT)
            records.append(record)
    return np.array(sizes, np.uint32), b"".join(records)


def apply_tiles(dense: Sequence[Array], sizes: Array, records: Array, kind: WordKind, tables: Tables) -> None:
    """Decode in place. `records` is uint8; its lengths must have been checked. Raises DamagedTile."""

    def new_words(old: Array, size: int, tensor: int, record: Array) -> Array:
        if size & RAW_BIT:
            if len(record) != -(-len(old) * kind.size // RECORD_UNIT) * RECORD_UNIT:
                raise ValueError(f"its raw record has {len(record)} bytes, expected {len(old)} words")
            return np.frombuffer(record[: len(old) * kind.size].tobytes(), old.dtype)
        return apply_tile(old, record, kind, tables, int(tables.row_of[tensor])) if len(record) else old

    tile = at = 0
    for tensor, words in enumerate(dense):
        for begin in range(0, len(words), TILE):
            part, size = words[begin : begin + TILE], int(sizes[tile])
            length = (size & ~RAW_BIT) * RECORD_UNIT
            try:
                part[:] = new_words(part, size, tensor, records[at : at + length])
            except ValueError as error:
                raise DamagedTile(tile, str(error)) from error
            tile, at = tile + 1, at + length


def _ordered(words: Array, kind: WordKind) -> Array:
    if not kind.is_float:
        return words
    top = words.dtype.type(1 << (kind.bits - 1))
    return np.where(words >= top, ~words, words ^ top)


def _ordered_back(ordered: Array, kind: WordKind) -> Array:
    if not kind.is_float:
        return ordered
    top = ordered.dtype.type(1 << (kind.bits - 1))
    return np.where(ordered >= top, ordered ^ top, ~ordered)


def _floor_log2(v: Array) -> Array:
    """Return floor(log2(v)) as int64, 0 for 0. In integers, since float64 would round the largest values up."""
    length = np.zeros(len(v), np.int64)
    for step in (32, 16, 8, 4, 2, 1):
        more = v >> np.uint64(step) > 0
        length += np.where(more, step, 0)
        v = np.where(more, v >> np.uint64(step), v)
    return length
