"""The Triton kernels give the same bits with the launch sizes of every GPU, and with any split of tokens."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="needs triton")

from sparse_opt import ops, triton_kernels
from sparse_opt.ops import reference
from sparse_opt.tensors import as_bits
from sparse_opt.triton_kernels import delta_codec, indexed_swap, launch, tile_weight_grad

if not triton_kernels.interpreted() and not torch.cuda.is_available():
    pytest.skip("needs TRITON_INTERPRET=1 or a CUDA GPU", allow_module_level=True)

pytestmark = pytest.mark.triton
DEVICE = torch.device("cpu") if triton_kernels.interpreted() else torch.device("cuda", 0)


def swap() -> list[Tensor]:
    dense, indices, compact = scattered()
    ops.indexed_swap_([dense], compact, indices, [3], [len(indices)], backend="triton")
    return [dense, compact]


def encode_and_apply() -> list[Tensor]:
    old, indices, values = scattered()
    new = old.clone().index_put_((indices.long(),), values)
    found = ops.delta_encode([old, old[:77]], [new, new[:77]], backend="triton")
    ops.delta_apply_([old], indices, values, [0], [len(indices)], backend="triton")
    return [*found, old]


def scattered() -> tuple[Tensor, Tensor, Tensor]:
    """A dense tensor of several programs of any size, and values for some of its elements."""
    generator = torch.Generator().manual_seed(3)
    dense = torch.randn(6000, generator=generator).bfloat16()
    indices = torch.randperm(6000, generator=generator)[:900].sort().values.int()
    values = torch.randn(900, generator=generator).bfloat16()
    return dense.to(DEVICE), indices.to(DEVICE), values.to(DEVICE)


def tiles(size: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(4)
    tokens, rows, columns = 200, 128, 128
    grad_output, x = (torch.randn(tokens, n, generator=generator).bfloat16().to(DEVICE) for n in (rows, columns))
    table = ops.tile_table(torch.arange(rows * columns), (rows, columns), size).to(DEVICE)
    out, sum_sq = torch.full((rows * columns,), torch.nan, device=DEVICE), torch.full((1,), torch.nan, device=DEVICE)
    ops.tile_weight_grad_(
        out, [grad_output], [x], table, [0], [len(table)], tile_size=size, sum_sq=sum_sq, backend="triton"
    )
    return [out, sum_sq]


CALLS = {
    "swap": swap,
    "delta": encode_and_apply,
    "tile64": lambda: tiles(64),
    "tile128": lambda: tiles(128),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_the_sizes_of_every_gpu_give_the_same_bits(call, monkeypatch):
    found = []
    for sizes in (launch.Sizes(), launch.SIZES_OF_SM_90):
        for module in (delta_codec, indexed_swap, tile_weight_grad):
            monkeypatch.setattr(module, "sizes_of", lambda device, sizes=sizes: sizes)
        found.append([tensor.clone() for tensor in call()])
    for tensor, other in zip(*found, strict=True):
        assert tensor.isfinite().all()
        assert torch.equal(as_bits(tensor), as_bits(other))


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

    def draw(*shape: int) -> Tensor:
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
