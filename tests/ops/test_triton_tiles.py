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
