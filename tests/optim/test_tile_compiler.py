"""Compiled layers compute the tiles of several weight gradients by one call, with the gradients of eager layers."""

import functools

import pytest
import torch
from functorch.compile import make_boxed_func
from tiled_models import EPS32, pair
from tiled_models import assert_same_gradients as assert_same_compact_gradients
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch._functorch import config as functorch_config
from torch._inductor import compile_fx
from transformers.pytorch_utils import Conv1D

from sparse_opt import MaskSet, SparseAdamW, SparseSGD
from sparse_opt.optim.gradients import tile_compiler

ATOL = 1e-4  # of sums of 16 products of normal values in fp32


class Block(nn.Module):
    """A feed-forward block; its second layer may be called twice, and its first have a weight of [in, out]."""

    def __init__(self, *, twice=False, transposed=False):
        super().__init__()
        self.gate = Conv1D(128, 64) if transposed else nn.Linear(64, 128, bias=False)
        self.up = nn.Linear(64, 128)
        self.down, self.twice = nn.Linear(128, 64, bias=False), twice

    def forward(self, x):
        up = self.up(x) + self.up(x.sin()) if self.twice else self.up(x)
        return x + self.down(torch.nn.functional.silu(self.gate(x)) * up)


def ops(graph):
    """The names of the ops that a graph calls."""
    targets = (node.target for node in graph.graph.nodes if node.op == "call_function")
    return [getattr(target, "_opname", target.__name__) for target in targets]


@pytest.fixture
def calls(monkeypatch):
    """The ops of each backward graph. Graphs are traced as for Inductor, and run by torch."""
    torch._dynamo.reset()
    found: list[list[str]] = []

    def run(graph, inputs, **options):
        if options.get("is_backward"):
            found.append(ops(graph))
        else:
            assert "tile_linear" not in ops(graph)
        return graph.forward

    monkeypatch.setattr(compile_fx, "compile_fx_inner", run)
    with functorch_config.patch(enable_autograd_cache=False):
        yield found


def build(device, compiled, n_blocks=1, groups=1, **options):
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(**options) for _ in range(n_blocks))).to(device)
    matrices = {name: tuple(p.shape) for name, p in model.named_parameters() if p.ndim == 2}
    mask = MaskSet.random(matrices, density=0.5, pattern="tile64", seed=1)
    named = list(model.named_parameters())
    params = model if groups == 1 else [{"params": named[k::groups]} for k in range(groups)]
    optimizer = SparseAdamW(params, mask, lr=1e-3, tile_backward=True, model=model)
    if compiled:
        for block in model:
            block.compile(backend=tile_compiler.inductor)
    return model, optimizer


def gradients(optimizer):
    return torch.cat([buffer.values.float() for buffer in optimizer.gradient_buffers])


def assert_same_gradients(device, backward, **options):
    found, passes = [], []
    for compiled in (False, True):
        model, optimizer = build(device, compiled, **options)
        x = torch.randn(2, 8, 64, generator=torch.Generator().manual_seed(2)).to(device).requires_grad_()
        backward(model, x)
        found.append([gradients(optimizer), torch.zeros(()) if x.grad is None else x.grad])
        optimizer.clip_grad_norm_(1e30)
        passes.append(optimizer.grad_norm)
    for eager, compiled in zip(*found, strict=True):
        assert eager.shape == compiled.shape
        torch.testing.assert_close(compiled, eager, rtol=1e-4, atol=ATOL)
    torch.testing.assert_close(passes[1], passes[0], rtol=1e-4, atol=0)
    assert passes[0] > 0


def once(model, x):
    model(x).square().sum().backward()


@pytest.mark.usefixtures("few_under_the_interpreter")
def test_one_call_for_the_layers_of_a_block(device, calls):
    assert_same_gradients(device, once, n_blocks=2)
    assert len(calls) == 1  # equal blocks share a graph, although their parameters differ
    assert calls[0].count("tile_products") == 1 and calls[0].count("mm") == 3
    assert not any("auto_functionalized" in name for name in calls[0])  # `tile_linear_backward`


