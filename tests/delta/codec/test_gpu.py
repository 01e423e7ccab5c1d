"""Cases specific to GPUs: several launches, addresses past 2^31, alignment, streams, other devices, out of memory.

The patches of the CPU, which are the reference's, are what those of the GPU are compared with.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from patch_words import any_words, as_op_arguments, bits, changed_words, damaged, name_of, with_record
from torch import Tensor

from sparse_opt import backends
from sparse_opt.delta.codec import Patch, PatchError, apply_, encode
from sparse_opt.delta.codec.words import LANE_ROWS, TILE, first_tiles
from sparse_opt.delta.digest import StateDigest
from sparse_opt.tensors import as_bits

pytestmark = pytest.mark.gpu

# One launch takes 320 tensors. Some without elements at the ends of launches, and several next to each other.
MANY = 700
EMPTY = {0, 1, 318, 319, 320, 321, 500, 639, 640, 698, 699}
DTYPES = [torch.bfloat16, torch.float32, torch.uint8, torch.int64]


@pytest.fixture
def gpu() -> torch.device:
    if cause := backends.why_unavailable("cuda", "cuda"):
        pytest.skip(f"needs the native backend of cuda: {cause}")
    return torch.device("cuda", torch.cuda.current_device())


def assert_same_patch(found: Patch, expected: Patch) -> None:
    assert found.numels == expected.numels
    assert torch.equal(found.counts, expected.counts)
    parts = found.parts()
    for name, part in expected.parts().items():
        assert parts[name].dtype == part.dtype
        assert np.array_equal(parts[name].cpu().numpy(), part.numpy()), name
    assert np.array_equal(found.sizes.cpu().numpy(), expected.sizes.numpy())


def assert_same_words(found: list[Tensor], expected: list[Tensor]) -> None:
    for i, (a, b) in enumerate(zip(found, expected, strict=True)):
        assert torch.equal(bits(a), bits(b)), i


def on(device: torch.device, tensors: list[Tensor]) -> list[Tensor]:
    return [tensor.to(device) for tensor in tensors]


def many_tensors(source: np.random.Generator, dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
    """Small ones and some of several tiles; unchanged, changed in part, and changed so that a GPU keeps no record."""
    numels = [0 if i in EMPTY else int(source.integers(1, 300)) for i in range(MANY)]
    for i in (2, 317, 322, 638, 641, 697):
        numels[i] = TILE + int(source.integers(LANE_ROWS))
    old = [any_words(source, numel, dtype) for numel in numels]
    ways = [(0.0, None), (0.02, 2), (0.3, None), (1.0, None)]
    return old, [changed_words(source, tensor, *ways[i % 4]) for i, tensor in enumerate(old)]


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_more_tensors_than_one_launch_takes(gpu, dtype):
    old, new = many_tensors(np.random.default_rng(20), dtype)
    expected = encode(old, new, backend="native")
    here_old, here_new = on(gpu, old), on(gpu, new)
    patch = encode(here_old, here_new, backend="native")
    assert_same_patch(patch, expected)
    assert_same_words(here_old, old)
    dense = on(gpu, old)
    apply_(dense, patch, backend="native")
    assert_same_words(dense, new)
    assert_same_patch(encode(here_old, here_new, advance=True, backend="native"), expected)
    assert_same_words(here_old, new)
    assert_same_words(here_new, new)


def test_a_damaged_tile_of_another_launch_is_named(gpu):
    old, new = many_tensors(np.random.default_rng(21), torch.bfloat16)
    sound = encode(old, new, backend="native")
    firsts = first_tiles(sound.numels)
    for tensor in (641, 322, 2):
        tile = firsts[tensor]
        patch = with_record(sound, tile, np.full(8, 255, np.uint8), False)
        dense = on(gpu, old)
        with pytest.raises(PatchError, match=f"tile 0 of tensor {tensor} is damaged"):
            apply_(dense, patch, backend="native")
        # All other tiles are decoded.
        for i, (found, expected) in enumerate(zip(dense, new, strict=True)):
            begin = TILE if i == tensor else 0
            assert torch.equal(bits(found)[begin:], bits(expected)[begin:]), i


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_tensors_of_any_alignment(gpu, dtype):
    source = np.random.default_rng(22)
    numel, capacity = 2 * 8192 + 77, 3 * 8192
    offsets = [(0, 1), (1, 0), (1, 1), (3, 2), (7, 7), (15, 9)]
    old = [any_words(source, numel, dtype) for _ in offsets]
    for density, step in [(0.01, 2), (0.5, None)]:
        new = [changed_words(source, tensor, density, step) for tensor in old]
        memory = [tuple(torch.zeros(capacity, dtype=dtype, device=gpu) for _ in range(2)) for _ in old]
        here_old = [whole[at : at + numel] for (whole, _), (at, _) in zip(memory, offsets, strict=True)]
        here_new = [whole[at : at + numel] for (_, whole), (_, at) in zip(memory, offsets, strict=True)]
        for target, words in zip([*here_old, *here_new], [*old, *new], strict=True):
            target.copy_(words)
        expected = encode(old, new, backend="native")
        patch = encode(here_old, here_new, backend="native")
        assert_same_patch(patch, expected)
        if density < 0.1:
            apply_(here_old, patch, backend="native")
        else:
            assert_same_patch(encode(here_old, here_new, advance=True, backend="native"), expected)
        assert_same_words(here_old, new)
        for (whole, _), (at, _) in zip(memory, offsets, strict=True):
            around = torch.cat([bits(whole)[:at], bits(whole)[at + numel :]])
            assert not around.any(), "memory next to a tensor is not written"


@pytest.mark.slow
def test_a_tensor_of_more_than_2_to_the_31_words(gpu):
    numel = 2**31 + 3 * 8192 + 5
    old = torch.zeros(numel, dtype=torch.uint8, device=gpu)
    new = old.clone()
    new[:: 2**20 + 7] = 3
    new[2**31 - 70 : 2**31 + 70] = 1
    new[-9000:] = 255
    changed = int((new != 0).sum())
    patch = encode([old], [new], backend="native")
    assert patch.counts.tolist() == [changed]
    assert_same_patch(patch, encode([old.cpu()], [new.cpu()], backend="native"))
    apply_([old], patch, backend="native")
    assert torch.equal(old, new)


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_damaged_records_stay_within_the_tensors(gpu, dtype):
    """Any bytes for a record, and small damage: nothing outside the tensors is written, and other tiles are read."""
    source = np.random.default_rng(23)
    numels = [2 * 8192 + 300, 0, 700, 8192]
    starts = [64, 24_000, 25_000, 26_000]
    refused = 0
    for density, step in [(0.02, 2), (0.4, None)]:
        old = [any_words(source, numel, dtype) for numel in numels]
        new = [changed_words(source, tensor, density, step) for tensor in old]
        sound = encode(old, new, backend="native")
        for _ in range(40):
            patch, tile = damaged(source, sound)
            if source.integers(3) == 0:
                begin, end = patch.offsets()[[tile, tile + 1]].tolist()
                patch = replace(patch, records=patch.records.clone())
                patch.records[begin:end] = torch.from_numpy(source.integers(0, 256, end - begin, dtype=np.uint8))
            memory = torch.zeros(40_000, dtype=dtype, device=gpu)
            dense = [memory[at : at + numel] for at, numel in zip(starts, numels, strict=True)]
            for target, words in zip(dense, old, strict=True):
                target.copy_(words)
            op = torch.ops.sparse_opt_native.patch_apply_
            bad = int(op([as_bits(t) for t in dense], *as_op_arguments(patch, gpu)))
            host = [bits(t).clone() for t in old]
            assert bad == int(op(host, *as_op_arguments(patch, torch.device("cpu"))))
            refused += bad < len(sound.sizes)
            firsts = first_tiles(numels)
            for i, (found, mine) in enumerate(zip(dense, host, strict=True)):
                tiles = zip(bits(found).split(TILE), mine.split(TILE), strict=True)
                for k, (a, b) in enumerate(tiles):
                    assert (bad == tile == firsts[i] + k) or torch.equal(a, b)
            outside_bits = bits(memory).clone()
            for at, numel in zip(starts, numels, strict=True):
                outside_bits[at : at + numel] = 0
            assert not outside_bits.any()
    assert 10 < refused < 80, "some of both"


def test_the_current_stream_is_followed(gpu):
    source = np.random.default_rng(24)
    old = any_words(source, 300_000, torch.bfloat16)
    steps = [changed_words(source, old, density, 2) for density in (0.01, 0.2)]
    expected = [encode([old], [new], backend="native") for new in steps]
    here, here_old = on(gpu, steps), old.to(gpu)
    streams = [torch.cuda.Stream(gpu) for _ in steps]
    torch.cuda.synchronize()
    found = []
    for _ in range(10):
        for stream, words, new, patch_of_cpu in zip(streams, here, steps, expected, strict=True):
            with torch.cuda.stream(stream):
                before, after = torch.empty_like(words), torch.empty_like(words)
                torch.cuda._sleep(2_000_000)  # a read that is too early finds memory that is not filled yet
                before.copy_(here_old)
                after.copy_(words)
                patch = encode([before], [after], backend="native")
                dense = before.clone()
                apply_([dense], patch, backend="native", check=False)
                moved = encode([before], [after], advance=True, backend="native")
                left = encode([before], [after], backend="native")
            found.append((patch, moved, left, dense, before, new, patch_of_cpu))
    torch.cuda.synchronize()
    for patch, moved, left, dense, before, new, patch_of_cpu in found:
        assert_same_patch(patch, patch_of_cpu)
        assert_same_patch(moved, patch_of_cpu)
        assert len(left.records) == 0
        assert_same_words([dense, before], [new, new])


def test_tensors_on_another_device(gpu):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    other = torch.device("cuda", (gpu.index + 1) % torch.cuda.device_count())
    source = np.random.default_rng(25)
    old = [any_words(source, numel, torch.float32) for numel in (50_000, 0, 3)]
    new = [changed_words(source, tensor, 0.2, None) for tensor in old]
    expected = encode(old, new, backend="native")
    there_old, there_new = on(other, old), on(other, new)
    patch = encode(there_old, there_new, backend="native")
    assert patch.records.device == other
    assert_same_patch(patch, expected)
    dense, here = [tensor.clone() for tensor in there_old], on(gpu, old)
    apply_(dense, patch, backend="native")
    apply_(here, patch, backend="native")  # the patch goes over
    assert_same_words([*dense, *here], [*new, *new])
    assert StateDigest.start(there_new).result() == StateDigest.start(new).result()
    assert_same_patch(encode(there_old, there_new, advance=True, backend="native"), expected)
    assert_same_words(there_old, new)
    assert torch.cuda.current_device() == gpu.index
    with pytest.raises(ValueError, match=r"is on cuda"):
        torch.ops.sparse_opt_native.patch_encode(
            [there_old[0], here[0]], [there_new[0], here[0]], *as_op_arguments(patch, other)[3:]
        )
