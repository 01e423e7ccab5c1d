"""Lists longer than the tables that CUDA kernels take as arguments (8 and 320 tensors)."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from cases import assert_same_bits, make, run_step

from sparse_opt import ops
from sparse_opt.ops import STEP_OPS


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