def twice(model, x):
    for _ in range(2):
        once(model, x)


# (backward pass, options of the model, calls for tiles, dense products)
CASES = {
    "accumulated": (twice, {}, 1, 3),
    "layer-called-twice": (once, {"twice": True}, 1, None),
    "transposed": (once, {"transposed": True}, 1, 3),
    "parameter-groups": (once, {"groups": 2}, None, None),  # each has a buffer of its own
    "input-without-gradient": (lambda model, x: once(model, x.detach()), {}, None, 1),
}


@pytest.mark.parametrize("case", CASES)
def test_gradients_are_those_of_eager_layers(case, device, calls):
    backward, options, n_tile_calls, n_products = CASES[case]
    assert_same_gradients(device, backward, **options)
    assert n_tile_calls is None or calls[0].count("tile_products") == n_tile_calls
    assert n_products is None or calls[0].count("mm") == n_products


def test_large_operands_do_not_wait(device, calls, monkeypatch):
    monkeypatch.setattr(tile_compiler, "_MAX_WAITING_BYTES", 0)
    assert_same_gradients(device, once)
    assert calls[0].count("tile_products") == 3


def test_a_closed_optimizer_raises(device, calls):
    model, optimizer = build(device, compiled=True)
    loss = model(torch.randn(4, 64, device=device)).sum()
    optimizer.close()
    with pytest.raises(RuntimeError, match="closed or detached"):
        loss.backward()


