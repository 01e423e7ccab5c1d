"""A receiver of weight updates in numpy, written from docs/formats.md alone, with all checks of "Receiving"."""

import json
import struct
from typing import Any

import numpy as np
import xxhash

NAMES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "U8": "uint8", "I32": "int32", "I64": "int64"}
STORED = {"BF16": np.uint16, "F16": np.uint16, "F32": np.uint32, "U8": np.uint8, "I32": np.int32, "I64": np.int64}
SIDES = {"element": (1, 1), "run16": (1, 16), "run32": (1, 32), "tile64": (64, 64), "tile128": (128, 128)}


def require(condition: object, what: str) -> None:
    if not condition:
        raise ValueError(f"refused: {what}")


def parse(data: bytes) -> tuple[dict[str, str], dict[str, np.ndarray]]:
    """Return a message's fields and tensors."""
    body = 8 + struct.unpack_from("<Q", data)[0]
    header = json.loads(data[8:body])
    fields = header.pop("__metadata__")
    others = json.dumps({k: v for k, v in fields.items() if k != "digest"}, sort_keys=True, separators=(",", ":"))
    require(xxhash.xxh3_128_hexdigest(others.encode()) == fields["digest"], "digest of the header")
    require((fields["format"], fields["format_version"]) == ("sparse_opt.weight_sync", "1"), "format")
    require(fields["kind"] in ("mask", "state", "update"), "kind")
    stored = [[name, NAMES[entry["dtype"]], entry["shape"]] for name, entry in header.items()]
    require(sorted(stored) == sorted(json.loads(fields["tensors"])), "list of tensors")
    return fields, {
        name: np.frombuffer(data[body:][slice(*e["data_offsets"])], STORED[e["dtype"]]).reshape(e["shape"])
        for name, e in header.items()
    }


def digest(numbers: np.ndarray, words: np.ndarray) -> int:
    x = numbers.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    x += words.astype(np.uint64) * np.uint64(0xD1342543DE82EF95) + np.uint64(0x2545F4914F6CDD1D)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return int((x ^ (x >> np.uint64(31))).sum(dtype=np.uint64))


def hexadecimal(total: int) -> str:
    return f"{total % 2**64:016x}"


def elements(units: np.ndarray, shape: list[int], pattern: str) -> np.ndarray:
    """Return the ascending row-major positions of some units."""
    columns = shape[-1] if shape else 1
    grid = np.arange(int(np.prod(shape, dtype=np.int64))).reshape(-1, columns)
    height, width = SIDES[pattern]
    rows = shape[-2] if len(shape) > 1 else 1
    matrix, row = np.divmod(grid // columns, rows)
    unit = (matrix * -(-rows // height) + row // height) * -(-columns // width) + grid % columns // width
    require((units[1:] > units[:-1]).all() and np.isin(units, unit).all(), "positions")
    return grid[np.isin(unit, units)]


class Receiver:
    """Weights by name, each a flat array of words with [dtype, shape] in `kinds`, and what a receiver knows of them."""

    def __init__(self, weights: dict[str, np.ndarray], kinds: dict[str, list[Any]]) -> None:
        self.weights, self.kinds, self.mask, self.version, self.total = weights, kinds, "", None, 0

    def receive(self, data: bytes) -> None:
        fields, tensors = parse(data)
        if fields["kind"] == "mask":
            return self.receive_mask(fields, tensors)
        update = fields["kind"] == "update"
        require(fields["mask_digest"] == self.mask, "mask")
        require(not update or int(fields["base_version"]) == self.version, "base version")
        require(not update or fields["base_digest"] == hexadecimal(self.total), "base digest")
        sent, total, writes = 0, self.total, []
        for dtype, first, places in self.groups:
            old = np.concatenate([self.weights[name][at] for name, at in places])
            chosen, new = np.arange(0), old[:0]
            if f"{dtype}.values" in tensors or not update:
                chosen, new = np.arange(len(old)), tensors[f"{dtype}.values"]
            elif f"{dtype}.bitmap" in tensors:
                chosen = np.flatnonzero(np.unpackbits(tensors[f"{dtype}.bitmap"], bitorder="little"))
                new = tensors[f"{dtype}.changed"]
            fits = new.dtype == old.dtype and len(chosen) == len(new) and (chosen < len(old)).all()
            require(fits, "number of values")
            terms = digest(first + chosen, new)
            sent, total = sent + terms, total + terms - digest(first + chosen, old[chosen])
            old[chosen] = new
            writes.append((places, old))
        require(hexadecimal(sent) == fields["payload_digest"], "payload digest")
        require(hexadecimal(total) == fields["result_digest"], "result digest")
        for places, values in writes:
            for name, at in places:
                self.weights[name][at], values = values[: len(at)], values[len(at) :]
        self.version, self.total = int(fields["version"]), total

    def receive_mask(self, fields: dict[str, str], tensors: dict[str, np.ndarray]) -> None:
        layout = json.loads(fields["layout"])
        active = [(t, tensors[f"positions.{i}"]) for i, t in enumerate(layout["tensors"]) if t["nnz"]]
        listed = np.concatenate([units for _, units in active])
        require(hexadecimal(digest(np.arange(len(listed)), listed)) == fields["payload_digest"], "payload digest")
        groups, total, first = [], 0, 0
        for dtype in sorted({t["dtype"] for t, _ in active}):
            of = [(t, units) for t, units in active if t["dtype"] == dtype]
            require(all(self.kinds.get(t["name"]) == [dtype, t["shape"]] for t, _ in of), "own tensors")
            places = [(t["name"], elements(units, t["shape"], layout["pattern"])) for t, units in of]
            require([len(at) for _, at in places] == [t["nnz"] for t, _ in of], "nnz")
            words = np.concatenate([self.weights[name][at] for name, at in places])
            groups.append((dtype, first, places))
            total, first = total + digest(first + np.arange(len(words)), words), first + len(words)
        self.mask, self.groups, self.total = fields["mask_digest"], groups, total
        self.version = int(fields["version"]) if hexadecimal(total) == fields["result_digest"] else None
