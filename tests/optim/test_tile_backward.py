"""Weight gradients computed tile by tile: the forward pass has the same bits, and the gradients are equal."""

import contextlib
import gc
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from computed import Computed
from launch import launch
from tiled_models import EPS32, SIZES, assert_same_gradients, batch, loss_of, pair
from torch import nn
from torch.utils.checkpoint import checkpoint

from sparse_opt import MaskSet, SparseAdamW, SparseSGD, backends
from sparse_opt.optim.gradients.reduction import backward_notifier

pytestmark = pytest.mark.usefixtures("few_under_the_interpreter")


def conv1d():
    return pytest.importorskip("transformers.pytorch_utils", reason="needs transformers").Conv1D


def layer_of(kind, device, dtype):
    torch.manual_seed(0)
    layer = conv1d()(150, 130) if kind == "conv1d" else nn.Linear(130, 150, bias=kind == "bias")
    return layer.to(device, dtype)


@pytest.mark.parametrize("autocast", [False, True], ids=["", "autocast"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("kind", ["bias", "no-bias", "conv1d"])
def test_tile_layer_keeps_forward_and_input_gradient_to_the_bit(kind, dtype, autocast, device):
    layer, plain = layer_of(kind, device, dtype), layer_of(kind, device, dtype)
    active = {n: torch.ones(p.shape, dtype=torch.bool) for n, p in layer.named_parameters()}
    optimizer = SparseSGD(layer, MaskSet.from_bool(active), tile_backward=True)
    other = SparseSGD(plain, MaskSet.from_bool(active), tile_backward=False)
    whole = torch.randn(5, 7, 130, device=device, dtype=dtype)
    inputs = [whole, whole[0], whole[:, :1], whole[:0]]
    if kind != "conv1d":  # whose own forward refuses these
        inputs += [whole.transpose(0, 1), whole[0, 0], whole[0].t().contiguous().t(), whole[None, :, ::2]]
    for x in inputs:
        outputs = []
        for module, owner in ((layer, optimizer), (plain, other)):
            owner.zero_grad()
            leaf = x.detach().requires_grad_()
            with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
                y = module(leaf)
            generator = torch.Generator().manual_seed(1)
            y.backward(torch.randn(y.shape, generator=generator).to(y))
            bias = None if module.bias is None else owner.compact_grad(module.bias)
            outputs.append((y, leaf.grad, bias, owner.compact_grad(module.weight)))
        (y, gx, gb, gw), (y2, gx2, gb2, gw2) = outputs
        assert torch.equal(y, y2) and y.dtype == y2.dtype and torch.equal(gx, gx2), x.shape
        assert gb is None or torch.equal(gb, gb2), x.shape
        # The dense gradient is rounded to its dtype, half a unit of 2^-8; in fp32 see assert_same_gradients.
        low = autocast or dtype == torch.bfloat16
        bound = (2**-8 if low else 35 * EPS32) * gw2.abs().max() if gw2.numel() and x.numel() else 0.0
        assert (gw - gw2).abs().max() <= bound, x.shape
    y = layer(whole.contiguous())
    assert not y._is_view() or plain(whole.contiguous())._is_view()


@pytest.mark.parametrize("pattern", ["tile64", "tile128"])
def test_tile_gradients_are_the_dense_ones_over_micro_batches(pattern, device):
    model, tiles, twin, dense = pair(device, pattern=pattern)
    assert tiles.tiled_parameters == ("0.weight", "2.weight", "4.weight")
    for seed in range(3):
        x = batch(device, seed)
        ours, theirs = model(x), twin(x)
        assert torch.equal(ours, theirs)
        ours.square().mean().backward()
        theirs.square().mean().backward()
        assert_same_gradients(tiles, dense)
    tiles.zero_grad()
    dense.zero_grad()
    loss_of(model, batch(device, 9)).backward()  # overwrites
    loss_of(twin, batch(device, 9)).backward()
    assert_same_gradients(tiles, dense)


def test_tile_norm_after_passes_of_both_kinds(device):
    """Tiles and dense gradients leave different numbers of partial sums of squares in the same buffer."""
    model, tiles, _, _ = pair(device)
    weight, x = model[0].weight, batch(device)
    for by_layer in (True, False, True):
        tiles.zero_grad()
        (model[0](x) if by_layer else F.linear(x, weight)).square().mean().backward()
        torch.testing.assert_close(
            tiles.clip_grad_norm_(1.0),
            torch.cat([g for p in model.parameters() if (g := tiles.compact_grad(p)) is not None]).norm(),
            rtol=100 * EPS32,
            atol=0,
        )


def test_uses_of_a_weight_in_and_outside_of_its_layer_add_up(device):
    model, tiles, twin, dense = pair(device)

    def loss(m):
        x, y = batch(device, 0), batch(device, 1)
        return (m(x) + m(y)).square().mean() + F.linear(x, m[0].weight).square().mean()

    for m in (model, twin):
        loss(m).backward()
    assert_same_gradients(tiles, dense)
    for m in (model, twin):
        F.linear(batch(device, 3), m[0].weight).square().mean().backward()  # without the layer
    assert_same_gradients(tiles, dense)


def test_queued_tiles_have_the_same_bits(device, native):
    x, found = batch(device), []
    for tiles_, bytes_ in ((10**9, 10**12), (1, 10**12), (10**9, 0)):
        model, tiles, _, _ = pair(device)
        tiles.gradient_buffers[0].set_queue_limits(tiles=tiles_, tile_bytes=bytes_)
        for _ in range(2):
            loss_of(model, x).backward()
        grads = [tiles.compact_grad(p) for p in model.parameters()]
        found.append((tiles.clip_grad_norm_(1.0), *(g for g in grads if g is not None)))
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


def test_backward_passes_of_two_threads_add_up_with_tiles(device, native):
    """The sum of two gradients does not depend on their order.

    This is not tested with dense ones: torch accumulates in `.grad` while another thread's hook may take it.
    """

    def without_biases(device):
        return nn.Sequential(*(nn.Linear(a, a, bias=False) for a in (SIZES[0],) * 3)).to(device)

    model, tiles, _, _ = pair(device, without_biases)
    tiles.gradient_buffers[0].set_queue_limits(tiles=10**9, tile_bytes=10**12)
    x = [batch(device, seed) for seed in range(2)]
    for each in x:
        loss_of(model, each).backward()
    expected = [g.clone() for p in model.parameters() if (g := tiles.compact_grad(p)) is not None]
    with ThreadPoolExecutor(2) as pool:
        for _ in range(20):
            tiles.zero_grad()
            start = threading.Barrier(2)

            def run(each, start=start):
                loss = loss_of(model, each)
                start.wait()
                loss.backward()

            list(pool.map(run, x))
            found = [g for p in model.parameters() if (g := tiles.compact_grad(p)) is not None]
            assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.gpu
def test_tiles_of_layers_on_several_streams(native):
    """Few tiles and many tokens: each launch splits its tokens, and all write partial sums to the same buffers."""
    device = torch.device("cuda")
    torch.manual_seed(0)
    layers = nn.ModuleList(nn.Linear(256, 256, bias=False, device=device) for _ in range(6))
    mask = MaskSet.random(layers, density=0.1, pattern="tile64", seed=1)
    optimizer = SparseSGD(layers, mask, lr=1e-2, tile_backward=True)
    optimizer.gradient_buffers[0].set_queue_limits(tiles=1, tile_bytes=10**12)
    x = torch.randn(20000, 256, device=device, requires_grad=True)
    streams = [torch.cuda.Stream() for _ in range(3)]

    def gradients(spread):
        optimizer.zero_grad()
        losses = []
        here = torch.cuda.current_stream()
        for i, layer in enumerate(layers):
            stream = streams[i % 3] if spread else here
            stream.wait_stream(here)
            with torch.cuda.stream(stream):
                losses.append(layer(x).square().mean())
        for stream in streams:
            here.wait_stream(stream)
        torch.stack(losses).sum().backward()
        norm = optimizer.clip_grad_norm_(1.0)
        return [norm.clone(), *(optimizer.compact_grad(p).clone() for p in layers.parameters())]

    expected = gradients(spread=False)
    for _ in range(20):
        assert all(torch.equal(a, b) for a, b in zip(gradients(spread=True), expected, strict=True))


def test_tiles_of_a_backward_pass_that_failed_are_dropped(device, native):
    model, tiles, twin, dense = pair(device)

    def fail(grad):
        raise RuntimeError("on purpose")

    hidden = model[:2](batch(device, 5))
    hidden.register_hook(fail)
    with pytest.raises(RuntimeError, match="on purpose"):
        model[2:](hidden).sum().backward()
    tiles.zero_grad()
    for m in (model, twin):
        loss_of(m, batch(device)).backward()
    assert_same_gradients(tiles, dense)


class Calls(torch.autograd.Function):
    """Fails in its backward pass, and calls a function when its graph is released."""

    @staticmethod
    def forward(ctx, x, call):
        ctx.on_release = OnRelease(call)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise RuntimeError("on purpose")


class OnRelease:
    def __init__(self, call):
        self.call = call

    def __del__(self):
        self.call()


def releases_an_operand(rank):
    model, tiles, _, _ = pair("cpu")
    tiles.gradient_buffers[0].set_queue_limits(tiles=10**9, tile_bytes=10**12)
    released = []

    def call():
        tiles.zero_grad()
        released.append(True)

    with contextlib.suppress(RuntimeError):
        model[2](Calls.apply(model[0](batch("cpu")), call)).sum().backward()
    gc.collect()
    assert not released
    tiles.compact_grad(model[2].weight)  # adds the product, and releases the last references to its graph
    assert released


@pytest.mark.dist
def test_operands_are_released_without_a_lock(native):
    """Their graph may run any code; this one's would wait for the lock forever."""
    launch(releases_an_operand, 1)


def test_a_queued_operand_that_is_changed_in_place_raises(device, native):
    model, tiles, _, _ = pair(device)
    tiles.gradient_buffers[0].set_queue_limits(tiles=10**9, tile_bytes=10**12)
    hidden = model[0](batch(device)).clone()

    def change(grad):
        hidden.detach().add_(1)

    hidden.register_hook(change)
    with pytest.raises(ValueError, match="changed in place before its weight gradient was computed"):
        model[2](hidden).sum().backward()
    assert tiles.compact_grad(model[0].weight) is None  # the buffer holds an old gradient


@pytest.mark.parametrize("reentrant", [False, True], ids=["", "reentrant"])
def test_tiles_under_checkpointing(reentrant, device, first_layer):
    make, batch = first_layer
    model, tiles, twin, dense = pair(device, make)
    required = torch.zeros(1, device=device, requires_grad=True)  # reentrant checkpoints need such an input
    for seed in range(2):
        x = batch(device, seed)
        y = checkpoint(lambda zero, x=x: model[:3](x) + zero, required, use_reentrant=reentrant)
        checkpoint(model[3:], y, use_reentrant=reentrant).square().mean().backward()
        loss_of(twin, x).backward()
    assert_same_gradients(tiles, dense)


@pytest.mark.parametrize("unscale", [False, True])
def test_tiles_under_a_grad_scaler(unscale, device, first_layer):
    make, batch = first_layer
    model, tiles, twin, dense = pair(device, make, amp_scaling=True)
    scalers = [torch.amp.GradScaler(device.type, init_scale=2.0**10) for _ in range(2)]
    for step in range(4):
        for m, o, scaler in ((model, tiles, scalers[0]), (twin, dense, scalers[1])):
            o.zero_grad()
            scaler.scale(loss_of(m, batch(device, step)) * (float("inf") if step == 1 else 1.0)).backward()
            scaler.scale(loss_of(m, batch(device, step + 4))).backward()
            before = [p.detach().clone() for p in m.parameters()]
            if unscale:
                scaler.unscale_(o)
                o.clip_grad_norm_(0.5)
            scaler.step(o)
            scaler.update()
            moved = any(not torch.equal(p, q) for p, q in zip(m.parameters(), before, strict=True))
            assert moved == (step != 1)
    assert scalers[0].get_scale() == scalers[1].get_scale() == 2.0**9
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        # Three steps of lr times gradients that are below 1; each value is rounded in each step.
        torch.testing.assert_close(p, q, rtol=3 * EPS32, atol=3 * 1e-2 * 300 * EPS32)


def test_vmap_over_a_model_with_tiles(device, native, first_layer):
    make, batch = first_layer
    model, _, twin, _ = pair(device, make)
    x = batch(device)
    hidden = torch.func.vmap(model[0])(x)
    torch.testing.assert_close(torch.func.vmap(model[2:])(model[1](hidden.clone())), twin(x))


@pytest.mark.parametrize("backend", [None, "reference"])
def test_autograd_grad_with_tiles(backend, device, first_layer):
    make, batch = first_layer
    model, tiles, twin, _ = pair(device, make, backend=backend)
    x = batch(device)
    if x.is_floating_point():
        x.requires_grad_()
        (ours,) = torch.autograd.grad(loss_of(model, x), x)
        (theirs,) = torch.autograd.grad(loss_of(twin, x), x)
        assert torch.equal(ours, theirs)
    asked = [torch.autograd.grad(loss_of(m, x), [m[0].weight, m[2].weight]) for m in (model, twin)]
    assert all(torch.equal(a, b) for a, b in zip(*asked, strict=True))
    assert all(tiles.compact_grad(p) is None for p in model.parameters())


@pytest.mark.parametrize("backend", [None, "reference"])
def test_nodes_of_autograd_are_not_kept(backend, device):
    """A node that accumulates gradients has the stream on which it was made, and a CUDA graph captures another."""
    model, tiles, _, _ = pair(device, backend=backend)
    params = [param for name, param in model.named_parameters() if name in tiles.tiled_parameters]
    assert params
    for _ in range(2):
        nodes = [torch.autograd.graph.get_gradient_edge(param).node for param in params]
        for node in nodes:
            assert "seen" not in node.metadata
            node.metadata["seen"] = True
        del node, nodes
        loss_of(model, batch(device)).backward()
        tiles.step()


def test_a_tile_layer_is_not_differentiated_twice(device, first_layer):
    make, batch = first_layer
    model, _tiles, _, _ = pair(device, make)
    with pytest.raises(RuntimeError, match="can't be differentiated twice"):
        loss_of(model[:1], batch(device)).backward(create_graph=True)


def test_two_backward_passes_of_one_graph_add_tiles_twice(device):
    model, tiles, twin, dense = pair(device)
    for m in (model, twin):
        loss = loss_of(m, batch(device))
        loss.backward(retain_graph=True)
        loss.backward()
    assert_same_gradients(tiles, dense)


@pytest.mark.parametrize("extension", [True, False], ids=["", "without-extension"])
def test_with_tiles_no_dense_weight_gradient_is_computed(extension, device, monkeypatch):
    if not extension:
        monkeypatch.setattr(backends, "autograd_module", lambda: (None, "for a test"))
    model, _tiles, twin, _ = pair(device)
    params = list(model.parameters())  # hooks of a reduction across ranks do not use the gradients
    _notifier = backward_notifier(params, [0] * len(params), lambda group: None, lambda: None)
    products = {}
    for name, m in (("tiles", model), ("dense", twin)):
        loss = loss_of(m, batch(device))
        with Computed(m) as computed:
            loss.backward()
        products[name] = {shape for op, shape in computed.found if op == "aten.mm"}
    weights = {tuple(m.weight.shape) for m in model if isinstance(m, nn.Linear)}
    assert weights <= products["dense"] and not weights & products["tiles"]


def test_an_input_that_was_changed_in_place_raises():
    layer = nn.Linear(128, 128)
    mask = MaskSet.random({"weight": layer.weight}, density=0.5, pattern="tile64")
    optimizer = SparseAdamW(layer, mask, tile_backward=True)
    for base in (torch.randn(3, 5, 128), torch.randn(3, 5, 256)):
        x = base[..., :128]  # of the second a part, which can be seen as a matrix all the same
        loss = layer(x).square().mean()
        x.mul_(0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
    optimizer.close()
