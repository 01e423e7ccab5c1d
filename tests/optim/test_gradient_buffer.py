"""The native GradientBuffer in CUDA graphs: the host does not know what a replay has written."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn

from sparse_opt import MaskSet, SparseSGD
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
