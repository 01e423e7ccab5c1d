"""The words of a patch, and records at the level `tight`, as docs/formats.md describes them, for delta_reader.py."""

import struct
from math import ceil

import numpy as np

SHIFTS = {"bfloat16": 7, "float16": 7, "float32": 23, "float64": 55, "float8_e4m3fn": 3, "float8_e5m2": 2}


def ordered(words, size, dtype, undo=False):
    top = np.uint64(1 << 8 * size - 1)
    inverted, flipped = ~words & np.uint64((1 << 8 * size) - 1), words ^ top
    return words if dtype not in SHIFTS else np.where((words >= top) != undo, inverted, flipped)


def moved(old, d, size, dtype):
    new = ordered(old, size, dtype) + d & np.uint64((1 << 8 * size) - 1)
    return ordered(new, size, dtype, undo=True)


def tight(old, record, size, dtype, frequency, tables):
    t, z = len(old), np.frombuffer(record, "<u2").astype(np.uint64)
    lanes = ceil(t / 16384)
    x, at = z[0 : 2 * lanes : 2] | z[1 : 2 * lanes : 2] << np.uint64(16), 2 * lanes
    classes = (old >> np.uint64(SHIFTS[dtype])).astype(int) % 256 if dtype in SHIFTS else np.zeros(t, int)

    def refill(used):
        nonlocal at
        low = used[x[used] < 65536]
        x[low] = x[low] << np.uint64(16) | z[at : at + len(low)]
        at += len(low)

    for span in range(0, ceil(t / lanes), 64):
        hits = []
        for begin in range(span * lanes, min(t, (span + 64) * lanes), lanes):
            word = np.arange(begin, min(t, begin + lanes))
            used, f = word - begin, frequency[classes[word]]
            rest, q = x[used] % np.uint64(65536), x[used] >> np.uint64(16)
            hit = rest >= 65536 - f
            x[used] = np.where(hit, f * q + rest - (65536 - f), (65536 - f) * q + rest)
            refill(used)
            hits.extend(word[hit])
        for begin in range(0, len(hits), lanes):
            word, used = np.array(hits[begin : begin + lanes]), np.arange(min(lanes, len(hits) - begin))
            ends = np.cumsum(tables[classes[word]], axis=1)
            rest, q = x[used] % np.uint64(16384), x[used] >> np.uint64(14)
            symbol = (rest[:, None] >= ends).sum(1)
            f, end = tables[classes[word], symbol], ends[used, symbol]
            x[used] = f * q + rest - (end - f)
            refill(used)
            bucket, v = symbol >> 1, (symbol >> 1).astype(np.uint64)
            unread = np.where(bucket < 4, 0, (bucket - 4) // 2 + 1)
            whole = (np.uint64(2) | (bucket % 2).astype(np.uint64)) << unread.astype(np.uint64)
            v, shift = np.where(bucket < 4, v, whole), np.zeros(len(used), np.uint64)
            while (some := np.flatnonzero(unread)).size:
                e = np.minimum(unread[some], 16)
                wide = e.astype(np.uint64)
                v[some] += (x[some] & (np.uint64(1) << wide) - np.uint64(1)) << shift[some]
                x[some], shift[some], unread[some] = x[some] >> wide, shift[some] + wide, unread[some] - e
                refill(some)
            a = v + np.uint64(1)
            old[word] = moved(old[word], np.where(symbol % 2, -a, a), size, dtype)
    assert at == len(z) and (x == 65536).all()


def read_tables(data, size):
    rows, values, row = struct.unpack_from("<3H", data)
    symbols, of_class = 2 * (4 + 2 * (8 * size - 3)), np.frombuffer(data, np.uint8, 256, 6)
    tables = np.frombuffer(data, "<u2", symbols * values, 262).reshape(values, symbols).astype(np.uint64)
    at, frequency = 262 + 2 * symbols * values, np.full(256, 32768, np.uint64)
    for i in range(rows):
        has = np.flatnonzero(np.unpackbits(np.frombuffer(data, np.uint8, 32, at), bitorder="little"))
        if i in (0, row):
            frequency[has] = np.frombuffer(data, "<u2", len(has), at + 32)
        at += 32 + 2 * len(has)
    return frequency, tables[of_class]
