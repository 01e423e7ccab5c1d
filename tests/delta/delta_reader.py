"""`python delta_reader.py DELTA_FOLDER BASE_FILE OUT_FILE`: a reader of docs/formats.md in Python and numpy alone."""

import json
import struct
import sys
from math import prod

import numpy as np
from tight_reader import moved, read_tables, tight


def parse(path):
    data = open(path, "rb").read()
    body = 8 + struct.unpack_from("<Q", data)[0]
    header = json.loads(data[8:body])
    metadata = header.pop("__metadata__", {})
    return data[:body], metadata, {name: data[body:][slice(*entry["data_offsets"])] for name, entry in header.items()}


def packed(old, record, size, dtype, n, mode, b):
    """Apply a record to the words; returns how many changes have each form."""
    bits, t = np.unpackbits(np.frombuffer(record, np.uint8), bitorder="little").astype(np.uint64), len(old)

    def take(count, width):
        nonlocal bits
        found, bits = bits[: count * width].reshape(count, width), bits[count * width :]
        return found @ (np.uint64(1) << np.arange(width, dtype=np.uint64))

    if mode == 0:
        k = (t // n).bit_length() - 1
        low, high = take(n, k).astype(int), np.flatnonzero(take(n + (t - 1 >> k), 1))
        places = (high - np.arange(n) << k) | low
    else:
        places = np.flatnonzero(take(t, 1))
    sign, big = take(n, 1), take(n, 1).astype(bool)
    a = np.ones(n, np.uint64)
    a[big] = take(big.sum(), b) + np.uint64(2)
    escaped = np.flatnonzero(big & (a == np.uint64((1 << b) + 1)))
    new = moved(old[places], np.where(sign > 0, -a, a), size, dtype)
    new[escaped] = take(len(escaped), 8 * size)
    old[places] = new
    assert not bits.any()
    return {"one": n - int(big.sum()), "field": int(big.sum()) - len(escaped), "escaped": len(escaped)}


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
        words, at, is_packed = whole[places], 0, "heads" in part
        tile, sizes = (8192, "<u2") if is_packed else (2**19, "<u4")
        for i, length in enumerate(np.frombuffer(part["sizes"], sizes).astype(int)):
            old = words[i * tile : (i + 1) * tile]
            bytes_ = 4 * length if is_packed else 2 * (length & 0x7FFFFFFF)
            record, at = part["records"][at : at + bytes_], at + bytes_
            head_ = struct.unpack_from("<H", part["heads"], 2 * i)[0] if is_packed else 0
            if head_ >> 14 == 2 or length >> 31:
                old[:] = np.frombuffer(record, f"<u{size}", len(old))
            elif is_packed and head_:
                packed(old, record, size, dtype, head_ % 2**14, head_ >> 14, part["width"][0])
            elif not is_packed and length:
                tight(old, record, size, dtype, *read_tables(part["tables"], size))
        whole[places] = words
        state[name] = whole.astype(f"<u{size}").tobytes()
    with open(out, "wb") as file:
        file.write(head + b"".join(state.values()))


if __name__ == "__main__":
    main(*sys.argv[1:])
