"""The independent receiver follows a sender's bytes, and refuses damaged messages before it writes."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from independent_receiver import Receiver, digest, hexadecimal
from samples import bits, change, clones, make_weights, same_bits
from torch import Tensor

from sparse_opt import MaskSet
from sparse_opt.errors import WeightSyncError
from sparse_opt.masks.patterns import PATTERNS
from sparse_opt.weight_sync import Message, WeightReceiver, WeightSender

WORDS = {2: np.uint16, 4: np.uint32}


def words_of(weights: dict[str, Any]) -> dict[str, np.ndarray]:
    return {name: bits(w).cpu().numpy().view(WORDS[w.element_size()]).copy() for name, w in weights.items()}


def receiver_of(weights: dict[str, Any]) -> Receiver:
    kinds = {name: [str(w.dtype).removeprefix("torch."), list(w.shape)] for name, w in weights.items()}
    return Receiver(words_of(weights), kinds)


def same(receiver: Receiver, weights: dict[str, Any]) -> bool:
    return all(np.array_equal(receiver.weights[name], words) for name, words in words_of(weights).items())


@pytest.mark.parametrize("pattern", PATTERNS)
def test_it_follows_a_sender(place, pattern):
    device, backend = place
    weights = make_weights("mixed", device)
    mask = MaskSet.random(weights, density=0.3, pattern=pattern)
    sender, receiver, forms = WeightSender(weights, mask, backend=backend), receiver_of(weights), set()
    receiver.receive(sender.mask_message().to_bytes())
    assert receiver.version == 0
    for version, share in enumerate([0.01, 1.0, 0.0, 0.2], start=1):
        change(weights, mask, share, seed=version)
        message = sender.update().wait()
        forms |= {name.partition(".")[2] for name in message.tensors} or {"nothing"}
        receiver.receive(message.to_bytes())
        assert receiver.version == version and same(receiver, weights)
    assert forms == {"values", "bitmap", "changed", "nothing"}
    late = receiver_of(make_weights("mixed"))
    late.receive(sender.mask_message().to_bytes())
    assert late.version is None
    late.receive(sender.state_message().to_bytes())
    assert late.version == 4 and same(late, weights)


def test_the_vectors_of_the_page():
    mixed = [(0, 0), (1, 0x3F80), (12345678901, 0xFFFFFFFF)]
    found = [hexadecimal(digest(np.array([e]), np.array([b]))) for e, b in mixed]
    assert found == ["952f14f1e8ddc491", "7aefe3418579cb25", "4415160a96c453da"]
    words = np.array([0x3F80, 0xC000, 0x3F00])
    digests = [hexadecimal(digest(first + np.arange(3), words)) for first in (0, 10)]
    assert digests == ["cf71883e9e5c84ff", "f763e0ab94400814"]


def with_fields(message: Message, *, sign: bool = True, **fields: str) -> bytes:
    """The message's bytes with other header fields, with their digest if `sign`."""
    data = message.to_bytes()
    body = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:body])
    metadata = header["__metadata__"] | fields
    if sign:
        signed = {key: value for key, value in metadata.items() if key != "digest"}
        text = json.dumps(signed, sort_keys=True, separators=(",", ":"))
        metadata["digest"] = xxhash.xxh3_128_hexdigest(text.encode())
    encoded = json.dumps(header | {"__metadata__": metadata}).encode()
    return len(encoded).to_bytes(8, "little") + encoded + data[body:]


def with_tensor(message: Message, name: str, change: Callable[[Tensor], Tensor]) -> Message:
    return replace(message, tensors={**message.tensors, name: change(message.tensors[name])})


def with_positions(message: Message, change: Callable[[Tensor], Tensor]) -> Message:
    """A mask message with other positions of the first tensor, whose digest is right."""
    changed = with_tensor(message, "positions.0", change)
    listed = np.concatenate([positions.numpy() for positions in changed.tensors.values()])
    return replace(changed, payload_digest=hexadecimal(digest(np.arange(len(listed)), listed)))


