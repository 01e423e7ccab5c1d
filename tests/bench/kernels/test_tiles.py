"""Weight gradients by tiles and dense ones: calls, checks, and the bytes of the bandwidth bound."""

import pytest
import torch

from sparse_opt import MaskSet, backends, ops
from sparse_opt.bench.kernels import tiles
from sparse_opt.bench.kernels.bounds import Rates
from sparse_opt.bench.kernels.cases import WrongResult
from sparse_opt.bench.kernels.recorder import Recorder
from sparse_opt.bench.kernels.tiles import Operands, TileGradients
from sparse_opt.bench.rows import Run
from sparse_opt.bench.shapes import Shape, llama_matrices

# Two layers; widths that are no multiple of a tile, and matrices of one tile.
SHAPE = Shape(hidden=150, intermediate=200, n_layers=2, n_heads=3, n_kv_heads=1, head_dim=50, vocab=30)
MATRICES = llama_matrices(SHAPE)
SHAPES = {name: shape for name, shape in MATRICES.items() if ".layers." in name}


def generator(device: str = "cpu") -> torch.Generator:
    return torch.Generator(device).manual_seed(0)


@pytest.fixture(scope="module")
def operands() -> Operands:
    return Operands.of_layers(SHAPES, 24, generator())


@pytest.fixture(params=["tile64", "tile128"])
def gradients(request, operands) -> TileGradients:
    return TileGradients(operands, request.param, 0.5)


def test_matrices_of_a_layer_share_inputs(operands):
    assert operands.calls["input"][4:] == [[7, 8, 9], [10], [11, 12], [13]]
    assert operands.calls["layer"] == [list(range(7)), list(range(7, 14))]
    assert operands.inputs[7] is operands.inputs[9] is not operands.inputs[2]
    assert all(x.shape == (24, columns) for x, (_, columns) in zip(operands.inputs, SHAPES.values(), strict=True))


@pytest.mark.parametrize("density", [0.5, 1.0])
def test_the_bytes_of_the_bound(operands, density):
    gradients = TileGradients(operands, "tile64", density)
    mask = MaskSet.random(SHAPES, density=density, pattern="tile64")
    elements = [mask.bool(name) for name in SHAPES]
    widths = sum(int(e.any(dim=1).sum()) for e in elements)
    for matrices in operands.calls["input"]:
        widths += int(torch.cat([elements[i] for i in matrices]).any(dim=0).sum())
    assert gradients.traffic().bytes == 2 * 24 * widths + 4 * mask.nnz
    if density == 1:
        assert gradients.traffic().bytes == operands.nbytes() + 4 * mask.nnz


@pytest.mark.parametrize("calls", ["layer", "input", "matrix"])
def test_the_calls_give_dense_products_and_pass_their_check(gradients, operands, calls):
    gradients.check(backends.choose("cpu"), calls)
    dense = [torch.empty(shape, dtype=torch.bfloat16) for shape in SHAPES.values()]
    operands.multiply(dense)
    mask = MaskSet.random(SHAPES, density=0.5, pattern=gradients.pattern)
    expected = torch.cat([g.view(-1)[mask[name].long()] for name, g in zip(SHAPES, dense, strict=True)]).float()
    assert torch.allclose(gradients.out, expected, rtol=2**-8, atol=1e-3)  # the dense ones are rounded to bf16


def test_gradients_of_experts_are_those_of_grouped_products():
    operands = Operands.of_experts(8, 16, generator())
    gradients = TileGradients(operands, "tile64", 0.1)
    gradients.check(backends.choose("cpu"), "layer")
    mask, ends = MaskSet.random(operands.shapes, density=0.1, pattern="tile64"), operands.token_offsets.tolist()
    start = 0
    for name, g, x in zip(operands.shapes, operands.grad_outputs, operands.inputs, strict=True):
        products = [g[a:b].float().t() @ x[a:b].float() for a, b in zip([0, *ends], ends, strict=False)]
        expected = torch.stack(products).view(-1)[mask[name].long()]
        assert torch.allclose(gradients.out[start : start + len(expected)], expected, atol=1e-3)
        start += len(expected)


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
        (lambda out, sums, found: out[-1:].fill_(float("nan")), "1 of .* from the reference; .* found nan"),
        # A token's share of an element is about 1.
        (lambda out, sums, found: out[:1].add_(0.5), r"layers.*: 1 of \d+ elements are further than .*"),
        (lambda out, sums, found: sums.mul_(1.001), "sum of squares"),
        (lambda out, sums, found: found.fill_(float("inf")), "found_inf is set"),
    ],
    ids=["a gap", "a wrong element", "a wrong sum", "a wrong flag"],
)
def test_what_is_wrong_is_found(gradients, monkeypatch, change, message):
    spoil(monkeypatch, change)
    with pytest.raises(WrongResult, match=message):
        gradients.check("cpu", "layer")


def test_rows_of_all_kinds_are_timed_and_compared(monkeypatch):
    monkeypatch.setattr(tiles, "DENSITIES", (0.5, 0.9))
    run = Run({})
    recorder = Recorder(run, torch.device("cpu"), ["reference"], n_rounds=1, rates=Rates(1e9, {}))
    tiles.time_layers(recorder, MATRICES, (16, 8), generator())
    assert run.wrong == []
    assert {row.case.get("density") for row in run.rows} == {None, 0.5, 0.9}
    for tokens in (16, 8):
        few = run.matching(work=tiles.OP, tokens=tokens, density=0.5)
        assert len(few) == 2 * 3  # patterns and ways to call
        (dense,) = run.matching(work=tiles.MM, tokens=tokens)
        assert all(run.peer(row, "torch.mm") is dense and row.peers["bound"] > 0 for row in few)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["triton", "cuda"])
@pytest.mark.parametrize("calls", ["layer", "matrix"])
def test_tiles_on_a_gpu(backend, calls):
    operands = Operands.of_layers(SHAPES, 200, generator("cuda"))
    for pattern in ("tile64", "tile128"):
        TileGradients(operands, pattern, 0.5).check(backend, calls)
    TileGradients(Operands.of_experts(8, 100, generator("cuda")), "tile64", 0.1).check(backend, "layer")
