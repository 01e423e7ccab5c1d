"""Weight gradients by tiles and dense ones: calls, checks, and the bytes of the bandwidth bound."""

from __future__ import annotations

import pytest
import torch

from sparse_opt import backends, ops
from sparse_opt.bench.kernels import tiles
from sparse_opt.bench.kernels.bounds import Rates
from sparse_opt.bench.kernels.cases import WrongResult
from sparse_opt.bench.kernels.recorder import Recorder
from sparse_opt.bench.kernels.tile_operands import (
    Operands,
    TileMask,
    input_groups,
    linear_layers,
    operand_bytes,
)
from sparse_opt.bench.kernels.tiles import GatheredGradients, TileGradients, check
from sparse_opt.bench.rows import Run
from sparse_opt.bench.shapes import LLAMA_3_2_3B, llama_matrices

# Two layers; widths that are no multiple of a tile, and matrices of one tile.
SHAPES = linear_layers(
    llama_matrices(hidden=150, intermediate=200, n_layers=2, n_heads=3, n_kv_heads=1, head_dim=50, vocab=30)
)


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


@pytest.fixture(scope="module")
def operands() -> Operands:
    return Operands.random(SHAPES, 24, generator())


@pytest.fixture(params=["tile64", "tile128"])
def gradients(request, operands) -> TileGradients:
    return TileGradients(operands, TileMask.random(SHAPES, request.param, 0.3, generator()))


def test_matrices_of_a_layer_share_inputs():
    shapes = linear_layers(LLAMA_3_2_3B)
    assert len(shapes) == 28 * 7
    assert sum(rows * columns for rows, columns in shapes.values()) == 28 * 100_663_296
    groups = input_groups(shapes)
    assert len(groups) == 28 * 4
    assert groups[4:8] == [([7, 8, 9], 3072), ([10], 3072), ([11, 12], 3072), ([13], 8192)]


@pytest.mark.parametrize("pattern", ["tile64", "tile128"])
@pytest.mark.parametrize("density", [0.1, 1.0])
def test_tiles_and_the_bytes_of_their_bound(operands, pattern, density):
    mask = TileMask.random(SHAPES, pattern, density, generator())
    elements = [mask.elements(i, shape) for i, shape in enumerate(SHAPES.values())]
    assert [int(e.sum()) for e in elements] == [b - a for a, b in zip(mask.slots, mask.slots[1:], strict=False)]
    n_tiles = sum(grid.numel() for grid in mask.active)
    assert len(mask.tiles) == mask.ends[-1] == round(density * n_tiles)
    columns = 0
    for group in operands.groups:
        columns += sum(any(bool(elements[i][:, c].any()) for i in group.matrices) for c in range(group.columns))
    rows = sum(int(e.any(dim=1).sum()) for e in elements)
    assert mask.bound_bytes(operands) == 2 * 24 * (columns + rows) + 4 * mask.nnz
    if density == 1:
        assert mask.bound_bytes(operands) == operand_bytes(operands) + 4 * mask.nnz


@pytest.mark.parametrize("calls", ["layer", "input", "matrix"])
def test_the_calls_pass_their_check(gradients, calls):
    assert len(gradients.calls[calls]) == {"layer": 2, "input": 8, "matrix": 14}[calls]
    check(gradients, backends.choose("tile_weight_grad_", "cpu"), calls)
    assert gradients.out.isfinite().all()


def spoil(monkeypatch, change) -> None:
    """ops.tile_weight_grad_ as before, and `change(out, sum_sq)` after each call that is not the reference's."""
    true_op = ops.tile_weight_grad_

    def spoiled(out, *lists, sum_sq=None, found_inf=None, backend=None, **options):
        true_op(out, *lists, sum_sq=sum_sq, found_inf=found_inf, backend="reference", **options)
        if backend != "reference":
            change(out, sum_sq, found_inf)

    monkeypatch.setattr(tiles.ops, "tile_weight_grad_", spoiled)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda out, sums, found: out[-1:].fill_(float("nan")), "1 of .* from torch.mm; .* found nan"),
        # A token's share of an element is about 1.
        (lambda out, sums, found: out[:1].add_(0.5), r"layers.*: 1 of \d+ elements are further than .* from torch.mm"),
        (lambda out, sums, found: sums.mul_(1.001), "sum of squares"),
        (lambda out, sums, found: found.fill_(float("inf")), "found_inf is set"),
    ],
    ids=["a gap", "a wrong element", "a wrong sum", "a wrong flag"],
)
def test_what_is_wrong_is_found(gradients, monkeypatch, change, message):
    spoil(monkeypatch, change)
    with pytest.raises(WrongResult, match=message):
        check(gradients, "cpu", "layer")


def test_the_first_layer_has_to_be_the_references_too(gradients, monkeypatch):
    monkeypatch.setattr(gradients, "reference", gradients.reference + 0.5)
    with pytest.raises(WrongResult, match="from the reference"):
        check(gradients, "reference", "layer")


def test_what_is_gathered_is_checked(operands, monkeypatch):
    gathered = GatheredGradients(operands, 0.1, generator())
    gathered.check()
    true_op = ops.masked_grad_gather_

    def spoiled(out, *lists, **options):
        true_op(out, *lists, **options)
        out[3] += 1

    monkeypatch.setattr(tiles.ops, "masked_grad_gather_", spoiled)
    with pytest.raises(WrongResult, match="q_proj.weight: 1 of"):
        gathered.check()


def test_rows_of_all_kinds_are_timed_and_compared():
    run = Run({})
    recorder = Recorder(run, torch.device("cpu"), ["reference"], n_rounds=1, rates=Rates(1e9, {}))
    tiles.time_rows(recorder, SHAPES, (16, 8), generator())
    assert run.wrong == []
    assert {row.case["work"] for row in run.rows} == {tiles.OP, tiles.MM, tiles.GATHERED_MM}
    assert {row.case.get("density") for row in run.rows} == {None, 0.025, 0.1, 1.0}
    for tokens in (16, 8):
        few = run.matching(work=tiles.OP, tokens=tokens, density=0.025)
        assert len(few) == 2 * 3  # patterns and ways to call
        (dense,) = run.matching(work=tiles.MM, tokens=tokens)
        assert all(run.peer(row, "torch.mm") is dense and row.peers["bound"] > 0 for row in few)


@pytest.mark.gpu
def test_a_gpu_that_is_too_small_is_reported():
    device = torch.device("cuda")
    assert tiles.why_absent(SHAPES, 16, device) == ""
    assert "GiB of GPU memory" in tiles.why_absent(linear_layers(LLAMA_3_2_3B), 2**24, device)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["triton", "cuda"])
@pytest.mark.parametrize("calls", ["layer", "matrix"])
def test_tiles_on_a_gpu(backend, calls):
    on_gpu = torch.Generator("cuda").manual_seed(0)
    operands = Operands.random(SHAPES, 200, on_gpu)
    for pattern in ("tile64", "tile128"):
        check(TileGradients(operands, TileMask.random(SHAPES, pattern, 0.3, on_gpu)), backend, calls)