def with_layout(message: Message, **entry: Any) -> Message:
    """A mask message whose layout describes the first tensor differently."""
    layout = json.loads(message.layout or "")
    layout["tensors"][0] |= entry
    return replace(message, layout=json.dumps(layout))


def flipped(tensor: Tensor) -> Tensor:
    """A copy with another lowest bit in the first element."""
    copy = tensor.clone()
    copy.view(torch.uint8)[0] ^= 1
    return copy


# What is damaged -> the kind of the message, what the independent receiver refuses, and the damage. The header's digest
# is right in all but the first.
DAMAGES: dict[str, tuple[str, str, Callable[[Message], bytes | Message]]] = {
    "header": ("state", "digest of the header", lambda m: with_fields(m, sign=False, version="7")),
    "format": ("state", "format", lambda m: with_fields(m, format="other")),
    "kind": ("state", "kind", lambda m: with_fields(m, kind="patch")),
    "tensors": ("state", "list of tensors", lambda m: with_fields(m, tensors="[]")),
    "mask_digest": ("state", "mask", lambda m: replace(m, mask_digest="0" * 32)),
    "payload_digest": ("state", "payload digest", lambda m: replace(m, payload_digest="0" * 16)),
    "result_digest": ("state", "result digest", lambda m: replace(m, result_digest="0" * 16)),
    "a value": ("state", "payload digest", lambda m: with_tensor(m, "float32.values", flipped)),
    "number of values": ("state", "number of values", lambda m: with_tensor(m, "float32.values", lambda t: t[1:])),
    "base_version": ("update", "base version", lambda m: replace(m, version=9, base_version=8)),
    "base_digest": ("update", "base digest", lambda m: replace(m, base_digest="0" * 16)),
    "a bit": ("update", "number of values", lambda m: with_tensor(m, "float32.bitmap", flipped)),
    "a position": ("mask", "payload digest", lambda m: with_tensor(m, "positions.0", flipped)),
    "order of positions": ("mask", "positions", lambda m: with_positions(m, lambda t: t.flip(0))),
    "range of positions": (
        "mask",
        "positions",
        lambda m: with_positions(m, lambda t: torch.cat([t[:-1], t[-1:] + 99])),
    ),
    "nnz": ("mask", "nnz", lambda m: with_positions(m, lambda t: t[1:])),
    "name": ("mask", "own tensors", lambda m: with_layout(m, name="a.weight")),
    "shape": ("mask", "own tensors", lambda m: with_layout(m, shape=[5, 13])),
    "dtype": ("mask", "own tensors", lambda m: with_layout(m, dtype="bfloat16")),
}


@pytest.mark.parametrize("what", DAMAGES)
def test_a_damaged_message_is_refused(what):
    """By both receivers, before they write; then they accept the undamaged message."""
    kind, reason, damage = DAMAGES[what]
    weights = make_weights("mixed")
    before = clones(weights)
    sender = WeightSender(weights, MaskSet.random(weights, density=0.3), encoding="bitmap")
    messages = {"mask": sender.mask_message()}
    change(weights, sender.mask, 0.1, seed=1)
    messages |= {"update": sender.update().wait(), "state": sender.state_message()}
    copy = clones(weights if kind == "mask" else before)
    independent, receiver = receiver_of(copy), WeightReceiver(copy)
    if kind != "mask":
        for receive in (independent.receive, receiver.receive):
            receive(messages["mask"].to_bytes())
    held = independent.version, clones(copy)
    damaged = damage(messages[kind])
    data = damaged if isinstance(damaged, bytes) else damaged.to_bytes()
    with pytest.raises(ValueError, match=reason):
        independent.receive(data)
    with pytest.raises(WeightSyncError):
        receiver.receive(data)
    assert independent.version == receiver.version == held[0]
    assert same(independent, held[1]) and same_bits(copy, held[1])
    for receive in (independent.receive, receiver.receive):
        receive(messages[kind].to_bytes())
    assert independent.version == receiver.version == (None if kind == "mask" else 1)
    assert kind == "mask" or (same(independent, weights) and same_bits(copy, weights))
