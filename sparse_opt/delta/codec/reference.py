"""Reference implementation of the patch codec in numpy: defines every level; slow.

All functions take flat arrays of unsigned words, one per tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from .tables import Array, Sample, Tables
from .words import (
    BITMAP,
    CLASSES,
    ELIAS_FANO,
    LANE_ROWS,
    MODE_SHIFT,
    RAW,
    RAW_BIT,
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


def encode_packed_tile(old: Array, new: Array, kind: WordKind, width: int) -> tuple[int, bytes]:
    """Return (head, record)."""
    (where,) = (old != new).nonzero()
    n, t = len(where), len(old)
    if n == 0:
        return 0, b""
    k = (t // n).bit_length() - 1
    high = np.zeros(n + ((t - 1) >> k), np.uint8)
    high[(where >> k) + np.arange(n)] = 1
    mode, positions = ELIAS_FANO, [_fields(where, k), high]
    if n * k + len(high) > t:
        mode, positions = BITMAP, [(old != new).astype(np.uint8)]
    negative, magnitude = differences(old[where], new[where], kind)
    big = magnitude > 1
    escape = (1 << width) - 1
    rest = magnitude[big].astype(np.uint64) - np.uint64(2)
    escaped = rest >= escape
    stream = np.concatenate(
        [
            *positions,
            negative.astype(np.uint8),
            big.astype(np.uint8),
            _fields(np.minimum(rest, escape), width),
            _fields(new[where][big][escaped], kind.bits),
        ]
    )
    record = _filled(np.packbits(stream, bitorder="little").tobytes(), 4)
    raw = _filled(new.tobytes(), 4)
    return (n | RAW << MODE_SHIFT, raw) if len(raw) < len(record) else (n | mode << MODE_SHIFT, record)


def apply_packed_tile(old: Array, head: int, record: Array, kind: WordKind, width: int) -> Array:
    """Return the new words. Raises ValueError on an invalid record."""
    n, mode, t = head % (1 << MODE_SHIFT), head >> MODE_SHIFT, len(old)
    if n > t or mode > RAW or (n == 0) != (len(record) == 0) or (n == 0 and head):
        raise ValueError(f"its head {head:#x} is invalid for a tile of {t} words")
    if n == 0:
        return old.copy()
    if mode == RAW:
        if len(record) != -(-t * kind.size // 4) * 4:
            raise ValueError(f"its raw record has {len(record)} bytes, expected {t} words")
        return _words(record, 0, t, old.dtype)
    stream = np.unpackbits(record, bitorder="little")
    at = 0

    def take(count: int) -> Array:
        nonlocal at
        if at + count > len(stream):
            raise ValueError(f"its record ends at bit {len(stream)}, expected {at + count} or more")
        at += count
        return stream[at - count : at]

    if mode == BITMAP:
        (where,) = take(t).nonzero()
    else:
        k = (t // n).bit_length() - 1
        low = _numbers(take(n * k), k, n)
        (set_bits,) = take(n + ((t - 1) >> k)).nonzero()
        if len(set_bits) != n:
            raise ValueError(f"its positions are {len(set_bits)}, expected {n}")
        where = ((set_bits - np.arange(n)) << k) + low.astype(np.int64)
    if len(where) != n or (where >= t).any() or (np.diff(where) <= 0).any():
        raise ValueError("its positions do not ascend within the tile")
    negative, big = take(n).astype(bool), take(n).astype(bool)
    m = int(big.sum())
    rest = _numbers(take(m * width), width, m)
    escaped = rest == (1 << width) - 1
    words = _numbers(take(int(escaped.sum()) * kind.bits), kind.bits, int(escaped.sum()))
    if stream[at:].any() or len(stream) - at >= 32:
        raise ValueError(f"its record continues after bit {at}")
    magnitude = np.ones(n, np.uint64)
    magnitude[big] = rest + np.uint64(2)
    new = old.copy()
    new[where] = moved(old[where], negative, magnitude.astype(old.dtype), kind)
    new[where[big][escaped]] = words.astype(old.dtype)
    return new


def encode_tight_tile(old: Array, new: Array, kind: WordKind, tables: Tables, row: int) -> bytes | None:
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


def apply_tight_tile(old: Array, record: Array, kind: WordKind, tables: Tables, row: int) -> Array:
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


def encode_tiles(
    old: Sequence[Array], new: Sequence[Array], level: str, kind: WordKind, width: int, tables: Tables | None
) -> tuple[Array, Array, bytes]:
    """Encode all tiles: (heads uint16, sizes, records); sizes in the level's unit, uint16, or uint32 for `tight`."""
    tile, heads, sizes, records = TILE[level], [], [], []
    for i, (a, b) in enumerate(zip(old, new, strict=True)):
        for begin in range(0, len(a), tile):
            part = a[begin : begin + tile], b[begin : begin + tile]
            if level == "tight":
                assert tables is not None
                head, raw = 0, _filled(part[1].tobytes(), 2)
                record = encode_tight_tile(*part, kind, tables, int(tables.row_of[i])) or b""
                if len(raw) < len(record):
                    head, record = RAW_BIT, raw
                sizes.append(head | len(record) // 2)
            else:
                head, record = encode_packed_tile(*part, kind, width)
                heads.append(head)
                sizes.append(len(record) // 4)
            records.append(record)
    return np.array(heads, np.uint16), np.array(sizes, np.uint32), b"".join(records)


def apply_tiles(
    dense: Sequence[Array],
    heads: Array,
    sizes: Array,
    records: Array,
    level: str,
    kind: WordKind,
    width: int,
    tables: Tables | None,
) -> None:
    """Decode in place. `records` is uint8; its lengths must have been checked. Raises DamagedTile."""

    def new_words(old: Array, tile: int, tensor: int, record: Array) -> Array:
        if level == "packed":
            return apply_packed_tile(old, int(heads[tile]), record, kind, width)
        assert tables is not None
        if int(sizes[tile]) & RAW_BIT:
            if len(record) != -(-len(old) * kind.size // 2) * 2:
                raise ValueError(f"its raw record has {len(record)} bytes, expected {len(old)} words")
            return _words(record, 0, len(old), old.dtype)
        return apply_tight_tile(old, record, kind, tables, int(tables.row_of[tensor])) if len(record) else old

    words_per_tile, unit = TILE[level], 2 if level == "tight" else 4
    tile = at = 0
    for tensor, words in enumerate(dense):
        for begin in range(0, len(words), words_per_tile):
            part = words[begin : begin + words_per_tile]
            length = (int(sizes[tile]) & ~RAW_BIT) * unit
            try:
                part[:] = new_words(part, tile, tensor, records[at : at + length])
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


def _fields(values: Array, width: int) -> Array:
    """Return the bits of `values`, `width` each, lowest first."""
    shifts = np.arange(width, dtype=np.uint64)
    return ((values.astype(np.uint64)[:, None] >> shifts) & np.uint64(1)).astype(np.uint8).reshape(-1)


def _numbers(bits: Array, width: int, count: int) -> Array:
    """uint64 [count], the inverse of `_fields`."""
    shifts = np.arange(width, dtype=np.uint64)
    return (bits.reshape(count, width).astype(np.uint64) << shifts).sum(1, dtype=np.uint64)


def _words(record: Array, at: int, count: int, dtype: Any) -> Array:
    size = np.dtype(dtype).itemsize
    if at + count * size > len(record):
        raise ValueError(f"its record has {len(record)} bytes, expected {at + count * size} or more")
    return np.frombuffer(record[at : at + count * size].tobytes(), dtype)


def _filled(data: bytes, unit: int) -> bytes:
    return data + bytes(-len(data) % unit)
