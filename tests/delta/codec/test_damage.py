"""The native decoder refuses what the reference refuses, and reads everything else to the same words."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from patch_words import any_words, as_op_arguments, bits, changed_words, damaged, name_of, with_record
from torch import Tensor

from sparse_opt.delta.codec import PatchError, apply_, encode, sampled_tables, torch_reference
from sparse_opt.delta.codec.words import TILE, first_tiles


def words_of_tiles(tensors: list[Tensor]) -> list[Tensor]:
    return [part for tensor in tensors if tensor.numel() for part in bits(tensor).split(TILE)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e5m2, torch.int64], ids=name_of)
def test_the_verdict_of_the_reference(place, dtype):
    source = np.random.default_rng(14)
    numels = [150, 0, 40]
    refused = 0
    for density, step in [(0.02, 2), (0.05, None), (0.4, 1), (1.0, None)]:
        old = [any_words(source, numel, dtype) for numel in numels]
        new = [changed_words(source, tensor, density, step) for tensor in old]
        sound = encode(old, new, tables=sampled_tables(old, new), backend="reference")
        for _ in range(60):
            patch, tile = damaged(source, sound)
            expected, found = [bits(t).clone() for t in old], [bits(t).clone().to(place) for t in old]
            reference = int(torch_reference.patch_apply_(expected, *as_op_arguments(patch, torch.device("cpu"))))
            native = int(torch.ops.sparse_opt_native.patch_apply_(found, *as_op_arguments(patch, place)))
            assert native == reference
            is_bad = native < len(patch.sizes)
            refused += is_bad
            # The reference stops at a damaged tile, the native decoder reads all others.
            expected = words_of_tiles(new if is_bad else expected)
            for i, (mine, theirs) in enumerate(zip(words_of_tiles(found), expected, strict=True)):
                assert torch.equal(mine, theirs) or (is_bad and i == tile)
    assert 40 < refused < 220, "some of both"


def test_the_lowest_damaged_tile_is_named(place):
    source = np.random.default_rng(15)
    numels = [500, 300, 200]
    old = [any_words(source, numel, torch.bfloat16).to(place) for numel in numels]
    new = [changed_words(source, tensor.cpu(), 0.05, 2).to(place) for tensor in old]
    sound = encode(old, new, tables=sampled_tables(old, new), backend="native")
    patch = replace(sound, records=sound.records.cpu(), sizes=sound.sizes.cpu())
    last = len(patch.sizes) - 1
    for tile in (last, 1):  # the first one stays damaged
        patch = with_record(patch, tile, np.full(4, 255, np.uint8), False)
        tensor = int(np.searchsorted(first_tiles(numels), tile, side="right")) - 1
        with pytest.raises(PatchError, match=f"of tensor {tensor} is damaged"):
            apply_([t.clone() for t in old], patch, backend="native")


def test_offsets_that_fit_nothing(place):
    source = np.random.default_rng(16)
    numels = [500, 300]
    old = [any_words(source, numel, torch.bfloat16) for numel in numels]
    new = [changed_words(source, tensor, 0.05, 2) for tensor in old]
    patch = encode(old, new, tables=sampled_tables(old, new), backend="reference")
    offsets = patch.offsets()
    shifted = offsets + len(patch.records)
    past_the_end = offsets + (2**63 - 4)  # all but the first have become negative
    for bad in (
        -offsets - 4,
        shifted,
        offsets.flip(0),
        offsets + 1,
        offsets + 2**62,
        offsets.clamp(max=4),
        past_the_end,
    ):
        found = [bits(t).clone().to(place) for t in old]
        # Tile 0 is the first tile whose record is misplaced, also if only its end is.
        assert int(torch.ops.sparse_opt_native.patch_apply_(found, *as_op_arguments(patch, place, bad))) == 0


def test_tensors_that_the_patch_is_not_for():
    old = [torch.zeros(10), torch.zeros(7)]
    patch = encode(
        old,
        [tensor + 1 for tensor in old],
        tables=sampled_tables(old, [tensor + 1 for tensor in old]),
        backend="reference",
    )
    for dense, message in [
        (old[:1], "dense holds 1 tensors, expected 2"),
        ([old[0].half(), old[1]], r"dense\[0\] is torch.float16 of 10 elements, expected torch.float32 of 10"),
    ]:
        with pytest.raises(PatchError, match=message):
            apply_(dense, patch)


def test_tables_that_fit_nothing():
    """Values from a file are checked earlier; invalid values passed to the op are damage, or an error when encoding."""
    source = np.random.default_rng(17)
    old = any_words(source, 3000, torch.bfloat16)
    new = changed_words(source, old, 0.05, 2)
    patch = encode([old], [new], tables=sampled_tables([old], [new]), backend="native")
    tables = patch.tables
    values = tables.values.copy()
    values[0, 0] += 1
    native = torch.ops.sparse_opt_native
    for bad in (
        replace(tables, row_of=tables.row_of + np.uint16(len(tables.rows))),
        replace(tables, class_table=np.full_like(tables.class_table, len(tables.values))),
        replace(tables, values=values),
        replace(tables, rows=np.zeros_like(tables.rows)),
    ):
        arguments = as_op_arguments(replace(patch, tables=bad), torch.device("cpu"))
        assert int(native.patch_apply_([bits(old).clone()], *arguments)) == 0
        with pytest.raises(ValueError, match="row_of|class_table|values|rows"):
            native.patch_encode([bits(old)], [bits(new)], *arguments[3:])


def unaligned(tensor: Tensor) -> Tensor:
    """The same numbers, one byte after an aligned address, as in a mapped file."""
    data = torch.zeros(tensor.nbytes + 17, dtype=torch.uint8)
    found = torch.from_numpy(np.frombuffer(data.numpy()[1 : 1 + tensor.nbytes].data, dtype=tensor.numpy().dtype))
    found = found.view(tensor.shape).copy_(tensor)
    assert found.data_ptr() % tensor.element_size() == 1
    return found


def test_arguments_that_are_not_aligned():
    source = np.random.default_rng(19)
    old = any_words(source, 9000, torch.float32)
    new = changed_words(source, old, 0.05, 2)
    patch = encode([old], [new], tables=sampled_tables([old], [new]), backend="native")
    cpu, native = torch.device("cpu"), torch.ops.sparse_opt_native
    arguments = as_op_arguments(patch, cpu)
    with pytest.raises(ValueError, match="offsets begins 1 bytes past a multiple of 8, expected an aligned"):
        native.patch_apply_([bits(old).clone()], arguments[0], unaligned(arguments[1]), *arguments[2:])
    odd = unaligned(bits(old))
    for call in (
        lambda: native.patch_apply_([bits(old).clone(), odd], *arguments),
        lambda: native.patch_sample([bits(old)] * 2, [bits(new), odd], True, 23),
        lambda: native.patch_encode([bits(old)] * 2, [bits(new), odd], *arguments[3:]),
    ):
        with pytest.raises(ValueError, match=r"(dense|old|new)\[1\] begins 1 bytes past a multiple of 4"):
            call()
