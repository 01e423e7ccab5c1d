"""Tensors past 2^31 elements, on hardware, against small twins; and lists longer than the tables of CUDA kernels."""

import itertools
import math

import pytest
import torch
from cases import assert_same_bits, bits_of, make, run_step

from sparse_opt import ops
from sparse_opt.ops import STEP_OPS

NUMEL = 2**32 + 5  # beyond 2^32 too
NEAR = (0, 2**31 - 2, 2**32 - 2)


@pytest.fixture
def large(place):
    device, backend = place
    if device != "cuda":
        pytest.skip("needs a CUDA device with 40 GB free")
    if torch.cuda.mem_get_info()[0] < 40 * 2**30:
        pytest.skip(f"needs 40 GB free on the CUDA device, {torch.cuda.mem_get_info()[0] / 2**30:.0f} are")
    positions = torch.cat([torch.arange(n, n + 4) for n in NEAR]).to(device)
    tensor = torch.zeros(NUMEL, dtype=torch.bfloat16, device=device)
    values = torch.randn(positions.numel(), device=device).bfloat16()
    tensor[positions] = values
    yield backend, tensor, positions, values
    del tensor
    torch.cuda.empty_cache()


@pytest.mark.gpu
@pytest.mark.parametrize("run_length", [1, 4])
def test_step_gather_and_swap(large, run_length):
    backend, tensor, positions, values = large
    n, device = positions.numel(), tensor.device
    small, inner = values.clone(), torch.arange(n, device=device)
    results = []
    for params, elements, name in (([tensor], positions, backend), ([small], inner, "reference")):
        indices, how = elements[::run_length].contiguous(), {"run_length": run_length, "backend": name}
        moments = [torch.zeros(n, device=device) for _ in range(2)]
        gathered, compact = torch.empty(n, device=device), torch.ones(n, dtype=torch.bfloat16, device=device)
        one = torch.ones(1, device=device)
        ops.masked_grad_gather_(gathered, params, indices, [0], [n], **how)
        for op in STEP_OPS.values():
            states = moments[: len(op.states)]
            getattr(ops, op.name)(params, indices, [0], [n], *states, 0.01 * one, one, dense_grads=params, **how)
        states, weights = moments[:2], params[0][elements].clone()
        ops.indexed_adamw_(params, indices, [0], [n], *states, 0.01 * one, one, grad=gathered, weights=weights, **how)
        assert torch.equal(params[0][elements], weights)
        ops.indexed_swap_(params, compact, indices, [0], [n], **how)
        results.append([gathered, *moments, compact])
    for got, expected in zip(*results, strict=True):
        assert torch.equal(got, expected)
    assert (tensor[positions] == 1).all()
    tensor[positions] = 0
    assert not tensor.any()


@pytest.mark.gpu
def test_delta(large):
    backend, tensor, positions, values = large
    old = torch.zeros_like(tensor)
    indices, changed, counts = ops.delta_encode([old], [tensor], backend=backend)
    kept = bits_of(values) != 0
    assert indices.dtype == torch.int64 and counts.tolist() == [int(kept.sum())]
    assert torch.equal(indices, positions[kept])
    assert torch.equal(bits_of(changed), bits_of(values[kept]))
    ops.delta_apply_([old], indices, changed, [0], [indices.numel()], backend=backend)
    assert torch.equal(bits_of(old), bits_of(tensor))


@pytest.fixture
def gpu_place(place):
    if place[0] != "cuda":
        pytest.skip("needs a CUDA device")
    return place


@pytest.mark.gpu
@pytest.mark.parametrize("n_tensors", [1, 900])
def test_changes_that_are_other_than_before(gpu_place, n_tensors):
    """The CUDA backend allocates for the number of changes of the previous call, and must detect that it is too low."""
    device, backend = gpu_place
    numel = 2**25 // n_tensors
    old = torch.randint(-(2**15), 2**15, (n_tensors * numel,), dtype=torch.int16, device=device)
    olds = [old[i * numel : (i + 1) * numel] for i in range(n_tensors)]
    for share in (0.01, 0.01, 0.0105, 0.2, 0.01, 0.0, 0.0, 1.0, 1.0, 0.5):
        new = old + (torch.rand(old.numel(), device=device) < share).to(torch.int16)
        news = [new[i * numel : (i + 1) * numel] for i in range(n_tensors)]
        free = torch.cuda.memory_allocated()
        found = ops.delta_encode(olds, news, backend=backend)
        held = torch.cuda.memory_allocated() - free
        assert held <= 1.4 * 6 * found[0].numel() + 2**22, share  # an estimate that was too high is not kept
        for got, expected in zip(found, ops.delta_encode(olds, news, backend="reference"), strict=True):
            assert torch.equal(got, expected), share
        del found, got, expected


