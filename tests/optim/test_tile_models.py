"""Weight gradients made tile by tile under torch.compile, and their ops."""

from __future__ import annotations

import functools

import pytest
import torch
from tiled_models import EPS32, assert_same_gradients, pair
from torch import nn

from sparse_opt import MaskSet, SparseSGD

pytestmark = pytest.mark.usefixtures("few_under_the_interpreter")


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(128, 192), nn.Linear(192, 128, bias=False)

    def forward(self, x):
        return x + self.b(torch.relu(self.a(x)))


def blocks(device, n=2):
    torch.manual_seed(0)
    return nn.Sequential(*[Block() for _ in range(n)]).to(device)


@pytest.fixture
def graphs():
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    yield lambda: (counters["stats"]["unique_graphs"], sum(counters["graph_break"].values()))
    torch._dynamo.reset()


def test_tiles_under_compile(graphs):
    """Whole, without a graph break; an input that needs no gradient; layers that a compiler would merge."""
    model, tiles, twin, dense = pair("cpu", blocks, density=0.4)
    x = torch.randn(3, 20, 128)

    def twice(m, x):
        return (m[1](x) + m[1](x)).square().mean()

    whole = torch.compile(model, backend="aot_eager", fullgraph=True)
    doubled = torch.compile(lambda x: twice(model, x), backend="aot_eager", fullgraph=True)
    for _ in range(2):
        for y in (whole(x), twin(x)):
            y.square().mean().backward()
        assert_same_gradients(tiles, dense, rtol=2 * 60 * EPS32)
    for loss in (doubled(x), twice(twin, x)):
        loss.backward()
    assert_same_gradients(tiles, dense, rtol=4 * 60 * EPS32)
    assert graphs() == (2, 0)
    before = whole(x[:, :2]).sum()
    with tiles.base_weights():
        with pytest.raises(RuntimeError, match="does not require grad"):
            whole(x).sum().backward()
        with pytest.raises(RuntimeError, match="modified by an inplace operation|arrived inside base_weights"):
            before.backward()
    tiles.zero_grad()
    for o, y in ((tiles, whole(x)), (dense, twin(x))):
        y.square().mean().backward()
        o.step()
    y = whole(x)
    tiles.close()
    with pytest.raises(RuntimeError, match="between its forward and backward pass"):
        y.sum().backward()
    whole(x).sum().backward()
    assert model[0].a.weight.grad is not None


def test_tiles_under_compile_block_by_block(graphs):
    """Equal blocks share their graphs, although their parameters differ."""
    model, tiles, twin, dense = pair("cpu", functools.partial(blocks, n=6), density=0.4)
    for block in model:
        block.compile(backend="aot_eager")
    x = torch.randn(3, 20, 128)
    for m in (model, twin):
        with torch.autocast("cpu", torch.bfloat16):
            y = m(x)
        y.float().square().mean().backward()
    assert_same_gradients(tiles, dense, rtol=2**-8)
    n, breaks = graphs()
    assert n <= 3 and breaks == 0


@pytest.mark.parametrize("transposed", [False, True], ids=["linear", "conv1d"])
def test_the_ops_of_tile_layers_under_opcheck(transposed):
    layer = nn.Linear(64, 64)
    optimizer = SparseSGD(
        layer, MaskSet.from_bool({"weight": torch.ones(64, 64, dtype=torch.bool)}), tile_backward=True
    )
    number = layer._tile_route.number
    x = torch.randn(2, 5, 64, requires_grad=True)
    bias = torch.randn(64, requires_grad=True)
    for b in (bias, bias if transposed else None):
        torch.library.opcheck(
            torch.ops.sparse_opt.tile_linear.default, (x, layer.weight.detach(), b, number, transposed)
        )
    for weight in (layer.weight.detach(), None):
        args = (torch.randn(2, 5, 64), x.detach(), weight, number, transposed)
        torch.library.opcheck(torch.ops.sparse_opt.tile_linear_backward.default, args)
    assert optimizer.compact_grad(layer.weight) is not None
