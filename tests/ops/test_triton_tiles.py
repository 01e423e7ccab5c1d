"""Tiles whose tokens are split between Triton programs: the parts' sums make the same gradient, whatever the parts."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="needs triton")

from sparse_opt import ops, triton_kernels
from sparse_opt.ops import reference
from sparse_opt.triton_kernels import tile_weight_grad

if not triton_kernels.interpreted() and not torch.cuda.is_available():
    pytest.skip("needs TRITON_INTERPRET=1 or a CUDA GPU", allow_module_level=True)

pytestmark = pytest.mark.triton
DEVICE = torch.device("cpu" if triton_kernels.interpreted() else "cuda")
SHAPES = ((130, 70), (64, 128))


@pytest.mark.parametrize("matrices", [1, 2], ids=["one", "list"])
@pytest.mark.parametrize(("tile_size", "dtype"), [(64, torch.bfloat16), (128, torch.float32)], ids=["64", "128"])
def test_parts_make_the_same_gradient(
    monkeypatch: pytest.MonkeyPatch, tile_size: int, dtype: torch.dtype, matrices: int
) -> None:
    """Small integers, whose products and sums are exact in fp32 in any order: every bit must be the reference's."""
    monkeypatch.setattr(tile_weight_grad, "LEAST_TOKENS", 50)
    monkeypatch.setattr(tile_weight_grad, "WHOLE_BELOW", 0)
    tokens, shapes = 170, SHAPES[:matrices]
    generator = torch.Generator().manual_seed(tile_size)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randint(-4, 5, shape, generator=generator).to(DEVICE, dtype)

    grad_outputs, inputs = [draw(tokens, rows) for rows, _ in shapes], [draw(tokens, columns) for _, columns in shapes]
    tables, slots = [], 0
    for rows, columns in shapes:
        tables.append(ops.tile_table(torch.arange(rows * columns), (rows, columns), tile_size, first_slot=slots))
        slots += rows * columns
    ends = torch.tensor([len(t) for t in tables]).cumsum(0).tolist()
    starts, tiles = [0, *ends[:-1]], torch.cat(tables).to(DEVICE)
    assert tile_weight_grad._splits(ends[-1], tokens, tile_size, DEVICE) == 3
    made = []
    for op in (reference.tile_weight_grad_, triton_kernels.tile_weight_grad_):
        out = torch.ones(slots + 5, device=DEVICE)
        sum_sq = torch.full((matrices,), torch.nan, device=DEVICE)
        found_inf = torch.zeros(1, device=DEVICE)
        scale = torch.tensor([0.5], device=DEVICE)
        op(
            out,
            grad_outputs,
            inputs,
            tiles,
            starts,
            ends,
            tile_size=tile_size,
            scale=scale,
            accumulate=True,
            sum_sq=sum_sq,
            found_inf=found_inf,
        )
        made.append((out, sum_sq, found_inf))
    (expected, _, _), (out, sum_sq, found_inf) = made
    assert torch.equal(out, expected)
    assert found_inf.item() == 0
    squares = [expected[:9100].double().square().sum(), expected[9100:-5].double().square().sum()][:matrices]
    # Positive terms, so each addition rounds by 2^-24 of the sum at most. The longest chain, where everything is added
    # one by one: 32 columns, 4 parts, 16 rows, 48 bands (6 tiles of 64).
    torch.testing.assert_close(sum_sq.double(), torch.stack(squares), rtol=100 * 2.0**-24, atol=0)


def test_parts_of_the_tokens_of_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tile_weight_grad, "LEAST_TOKENS", 20)
    monkeypatch.setattr(tile_weight_grad, "WHOLE_BELOW", 0)
    generator = torch.Generator().manual_seed(0)
    grad_output, x = (torch.randint(-4, 5, (170, n), generator=generator).to(DEVICE, torch.bfloat16) for n in (64, 70))
    offsets = torch.tensor([150, 150, 163], dtype=torch.int32, device=DEVICE)  # the last 7 tokens are of no expert
    tiles = ops.tile_table(torch.arange(3 * 64 * 70), (3 * 64, 70), 64).to(DEVICE)
    assert tile_weight_grad._splits(len(tiles), 170 // 3, 64, DEVICE) == 2
    made = []
    for op in (reference.tile_weight_grad_, triton_kernels.tile_weight_grad_):
        made.append(torch.ones(3 * 64 * 70, device=DEVICE))
        op(made[-1], [grad_output], [x], tiles, [0], [len(tiles)], tile_size=64, token_offsets=offsets)
    assert torch.equal(*made)


def test_splits_keep_to_their_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tile_weight_grad, "_multiprocessors", lambda device: 100)
    many = 1 << 20
    cases = {  # tile size, active tiles, tokens -> splits
        (128, 1, many): tile_weight_grad.MOST_SPLITS,
        (128, 50, many): 2,
        (128, 51, many): 3,  # two programs on a multiprocessor
        (128, 66, many): 3,
        (128, 67, many): 2,
        (128, 100, many): 2,
        (128, 101, many): 3,  # a round and a half
        (128, 133, many): 3,
        (128, 134, many): 1,
        (128, 51, 6143): 1,
        (128, 10**6, many): 1,
        (128, 1, 2047): 1,
        (128, 1, 2048): 4,
        (64, 1, many): tile_weight_grad.MOST_SPLITS,
        (64, 100, many): 3,
        (64, 150, many): 2,
        (64, 151, many): 1,
        (64, 1, 2047): 1,
        (64, 1, 2048): 4,
        (64, 1, 0): 1,
    }
    found = {case: tile_weight_grad._splits(case[1], case[2], case[0], DEVICE) for case in cases}
    assert found == cases
    monkeypatch.setattr(tile_weight_grad, "SCRATCH_BYTES", 2 * 60 * 4 * 128**2)
    assert tile_weight_grad._splits(60, many, 128, DEVICE) == 2
