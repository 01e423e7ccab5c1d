"""A receiver in numpy, written from docs/weight_sync.md alone, that follows a sender's bytes."""

from __future__ import annotations

import json
import struct
from typing import Any

import numpy as np
import pytest
from samples import bits, change, make_weights

from sparse_opt import MaskSet
from sparse_opt.masks.patterns import PATTERNS
from sparse_opt.weight_sync import WeightSender

WORDS = {"bfloat16": np.uint16, "float16": np.uint16, "float32": np.uint32}  # values are bit patterns
STORED = {"BF16": np.uint16, "F16": np.uint16, "F32": np.uint32, "U8": np.uint8, "I32": np.int32, "I64": np.int64}
SIDES = {"element": (1, 1), "run16": (1, 16), "run32": (1, 32), "tile64": (64, 64), "tile128": (128, 128)}


def parse(data: bytes) -> tuple[dict[str, str], dict[str, np.ndarray]]:
    """Return a message's fields and tensors."""
    body = 8 + struct.unpack_from("<Q", data)[0]
    header = json.loads(data[8:body])
    fields = header.pop("__metadata__")
    return fields, {
        name: np.frombuffer(data[body:][slice(*entry["data_offsets"])], STORED[entry["dtype"]])
        for name, entry in header.items()
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
    across = -(-columns // width)
    inside = np.isin(grid // columns // height * across + grid % columns // width, units)
    return grid[inside]


class Receiver:
    """Weights by name, each a flat array of words, and what a receiver knows of them."""

    def __init__(self, weights: dict[str, np.ndarray]) -> None:
        self.weights, self.version, self.total, self.encodings = weights, None, 0, set[str]()

    def receive(self, data: bytes) -> None:
        fields, tensors = parse(data)
        if fields["kind"] == "mask":
            self.receive_mask(fields, tensors)
            return
        update = fields["kind"] == "update"
        assert fields["mask_digest"] == self.mask
        assert not update or int(fields["base_version"]) == self.version
        assert not update or fields["base_digest"] == hexadecimal(self.total)
        sent, total, writes = 0, self.total, []
        for dtype, first, places in self.groups:
            old = np.concatenate([self.weights[name][at] for name, at in places])
            if f"{dtype}.values" in tensors:
                chosen, new = np.arange(len(old)), tensors[f"{dtype}.values"]
            elif f"{dtype}.bitmap" in tensors:
                chosen = np.flatnonzero(np.unpackbits(tensors[f"{dtype}.bitmap"], bitorder="little"))
                new = tensors[f"{dtype}.changed"]
            else:
                chosen, new = np.arange(0), old[:0]
            self.encodings |= {key.partition(".")[2] for key in tensors if key.startswith(dtype)} or {"nothing"}
            assert len(chosen) == len(new)
            terms = digest(first + chosen, new)
            sent, total = sent + terms, total + terms - digest(first + chosen, old[chosen])
            old[chosen] = new
            writes.append((places, old))
        assert hexadecimal(sent) == fields["payload_digest"] and hexadecimal(total) == fields["result_digest"]
        for places, values in writes:
            for name, at in places:
                self.weights[name][at], values = values[: len(at)], values[len(at) :]
        self.version, self.total = int(fields["version"]), total

    def receive_mask(self, fields: dict[str, str], tensors: dict[str, np.ndarray]) -> None:
        layout: dict[str, Any] = json.loads(fields["layout"])
        listed = np.concatenate([tensors[f"positions.{i}"] for i, t in enumerate(layout["tensors"]) if t["nnz"]])
        assert hexadecimal(digest(np.arange(len(listed)), listed)) == fields["payload_digest"]
        self.mask, self.groups, self.total, first = fields["mask_digest"], [], 0, 0
        for dtype in sorted({t["dtype"] for t in layout["tensors"] if t["nnz"]}):
            members = [(i, t) for i, t in enumerate(layout["tensors"]) if t["nnz"] and t["dtype"] == dtype]
            places = [
                (t["name"], elements(tensors[f"positions.{i}"], t["shape"], layout["pattern"])) for i, t in members
            ]
            assert [len(at) for _, at in places] == [t["nnz"] for _, t in members]
            words = np.concatenate([self.weights[name][at] for name, at in places])
            self.groups.append((dtype, first, places))
            self.total += digest(first + np.arange(len(words)), words)
            first += len(words)
        self.version = int(fields["version"]) if hexadecimal(self.total) == fields["result_digest"] else None


def words_of(weights: dict[str, Any]) -> dict[str, np.ndarray]:
    return {
        name: bits(w).numpy().view(WORDS[str(w.dtype).removeprefix("torch.")]).copy() for name, w in weights.items()
    }


def same(receiver: Receiver, weights: dict[str, Any]) -> bool:
    return all(np.array_equal(receiver.weights[name], words) for name, words in words_of(weights).items())


@pytest.mark.parametrize("pattern", PATTERNS)
def test_it_follows_a_sender(pattern: str) -> None:
    weights = make_weights("mixed")
    mask = MaskSet.random(weights, density=0.3, pattern=pattern)
    sender, receiver = WeightSender(weights, mask), Receiver(words_of(weights))
    receiver.receive(sender.mask_message().to_bytes())
    assert receiver.version == 0
    for version, share in enumerate([0.01, 1.0, 0.0, 0.2], start=1):
        change(weights, mask, share, seed=version)
        receiver.receive(sender.update().to_bytes())
        assert receiver.version == version and same(receiver, weights)
    assert receiver.encodings == {"values", "bitmap", "changed", "nothing"}
    late = Receiver(words_of(make_weights("mixed")))
    late.receive(sender.mask_message().to_bytes())
    assert late.version is None
    late.receive(sender.state_message().to_bytes())
    assert late.version == 4 and same(late, weights)


def test_the_vectors_of_the_page() -> None:
    mixed = [(0, 0), (1, 0x3F80), (12345678901, 0xFFFFFFFF)]
    found = [hexadecimal(digest(np.array([e]), np.array([b]))) for e, b in mixed]
    assert found == ["952f14f1e8ddc491", "7aefe3418579cb25", "4415160a96c453da"]
    words = np.array([0x3F80, 0xC000, 0x3F00])
    digests = [hexadecimal(digest(first + np.arange(3), words)) for first in (0, 10)]
    assert digests == ["cf71883e9e5c84ff", "f763e0ab94400814"]
