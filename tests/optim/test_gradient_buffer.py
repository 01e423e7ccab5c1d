"""The two implementations of GradientBuffer: the same results for gradients of all kinds, in any order."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn

from sparse_opt import MaskSet, SparseSGD, backends
from sparse_opt.optim.gradients.gradient_buffer import Product

SHAPE, TOKENS = (128, 192), 40


def build(backend, device, grad_dtype):
    """A buffer over two weights with tiles; gradients are added to it directly, without autograd."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(SHAPE[1], SHAPE[0], bias=False), nn.Linear(SHAPE[1], SHAPE[0], bias=False))
    mask = MaskSet.random(model, density=0.3, pattern="tile64", seed=1)
    optimizer = SparseSGD(model.to(device), mask, tile_backward=True, grad_dtype=grad_dtype, backend=backend)
    (buffer,) = optimizer.gradient_buffers
    return optimizer, buffer


def operands(device, seed):
    """Small integers: every product and sum is exact, so that all implementations give the same bits."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(-2, 3, (TOKENS, n), generator=generator).float().to(device) for n in SHAPE]


def add(buffer, kind, i, seed):
    left, right = operands(buffer.device, seed)
    if kind == "dense":
        buffer.add_dense(i, left.t() @ right)
    elif kind == "tiles":
        buffer.add_tiles([Product(i, left, right)])
    else:
        halves = ((begin, left[:, begin : begin + 64]) for begin in (0, 64))
        buffer.add_values(i, buffer.tile_rows(i, halves, right))
    return (left.t() @ right).view(-1)[buffer.positions(i).long()]


@pytest.fixture(params=["chosen", "reference"])
def backend(request, device):
    """The backend that is chosen by default, and the one without a native buffer."""
    name = backends.choose("indexed_sgd_", device.type) if request.param == "chosen" else request.param
    if request.param == "chosen" and name == "reference":
        pytest.skip("the default backend is the reference")
    return name


@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_gradients_of_all_kinds_add_up(backend, grad_dtype, device):
    _optimizer, buffer = build(backend, device, grad_dtype)
    for _ in range(2):  # the second round overwrites the gradients of the first
        buffer.drop()
        assert buffer.received == [False, False]
        expected = None
        for seed, kind in enumerate(("tiles", "dense", "rows", "dense", "tiles")):
            value = add(buffer, kind, 1, seed)
            total = value if expected is None else expected.float() + value
            expected = total.to(grad_dtype)
            assert buffer.received == [False, True]
            buffer.finish()
            assert torch.equal(buffer.values[buffer.segment(1)], expected), kind
            # A sum of up to 8000 squares: integers below 2^24, except for those of later rounds, with few roundings.
            sums = buffer.sums_of_squares(buffer.received)
            torch.testing.assert_close(sums, torch.stack([sums.new_zeros(()), expected.float().square().sum()]))
        assert [buffer.received_tiles(i) for i in range(2)] == [False, True]


@pytest.mark.parametrize("kind", ["dense", "tiles", "rows"])
def test_a_gradient_that_is_not_finite_sets_found_inf(backend, kind, device):
    _optimizer, buffer = build(backend, device, torch.float16)
    found_inf = torch.zeros(1, device=device)
    buffer.set_found_inf(found_inf)
    add(buffer, kind, 0, 0)
    buffer.finish()
    assert found_inf.item() == 0.0
    for _ in range(12):  # beyond 65504
        buffer.values[buffer.segment(0)] *= 4
        add(buffer, kind, 0, 0)
    buffer.finish()
    assert found_inf.item() == float("inf")


@pytest.mark.gpu
@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_sums_of_squares_after_a_replay_that_computed_tiles(grad_dtype):
    """The host does not know what kind of gradient a replay has added."""
    device = torch.device("cuda")
    _optimizer, buffer = build("cuda", device, grad_dtype)
    product = Product(1, *operands(device, 0))

    def add_tiles():
        buffer.drop()
        buffer.add_tiles([product])

    add_tiles()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        add_tiles()
    for seed in (1, 2):
        buffer.drop()
        add(buffer, "rows", 1, seed)
        buffer.finish()
        expected = buffer.values[buffer.segment(1)].float().square().sum()
        torch.testing.assert_close(buffer.sums_of_squares(buffer.received)[1], expected)
        graph.replay()


@pytest.mark.gpu
@pytest.mark.parametrize("fails", [False, True], ids=["replayed", "failed"])
def test_sums_of_squares_of_tiles_after_a_capture(fails):
    """The host knows neither what a replay has written before a gradient, nor that a failed capture wrote nothing."""
    device = torch.device("cuda")
    _optimizer, buffer = build("cuda", device, torch.float32)
    product = Product(1, *operands(device, 0))

    def add_tiles():
        buffer.drop()
        buffer.add_tiles([product])

    def add_dense():  # leaves more partial sums
        buffer.drop()
        add(buffer, "dense", 1, 1)

    add_tiles()
    if fails:
        add_dense()
    graph = torch.cuda.CUDAGraph()
    with contextlib.suppress(ZeroDivisionError), torch.cuda.graph(graph):
        add_tiles()
        if fails:
            raise ZeroDivisionError
    if fails:
        add_tiles()
    else:
        add_dense()
        graph.replay()
    buffer.finish()
    expected = buffer.values[buffer.segment(1)].square().sum()
    torch.testing.assert_close(buffer.sums_of_squares(buffer.received)[1], expected)


@pytest.mark.parametrize("grads", ["compact", "dense"])
def test_dense_gradients_replace_the_compact_one(backend, grads, device):
    torch.manual_seed(0)
    params = {name: nn.Parameter(torch.randn(30, 20, device=device)) for name in "abc"}
    mask = MaskSet.random(params, density=0.3)
    optimizer = SparseSGD(list(params.items()), mask, grads=grads, backend=backend)
    (buffer,) = optimizer.gradient_buffers
    assert optimizer.nbytes()["grad"] == (0 if grads == "dense" else 4 * mask.nnz)
    for missing in (None, "b"):
        for name, param in params.items():
            param.grad = None if name == missing else torch.randn_like(param)
        buffer.gather_dense_grads()
        assert buffer.received == [name != missing for name in "abc"]
        for i, (name, param) in enumerate(params.items()):
            if name != missing:
                expected = param.grad.view(-1)[mask[name].long().to(device)]
                assert torch.equal(buffer.values[buffer.segment(i)], expected)
    assert optimizer.nbytes()["grad"] == 4 * mask.nnz