class Slices(nn.Module):
    """Inputs that are not contiguous, of layers with and without a bias."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(64, 128), nn.Linear(128, 64, bias=False)

    def forward(self, x):
        return self.second(self.first(x[:, 1:]).transpose(0, 1))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_inductor_compiles_what_the_graphs_became(dtype):
    """By its own code, for sizes that vary, and with its cache, also under autocast."""
    torch._dynamo.reset()
    bypassed = counters["inductor"]["fxgraph_cache_bypass"]
    found = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(Slices())
        mask = MaskSet.random(model, density=0.5, pattern="tile64", seed=1)
        optimizer = SparseAdamW(model, mask, lr=1e-3, tile_backward=True)
        if compiled:
            model[0].compile(backend=tile_compiler.inductor)
        generator = torch.Generator().manual_seed(2)
        for shape in ((2, 5, 64), (3, 9, 64), (5, 4, 64)):
            x = torch.randn(shape, generator=generator).requires_grad_()
            with torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32):
                output = model(x)
            output.float().square().sum().backward()
            found.append([output, x.grad, gradients(optimizer)])
            optimizer.zero_grad()
    for eager, fast in zip(found[:3], found[3:], strict=True):
        for expected, got in zip(eager, fast, strict=True):
            scale = expected.detach().float().abs().max().item()
            rtol = 1e-5 if dtype == torch.float32 else 2**-6
            torch.testing.assert_close(got, expected, rtol=0, atol=rtol * scale)
    assert counters["inductor"]["fxgraph_cache_bypass"] == bypassed


def test_forward_graphs_of_every_backend_consist_of_torchs_ops():
    """None takes the layer's number, which is on the host: Inductor's CUDA graphs could not hold it."""
    torch._dynamo.reset()
    found = []

    def keep(graph, inputs):
        found.append(graph)
        return make_boxed_func(graph.forward)

    model, optimizer = build("cpu", compiled=False)
    compiled = torch.compile(model, backend=aot_autograd(fw_compiler=keep, inference_compiler=keep))
    x = torch.randn(3, 64)
    compiled(x).square().sum().backward()
    with torch.no_grad():
        compiled(x)
    forward, backward, inference = found
    assert "tile_linear_backward" in backward.code
    for graph in (forward, inference):
        assert not any("tile" in op for op in ops(graph))
        numbers = [node for node in graph.graph.find_nodes(op="placeholder") if node.meta["val"].dtype == torch.int64]
        assert all(user.op == "output" for node in numbers for user in node.users)
    assert len(forward.graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default)) >= 2
    assert gradients(optimizer).any()


@pytest.mark.gpu
def test_inductors_cuda_graphs_train_as_eager_layers():
    """The calls for tiles run between the graphs of a backward pass."""
    torch._dynamo.reset()
    found = []
    for compiled in (False, True):
        model, optimizer = build("cuda", compiled=False, n_blocks=2)
        run = torch.compile(model, mode="reduce-overhead") if compiled else model
        skips = counters["inductor"]["cudagraph_skips"]
        for step in range(6):
            if compiled:
                torch.compiler.cudagraph_mark_step_begin()
            generator = torch.Generator("cuda").manual_seed(step)
            run(torch.randn(16, 64, device="cuda", generator=generator)).square().sum().backward()
            found.append(gradients(optimizer).clone())
            optimizer.step()
            model.zero_grad()  # no gradient stays in memory that the next replay overwrites
            optimizer.zero_grad()
        assert counters["inductor"]["cudagraph_skips"] == skips
    for expected, got in zip(found[:6], found[6:], strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-4 * expected.abs().max().item())


def test_other_lengths_take_the_same_graphs(calls):
    model, optimizer = build("cpu", compiled=True)
    for n in (4, 6, 9, 12):
        once(model, torch.randn(2, n, 64, requires_grad=True))
        optimizer.zero_grad()
    assert len(calls) == 2  # for the first length, and for all others


def test_what_happens_to_a_weight_between_the_passes_of_compiled_layers(calls):
    model, optimizer = build("cpu", compiled=True)
    weight, x = model[0].down.weight, torch.randn(2, 64)
    loss = model(x).square().sum()
    weight.requires_grad_(False)
    loss.backward()
    assert weight.grad is None and optimizer.compact_grad(weight) is None
    assert optimizer.compact_grad(model[0].up.weight) is not None
    weight.requires_grad_(True)
    loss = model(x).square().sum()
    weight.register_hook(lambda grad: 2 * grad)
    with pytest.raises(RuntimeError, match="another hook on the weight needs a dense weight gradient"):
        loss.backward()


def test_recomputing_refuses_random_numbers(calls):
    block = Block()
    block.gate = nn.Sequential(block.gate, nn.Dropout(0.5))
    block.compile(backend=functools.partial(tile_compiler.inductor, recompute=True))
    with pytest.raises(RuntimeError, match="would draw other random numbers"):
        block(torch.randn(2, 64)).sum().backward()
    block.eval()
    block(torch.randn(2, 64)).sum().backward()


# Whole models, by any compiler, without `tile_compiler`.


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(128, 192), nn.Linear(192, 128, bias=False)

    def forward(self, x):
        return x + self.b(torch.relu(self.a(x)))


def residuals(device):
    torch.manual_seed(0)
    return nn.Sequential(*[Residual() for _ in range(2)]).to(device)


@pytest.fixture
def graphs():
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    yield lambda: (counters["stats"]["unique_graphs"], sum(counters["graph_break"].values()))
    torch._dynamo.reset()


@pytest.mark.usefixtures("few_under_the_interpreter")
def test_tiles_under_compile(graphs):
    """Whole, without a graph break; an input that needs no gradient; layers that a compiler would merge."""
    model, tiles, twin, dense = pair("cpu", residuals, density=0.4)
    x = torch.randn(3, 20, 128)

    def twice(m, x):
        return (m[1](x) + m[1](x)).square().mean()

    whole = torch.compile(model, backend="aot_eager", fullgraph=True)
    doubled = torch.compile(lambda x: twice(model, x), backend="aot_eager", fullgraph=True)
    for _ in range(2):
        for y in (whole(x), twin(x)):
            y.square().mean().backward()
        assert_same_compact_gradients(tiles, dense, rtol=2 * 60 * EPS32)
    for loss in (doubled(x), twice(twin, x)):
        loss.backward()
    assert_same_compact_gradients(tiles, dense, rtol=4 * 60 * EPS32)
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


@pytest.mark.usefixtures("few_under_the_interpreter")
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
