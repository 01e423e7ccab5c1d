"""`python delta_reader.py DELTA_FOLDER BASE_FILE OUT_FILE`: a reader of docs/formats.md in Python and numpy alone."""

import json
import struct
import sys
from math import ceil, prod

import numpy as np

SHIFTS = {"bfloat16": 7, "float16": 7, "float32": 23, "float64": 55, "float8_e4m3fn": 3, "float8_e5m2": 2}


def ordered(words, size, dtype, undo=False):
    top = np.uint64(1 << 8 * size - 1)
    inverted, flipped = ~words & np.uint64((1 << 8 * size) - 1), words ^ top
    return words if dtype not in SHIFTS else np.where((words >= top) != undo, inverted, flipped)


def moved(old, d, size, dtype):
    new = ordered(old, size, dtype) + d & np.uint64((1 << 8 * size) - 1)
    return ordered(new, size, dtype, undo=True)


def coded(old, record, size, dtype, frequency, tables):
    """Apply a record to the words, in place."""
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


def read_tables(data, size, tensors, tensor):
    """The frequencies of changes and of symbols, by class, of a tensor of so many."""
    if not data:
        data = struct.pack("<2H", 1, 1) + bytes(2 * tensors + 256) + uniform(2 * (4 + 2 * (8 * size - 3))) + bytes(32)
    rows, values = struct.unpack_from("<2H", data)
    (row,), at = struct.unpack_from("<H", data, 4 + 2 * tensor), 4 + 2 * tensors
    symbols, of_class = 2 * (4 + 2 * (8 * size - 3)), np.frombuffer(data, np.uint8, 256, at)
    tables = np.frombuffer(data, "<u2", symbols * values, at + 256).reshape(values, symbols).astype(np.uint64)
    at, frequency = at + 256 + 2 * symbols * values, np.full(256, 32768, np.uint64)
    for i in range(rows):
        has = np.flatnonzero(np.unpackbits(np.frombuffer(data, np.uint8, 32, at), bitorder="little"))
        if i in (0, row):
            frequency[has] = np.frombuffer(data, "<u2", len(has), at + 32)
        at += 32 + 2 * len(has)
    return frequency, tables[of_class]


def uniform(symbols):
    frequencies = np.full(symbols, 1 + (16384 - symbols) // symbols, "<u2")
    frequencies[0] += 16384 - frequencies.sum(dtype=int)
    return frequencies.tobytes()


def apply(words, part, size, dtype, tensors=1, tensor=0, tile=0, at=0):
    """Apply a patch to the words of one of its tensors, whose records begin at `tile` and `at`; returns what follows.

    Also which forms the records have.
    """
    sizes, forms = np.frombuffer(part["sizes"], "<u4").astype(int), set()
    for begin in range(0, len(words), 2**19):
        old, length = words[begin : begin + 2**19], 2 * (sizes[tile] & 0x7FFFFFFF)
        record = part["records"][at : at + length]
        forms.add("raw" if sizes[tile] >> 31 else "coded" if length else "unchanged")
        if sizes[tile] >> 31:
            old[:] = np.frombuffer(record, f"<u{size}", len(old))
        elif length:
            coded(old, record, size, dtype, *read_tables(part["tables"], size, tensors, tensor))
        tile, at = tile + 1, at + length
    return tile, at, forms


def parse(path):
    data = open(path, "rb").read()
    body = 8 + struct.unpack_from("<Q", data)[0]
    header = json.loads(data[8:body])
    metadata = header.pop("__metadata__", {})
    return data[:body], metadata, {name: data[body:][slice(*entry["data_offsets"])] for name, entry in header.items()}


def main(folder, base, out):
    _, metadata, parts = parse(f"{folder}/delta.safetensors")
    head, _, state = parse(base)
    for name, dtype, shape in json.loads(metadata["layout"])["tensors"]:
        if f"{name}.counts" not in parts:
            continue
        part = {key.rpartition(".")[2]: data for key, data in parts.items() if key.rpartition(".")[0] == name}
        size = len(state[name]) // prod(shape)
        whole = np.frombuffer(state[name], f"<u{size}").astype(np.uint64)
        places = np.arange(len(whole))
        if "runs" in part:
            length = part["run_length"][0]
            places = (np.frombuffer(part["runs"], "<u4").astype(int)[:, None] * length + np.arange(length)).ravel()
        words = whole[places]
        tiles, end, _ = apply(words, part, size, dtype)
        assert 4 * tiles == len(part["sizes"]) and end == len(part["records"])
        whole[places] = words
        state[name] = whole.astype(f"<u{size}").tobytes()
    with open(out, "wb") as file:
        file.write(head + b"".join(state.values()))


if __name__ == "__main__":
    main(*sys.argv[1:])
