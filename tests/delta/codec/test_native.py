"""The native codec writes the bytes of the reference, and reads them back to the bits; the lengths of its patches."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from logged_dtypes import DTYPES
from patch_words import any_words, bits, changed_words, name_of, trained_words
from torch import Tensor

from sparse_opt.bench.delta.data import entropy_bytes
from sparse_opt.delta.codec import Backend, Patch, apply_, encode, sampled_tables, torch_reference
from sparse_opt.delta.codec.tables import Tables
from sparse_opt.delta.codec.words import LANE_ROWS, TILE, word_kind

# Densities with the most that a word moves by: None is to any bits.
CHANGES = [(0.0, None), (0.004, 1), (0.02, 3), (0.1, None), (0.3, 40), (0.7, 1), (1.0, 1), (1.0, None)]


def assert_same_bytes(found: Patch, expected: Patch) -> None:
    assert torch.equal(found.counts, expected.counts)
    parts, expected_parts = found.parts(), expected.parts()
    assert parts.keys() == expected_parts.keys()
    for name, part in expected_parts.items():
        assert parts[name].dtype == part.dtype
        # torch compares no uint16 and no uint32
        assert np.array_equal(parts[name].cpu().numpy(), part.cpu().numpy()), name


def encoded(old: Sequence[Tensor], new: Sequence[Tensor], backend: Backend) -> Patch:
    """With the tables of a sample, which `encode` leaves out where they do not pay."""
    return encode(old, new, tables=sampled_tables(old, new, backend=backend), backend=backend)


def check(place: torch.device, old: Sequence[Tensor], new: Sequence[Tensor]) -> Patch:
    here_old, here_new = [t.to(place) for t in old], [t.to(place) for t in new]
    patch = encoded(here_old, here_new, "native")
    assert_same_bytes(patch, encoded(old, new, "reference"))
    dense = [t.clone() for t in here_old]
    apply_(dense, patch, backend="native")
    for found, expected, untouched, before in zip(dense, new, here_old, old, strict=True):
        assert torch.equal(bits(found), bits(expected))
        assert torch.equal(bits(untouched), bits(before))
    return patch


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_bytes_of_the_reference(place, dtype):
    source = np.random.default_rng(5)
    numels = [700, 0, 1, 33]
    for density, step in CHANGES:
        old = [any_words(source, numel, dtype) for numel in numels]
        new = [changed_words(source, tensor, density, step) for tensor in old]
        sampled = check(place, old, new)
        smaller = encode([t.to(place) for t in old], [t.to(place) for t in new], backend="native")
        assert smaller.nbytes <= sampled.nbytes
        assert_same_bytes(smaller, encode(old, new, backend="reference"))


def test_changes_at_the_ends_of_runs_and_tiles(place):
    source = np.random.default_rng(6)
    old = any_words(source, 700, torch.int16)
    for where in ([0], [255], [256], [-1], [0, -1], range(256), range(255), range(256, 513), range(0, 700, 7)):
        new = old.clone()
        new[list(where)] += 1
        check(place, [old], [new])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=name_of)
def test_the_largest_differences(place, dtype):
    """Between all pairs of words at the ends of the order: signs, zeros, infinities, NaNs."""
    size = dtype.itemsize
    top = 1 << (8 * size - 1)
    special = [0, 1, 2, top // 2 - 1, top // 2, top - 1, top, top + 1, top + top // 2, 2 * top - 1]
    special.append(0x7F80 << 8 * size - 16)
    words = np.array(special, f"u{size}")
    old = torch.from_numpy(np.repeat(words, len(words)).view(f"i{size}")).view(dtype)
    new = torch.from_numpy(np.tile(words, len(words)).view(f"i{size}")).view(dtype)
    check(place, [old], [new])
    check(place, [old[:7]], [new[:7]])


@pytest.mark.parametrize(
    ("dtype", "numel"),
    [
        (torch.bfloat16, 2 * LANE_ROWS + 4001),  # the last row has 2 words of 3
        (torch.float32, LANE_ROWS + 7000),
        (torch.float8_e4m3fn, LANE_ROWS + 1),
        (torch.float64, 5 * LANE_ROWS),
        (torch.bfloat16, 9 * LANE_ROWS - 4),
        (torch.bfloat16, 17 * LANE_ROWS - 9),
        (torch.bfloat16, TILE + 2 * LANE_ROWS),
    ],
    ids=lambda value: str(value).removeprefix("torch."),
)
def test_lanes(place, dtype, numel):
    source = np.random.default_rng(7)
    old = torch.from_numpy(source.standard_normal(numel, dtype=np.float32) * np.float32(0.02)).to(dtype)
    old[::1000] = any_words(source, len(old[::1000]), dtype)
    new = changed_words(source, old, 0.012, 1)
    new[5::997] = any_words(source, len(new[5::997]), dtype)
    patch = check(place, [old], [new])
    assert int(patch.sizes[0]) < 2**31, "the record is not raw"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e5m2, torch.float64, torch.int32], ids=name_of)
def test_samples_of_the_reference(place, dtype):
    source = np.random.default_rng(8)
    # Whole tensors up to 2^20 words, blocks of the others; small ones between, as threads share them out.
    numels = [5, 2**20 + 70_000, 0, 2**20, 3000, 2**20 + 1]
    old = [any_words(source, numel, dtype) for numel in numels]
    new = [changed_words(source, tensor, 0.05, None) for tensor in old]
    kind = word_kind(dtype)
    expected = torch_reference.patch_sample([*map(bits, old)], [*map(bits, new)], kind.is_float, kind.class_shift)
    here = [[bits(t).to(place) for t in tensors] for tensors in (old, new)]
    found = torch.ops.sparse_opt_native.patch_sample(*here, kind.is_float, kind.class_shift)
    one_class = [torch.ops.sparse_opt_native.patch_sample(*here, kind.is_float, kind.bits)]
    one_class.append(torch_reference.patch_sample([*map(bits, old)], [*map(bits, new)], kind.is_float, kind.bits))
    if place.type == "cuda":
        torch.cuda.synchronize(place)
    for mine, reference in [*zip(found, expected, strict=True), *zip(*one_class, strict=True)]:
        assert mine.device.type == "cpu"
        assert torch.equal(mine, reference)


def test_the_records_do_not_depend_on_the_number_of_threads():
    source = np.random.default_rng(9)
    old = [any_words(source, numel, torch.bfloat16) for numel in (3 * 2**20, 700_000, 5)]
    new = [changed_words(source, tensor, 0.02, 2) for tensor in old]
    before = torch.get_num_threads()
    patches = {}
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            patches[threads] = encode(old, new, backend="native")
    finally:
        torch.set_num_threads(before)
    for threads in (2, 3):
        assert_same_bytes(patches[threads], patches[1])


@pytest.mark.parametrize("backend", ["native", "reference"])
def test_encoding_that_advances_the_old_tensors(place, backend):
    source = np.random.default_rng(11)
    # None, a few changes, and more than fit the memory that a GPU has for a record at first.
    for density in (0.0, 0.01, 0.6):
        old = [any_words(source, numel, torch.float32).to(place) for numel in (700, 0, 8192, 1)]
        new = [changed_words(source, tensor.cpu(), density, None).to(place) for tensor in old]
        ahead = [tensor.clone() for tensor in old]
        patch = encode(ahead, new, advance=True, backend=backend)
        assert_same_bytes(patch, encode(old, new, backend=backend))
        for found, expected in zip(ahead, new, strict=True):
            assert torch.equal(bits(found), bits(expected))


def test_bytes_for_each_changed_weight(place):
    old, new = (tensor.to(place) for tensor in trained_words(np.random.default_rng(13), 2**24, scale=3.0e-7))
    patch = encode([old], [new], backend="native")
    dense = old.clone()
    apply_([dense], patch, backend="native")
    assert torch.equal(bits(dense), bits(new))
    changed = int(patch.counts.sum())
    assert changed == int((bits(old) != bits(new)).sum())
    assert changed / old.numel() == pytest.approx(0.012, rel=0.1)
    assert patch.nbytes <= 1.05 * entropy_bytes([old], [new])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.uint8, torch.int64], ids=name_of)
def test_the_tables_of_an_empty_sample(place, dtype):
    """They take no byte of a patch, and code any change, in at most a bit for each word that did not change."""
    source, kind = np.random.default_rng(12), word_kind(dtype)
    old = [any_words(source, numel, dtype) for numel in (3000, 0, 17)]
    tables = Tables.uniform(len(old), kind)
    for density, step in CHANGES:
        new = [changed_words(source, tensor, density, step) for tensor in old]
        patch = encode(old, new, tables=tables, backend="native")
        assert_same_bytes(patch, encode(old, new, tables=tables, backend="reference"))
        assert patch.parts()["tables"].numel() == 0
        changed, raw = int(patch.counts.sum()), sum(tensor.nbytes for tensor in old)
        assert len(patch.records) <= min(raw + 2, 3017 / 8 + (kind.size + 1) * changed + 16)
        dense = [tensor.to(place) for tensor in old]
        apply_(dense, Patch.from_parts(patch.parts(), dtype, patch.numels), backend="native")
        for found, expected in zip(dense, new, strict=True):
            assert torch.equal(bits(found), bits(expected))
