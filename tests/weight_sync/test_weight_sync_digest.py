"""The digests and bitmaps of messages, computed a second time with numpy."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from samples import change, make_weights

from sparse_opt import MaskSet
from sparse_opt.masks.patterns import PATTERNS
from sparse_opt.weight_sync import WeightSender
from sparse_opt.weight_sync.index import choose

UNSIGNED = {2: np.uint16, 4: np.uint32}


def mixed(numbers: np.ndarray, bits: np.ndarray) -> int:
    x = numbers.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    x += bits.astype(np.uint64) * np.uint64(0xD1342543DE82EF95) + np.uint64(0x2545F4914F6CDD1D)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    return int(x.sum(dtype=np.uint64))


def bits_of(tensor: torch.Tensor) -> np.ndarray:
    integers = tensor.cpu().view(-1).view({2: torch.int16, 4: torch.int32}[tensor.element_size()]).numpy()
    return integers.view(UNSIGNED[tensor.element_size()])


def active_bits(weights: dict[str, torch.Tensor], mask: MaskSet) -> dict[str, np.ndarray]:
    """Dtype -> the bits of its active elements in the order of messages."""
    groups: dict[str, list[np.ndarray]] = {}
    for name in sorted(mask.names):
        if mask[name].numel():
            dtype = str(weights[name].dtype).removeprefix("torch.")
            groups.setdefault(dtype, []).append(bits_of(weights[name])[mask[name].numpy()])
    return {dtype: np.concatenate(groups[dtype]) for dtype in sorted(groups)}


def digest(groups: dict[str, np.ndarray]) -> str:
    total = first = 0
    for bits in groups.values():
        total += mixed(np.arange(first, first + bits.size), bits)
        first += bits.size
    return f"{total % 2**64:016x}"


def test_known_sums():
    """The sum in numpy, with which messages are compared, against Python's integers."""
    numbers, bits = [0, 1, 2**33, 5], [0, 0xFFFFFFFF, 0x3F80, 0x8000]
    expected = sum(map(mix_of_integers, numbers, bits)) % 2**64
    assert mixed(np.array(numbers), np.array(bits)) == expected


def mix_of_integers(number: int, bits: int) -> int:
    x = (number * 0x9E3779B97F4A7C15 + bits * 0xD1342543DE82EF95 + 0x2545F4914F6CDD1D) % 2**64
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
    return x ^ (x >> 31)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_messages(place, pattern):
    device, backend = place
    weights = make_weights("mixed", device)
    mask = MaskSet.random(weights, density=0.3, pattern=pattern)
    sender = WeightSender(weights, mask, backend=backend, encoding="bitmap")
    old = active_bits(weights, mask)
    first = sender.mask_message()
    assert first.result_digest == digest(old) and first.mask_digest == mask.digest
    positions = [t.numpy() for t in first.tensors.values()]
    numbers = np.concatenate(positions).astype(np.uint64)
    assert first.payload_digest == f"{mixed(np.arange(numbers.size), numbers):016x}"
    layout = json.loads(first.layout)
    assert [t["name"] for t in layout["tensors"]] == sorted(weights) and layout["pattern"] == pattern
    change(weights, mask, 0.2, seed=1)
    new, message = active_bits(weights, mask), sender.update().wait()
    assert (message.base_digest, message.result_digest) == (digest(old), digest(new))
    payload = begin = 0
    for dtype, values in new.items():
        changed = values != old[dtype]
        bitmap = np.packbits(changed, bitorder="little")
        expected = np.zeros(-(-values.size // 64) * 8, np.uint8)
        expected[: bitmap.size] = bitmap
        if changed.any():
            assert np.array_equal(message.tensors[f"{dtype}.bitmap"].cpu().numpy(), expected)
            assert np.array_equal(bits_of(message.tensors[f"{dtype}.changed"]), values[changed])
        payload += mixed(begin + changed.nonzero()[0], values[changed])
        begin += values.size
    assert message.payload_digest == f"{payload % 2**64:016x}"
    state = sender.state_message()
    assert state.result_digest == state.payload_digest == digest(new)
    assert {dtype: bits_of(state.tensors[f"{dtype}.values"]).tolist() for dtype in new} == {
        dtype: values.tolist() for dtype, values in new.items()
    }


@pytest.mark.parametrize("n", [1, 63, 2048, 5000])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_changed_values_up_to_a_capacity(place, n, dtype):
    """On a GPU the sender packs changed values before it knows their number."""
    device, backend = place[0], choose(torch.device(place[0]), place[1])
    generator = torch.Generator().manual_seed(0)
    old = torch.randn(n, generator=generator).to(device, dtype)
    changed = torch.rand(n, generator=generator).to(device) < 0.3
    new = torch.where(changed, -old, old)
    for capacity in (0, int(changed.sum()) // 2, n):
        bitmap, totals, packed = backend.compare(old, new, 7, capacity)
        count = int(totals[2])
        assert count == int(changed.sum()) and packed.numel() <= capacity
        known = min(count, capacity)
        assert torch.equal(packed[:known], new[changed][:known])
        assert torch.equal(backend.select(new, bitmap, count), new[changed])
        assert int(totals[0]) % 2**64 == mixed(np.arange(7, 7 + n), bits_of(new))