@pytest.mark.gpu
@pytest.mark.parametrize("n_tensors", [1, 900])
def test_changes_that_a_sample_misses(gpu_place, n_tensors):
    """The CUDA backend allocates for an estimate from every 512th block, and must detect that it is too low."""
    device, backend = gpu_place
    numel = 2**27 // n_tensors
    old = torch.zeros(n_tensors * numel, dtype=torch.bfloat16, device=device)
    new = old.clone()
    new.view(torch.int16)[torch.arange(new.numel(), device=device) // 8192 % 512 > 1] = 1  # all except the sampled ones
    olds, news = ([t[i * numel : (i + 1) * numel] for i in range(n_tensors)] for t in (old, new))
    found = ops.delta_encode(olds, news, backend=backend)
    reference = ops.delta_encode(olds, news, backend="reference")
    for got, expected in zip(found, reference, strict=True):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("count", [9, 321, 700])
def test_long_lists(count, place):
    device, backend = torch.device(place[0]), place[1]
    if backend == "triton" and device.type == "cpu" and count > 9:
        pytest.skip("the interpreter takes a minute for this; Triton keeps no tables of fixed length")
    case = make(device, shapes=[(1 + i % 37,) for i in range(count)], mask="ragged")
    results = []
    for name in ("reference", backend):
        c = case.clone()
        sum_sq = torch.full((count,), float("nan"), device=device)
        ops.masked_grad_gather_(c.grad, c.dense_grads, c.indices, c.starts, c.ends, sum_sq=sum_sq, backend=name)
        for op in STEP_OPS:
            run_step(op, c, name, compact=False)  # steps differ from tensor to tensor
            c.steps += 1
        run_step("indexed_sgd_", c, name, momentum=0.0)
        run_step("indexed_adamw_", c, name, weights=c.taken())
        values = torch.randn(c.indices.numel(), generator=torch.Generator().manual_seed(1)).to(device)
        ops.indexed_swap_(c.params, values, c.indices, c.starts, c.ends, backend=name)
        encoded = ops.delta_encode(case.params, c.params, backend=name)
        results.append((c, sum_sq, values, *encoded))
    expected, got = results
    assert_same_bits(got[0], expected[0])
    # Sums of at most 8 squares, in another order.
    torch.testing.assert_close(got[1], expected[1], rtol=8 * 2**-23, atol=0)
    for a, b in zip(got[2:], expected[2:], strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("count", [9, 321, 700])
def test_long_lists_of_tiles(count, place):
    """Each matrix one tile, at most 37 x 5, but for every fourth, which has none."""
    device, backend = place
    if backend == "triton" and device == "cpu" and count > 9:
        pytest.skip("the interpreter is slow, and nine matrices go the same way")
    generator = torch.Generator().manual_seed(0)

    def integers(width: int) -> torch.Tensor:  # their sums are exact in any order
        return torch.randint(-8, 9, (3, width), generator=generator).float().to(device)

    grads, inputs = ([integers(1 + i % n) for i in range(count)] for n in (37, 5))
    shapes = [(g.shape[1], x.shape[1]) for g, x in zip(grads, inputs, strict=True)]
    ends = [i - i // 4 for i in range(1, count + 1)]
    starts = [0, *ends[:-1]]
    active = [i for i in range(count) if ends[i] > starts[i]]
    assert 0 < len(active) < count
    first_slots = [0, *itertools.accumulate(math.prod(shapes[i]) for i in active)]
    tiles = torch.tensor([[0, 0, slot, shapes[i][1]] for i, slot in zip(active, first_slots[:-1], strict=True)])
    results = []
    for name in ("reference", backend):
        out, sum_sq = (torch.full((n,), math.nan, device=device) for n in (first_slots[-1], count))
        ops.tile_weight_grad_(
            out, grads, inputs, tiles.to(device), starts, ends, tile_size=64, sum_sq=sum_sq, backend=name
        )
        results.append((out, sum_sq))
    expected, got = results
    assert torch.equal(got[0], expected[0]) and got[0].isfinite().all()
    assert torch.equal(got[1], expected[1])  # integers below 2^24, too
