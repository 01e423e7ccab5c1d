"""Which layers compute tiles; what masks, close(), copies, saved states and deletion do to layers and optimizer."""

import copy
import gc
import io
import weakref

import pytest
import torch
import torch.nn.functional as F
from tiled_models import EPS32, assert_same_gradients, batch, loss_of, make, pair
from torch import nn

from sparse_opt import MaskSet, SparseAdamW

pytestmark = pytest.mark.usefixtures("few_under_the_interpreter")


def forwards(model):
    return [name for name, m in model.named_modules() if "forward" in vars(m) or "_tile_route" in vars(m)]


def test_tile_masks_and_element_masks_take_turns(device):
    model, tiles, twin, dense = pair(device)
    elements = MaskSet.random(model, density=0.3, seed=3)
    other = MaskSet.random(model, density=0.4, pattern="tile64", seed=4)
    tiles.tile_backward = None  # True would refuse a mask of elements
    for mask, taken in ((elements, 0), (other, 0), (elements, 0), (other, 3)):
        tiles.tile_backward = True if taken else None
        for o in (tiles, dense):
            o.set_mask(mask)
        assert len(tiles.tiled_parameters) == taken == len(forwards(model))
        for m in (model, twin):
            loss_of(m, batch(device)).backward()
        assert_same_gradients(tiles, dense, rtol=1200 * EPS32)  # of weights after up to three such steps
        for o in (tiles, dense):
            o.step()
            o.zero_grad()


def test_a_new_tile_mask_between_forward_and_backward(device, native, first_layer):
    make, batch = first_layer
    model, tiles, twin, dense = pair(device, make)
    losses = [loss_of(m, batch(device)) for m in (model, twin)]
    for o in (tiles, dense):
        o.set_mask(MaskSet.random(model, density=0.4, pattern="tile64", seed=4))
    for loss in losses:
        loss.backward()
    assert_same_gradients(tiles, dense)


def test_detach_and_close_restore_the_layers(device, first_layer):
    make, batch = first_layer
    model, tiles, twin, dense = pair(device, make)
    routed = forwards(model)
    assert routed == ["0", "2", "4"]
    tiles.detach()
    assert forwards(model) == []
    loss_of(model, batch(device)).backward()
    loss_of(twin, batch(device)).backward()
    assert model[0].weight.grad is not None
    model.zero_grad()
    tiles.attach()
    assert forwards(model) == routed
    tiles.zero_grad()
    loss_of(model, batch(device)).backward()
    assert_same_gradients(tiles, dense)
    tiles.close()
    assert forwards(model) == [] and model[0].forward.__func__ is type(model[0]).forward
    loss_of(model, batch(device)).backward()
    assert all(p.grad is not None for p in model.parameters())


def test_closing_between_forward_and_backward_leaves_the_dense_gradient(device, native, first_layer):
    make, batch = first_layer
    model, tiles, twin, dense = pair(device, make)
    losses = [loss_of(m, batch(device)) for m in (model, twin)]
    for o, loss in zip((tiles, dense), losses, strict=True):
        o.close()
        loss.backward()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None)
        assert p.grad is None or torch.equal(p.grad, q.grad)


def test_a_wrapped_forward_stays_after_close(device):
    model, tiles, _, _ = pair(device)
    inner = model[0].forward
    model[0].forward = wrapped = lambda x: 2 * inner(x)
    tiles.close()
    assert model[0].forward is wrapped
    x = batch(device)
    assert torch.equal(model[0](x), 2 * F.linear(x, model[0].weight, model[0].bias))


def test_copies_of_a_model_with_tiles_are_ordinary(device, first_layer):
    make, batch = first_layer
    model, tiles, _, _ = pair(device, make)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    x = batch(device)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        other.requires_grad_(True)
        loss_of(other, x).backward()
        assert all(p.grad is not None for p in other.parameters())
        assert tiles.compact_grad(model[0].weight) is None
        other.zero_grad()
        optimizer = SparseAdamW(other, tiles.mask, tile_backward=True)
        assert optimizer.tiled_parameters == tiles.tiled_parameters
        loss_of(other, x).backward()
        assert other[0].weight.grad is None and optimizer.compact_grad(other[0].weight) is not None
        optimizer.close()
    assert set(model.state_dict()) == set(make(device).state_dict())


def test_tiles_are_used_only_in_training(device):
    model, tiles, twin, _ = pair(device)
    x = batch(device)
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            assert torch.equal(model(x), twin(x))
    others = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    torch.func.functional_call(model, others, (x,)).square().mean().backward()
    assert all(p.grad is not None for p in others.values())
    assert all(tiles.compact_grad(p) is None for p in model.parameters())


def test_other_peoples_hooks_get_the_dense_gradient_of_a_tile_mask(device, first_layer):
    make, batch = first_layer
    model, tiles, twin, dense = pair(device, make)
    seen = []
    handle = model[0].weight.register_hook(lambda g: seen.append(g.shape))
    after = model[2].weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad is None))
    for m in (model, twin):
        loss_of(m, batch(device)).backward()
    assert sorted(map(str, seen)) == ["True", str(model[0].weight.shape)]  # ours has run before the second
    assert_same_gradients(tiles, dense)
    handle.remove()
    after.remove()
    for m in (model, twin):
        loss_of(m, batch(device)).backward()
    assert len(seen) == 2
    assert_same_gradients(tiles, dense)


@pytest.mark.parametrize("backend", [None, "reference"])
def test_a_weight_frozen_between_forward_and_backward_has_no_gradient(backend, device, first_layer):
    make, batch = first_layer
    model, tiles, twin, _dense = pair(device, make, backend=backend)
    losses = [loss_of(m, batch(device)) for m in (model, twin)]
    for m in (model, twin):
        m[0].weight.requires_grad_(False)
    losses[0].backward()  # as in torch
    assert model[0].weight.grad is None and tiles.compact_grad(model[0].weight) is None
    assert tiles.compact_grad(model[2].weight) is not None
    with pytest.raises(RuntimeError, match=r"'0.weight' was frozen .* freeze it before the forward pass"):
        losses[1].backward()


def _node(weight):
    return torch.autograd.graph.get_gradient_edge(weight).node


# Each calls `double` with the gradient; the first two replace it by the result.
LATE_HOOKS = {
    "tensor": lambda weight, double: weight.register_hook(double),
    "node-before": lambda weight, double: _node(weight).register_prehook(lambda grads: (double(grads[0]),)),
    "node-after": lambda weight, double: _node(weight).register_hook(lambda _, grads: (double(grads[0]), None)[1]),
}


@pytest.mark.parametrize("hook", LATE_HOOKS)
@pytest.mark.parametrize("backend", [None, "reference"])
def test_hooks_registered_after_the_forward_pass_get_the_dense_gradient(hook, backend, device, first_layer):
    make, batch = first_layer
    model, tiles, twin, dense = pair(device, make, backend=backend)
    seen = []

    def double(grad):
        seen.append(grad)
        return 2 * grad

    for m in (model, twin):
        loss = loss_of(m, batch(device))
        node = _node(m[0].weight)
        LATE_HOOKS[hook](m[0].weight, double)
        LATE_HOOKS[hook](m[2].weight, double).remove()
        loss.backward()
        del node
    assert torch.equal(*seen)
    assert_same_gradients(tiles, dense)


class _Mixed(nn.Module):
    """Layers that support tiles, and one of each kind that does not."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(100, 96)
        self.plain = nn.Linear(96, 96)
        self.shared, self.sharing = nn.Linear(96, 96), nn.Linear(96, 96)
        self.sharing.weight = self.shared.weight
        self.wrapped = nn.Linear(96, 96)
        self.wrapped.forward = lambda x: F.linear(x, self.wrapped.weight, self.wrapped.bias)
        self.own = type("Own", (nn.Linear,), {"forward": lambda s, x: F.linear(x, s.weight)})(96, 96)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(96, 96))
        self.head = nn.Linear(96, 100, bias=False)

    def get_output_embeddings(self):
        return self.head

    def forward(self, x):
        h = self.embedding(x)
        for layer in (self.plain, self.shared, self.sharing, self.wrapped, self.own, self.normed, self.head):
            h = layer(torch.tanh(h))
        return h


def test_which_layers_compute_tiles(device):
    def mixed(device):
        torch.manual_seed(0)
        return _Mixed().to(device)

    model, tiles, twin, dense = pair(device, mixed, density=0.6)
    assert tiles.tiled_parameters == ("embedding.weight", "plain.weight", "head.weight")
    tokens = torch.arange(100, device=device).view(5, 20)
    for m in (model, twin):
        m(tokens).square().mean().backward()
    assert_same_gradients(tiles, dense)


def test_a_weight_tied_to_an_embedding_with_sparse_gradients_stays_dense(device):
    def tied(device):
        torch.manual_seed(0)
        embedding, head = nn.Embedding(128, 192, sparse=True), nn.Linear(192, 128)
        head.weight = embedding.weight
        return nn.Sequential(embedding, nn.Linear(192, 192), head).to(device)

    model, tiles, twin, dense = pair(device, tied)
    assert tiles.tiled_parameters == ("1.weight",)
    tokens = torch.arange(100, device=device).view(5, 20)
    for m in (model, twin):
        m(tokens).square().mean().backward()  # torch adds a sparse and a strided gradient to a strided one
    assert_same_gradients(tiles, dense)


def test_tiles_are_computed_at_low_densities(device):
    model = nn.Sequential(nn.Linear(512, 512), nn.Linear(64, 128)).to(device)
    mask = {n: torch.zeros(p.shape, dtype=torch.bool) for n, p in model.named_parameters()}
    mask["0.weight"][64:128, 128:192] = True  # 1 of 64 tiles
    mask["1.weight"][:64] = True  # one half
    optimizer = SparseAdamW(model, MaskSet.from_bool(mask))
    assert optimizer.mask.pattern == "tile64" and optimizer.tiled_parameters == ("0.weight",)
    assert SparseAdamW(model, optimizer.mask, tile_backward=False).tiled_parameters == ()
    named = SparseAdamW(model.named_parameters(), optimizer.mask)
    assert named.tiled_parameters == ()
    named = SparseAdamW(model.named_parameters(), optimizer.mask, model=model, tile_backward=True)
    assert named.tiled_parameters == ("0.weight", "1.weight")


def test_tile_backward_that_no_layer_supports_is_an_error(device):
    model = make(device)
    tiles, elements = (MaskSet.random(model, density=0.3, pattern=p) for p in ("tile64", "element"))
    with pytest.raises(ValueError, match="the mask's pattern 'element'"):
        SparseAdamW(model, elements, tile_backward=True)
    with pytest.raises(ValueError, match="grads is 'dense'"):
        SparseAdamW(model, tiles, tile_backward=True, grads="dense")
    with pytest.raises(ValueError, match="the model missing"):
        SparseAdamW(model.named_parameters(), tiles, tile_backward=True)
    bag = nn.EmbeddingBag(128, 64)
    rows = MaskSet.random(bag, density=0.5, pattern="tile64")
    with pytest.raises(ValueError, match="'weight': it is 'weight' of a EmbeddingBag"):
        SparseAdamW(bag, rows, tile_backward=True)
    assert forwards(model) == [] and all(p.requires_grad for p in model.parameters())
    optimizer = SparseAdamW(model, tiles, tile_backward=True)
    with pytest.raises(ValueError, match="the mask's pattern 'element'"):
        optimizer.set_mask(elements)
    loss_of(model, batch(device)).backward()
    assert optimizer.compact_grad(model[0].weight) is not None


@pytest.mark.parametrize(("pattern", "tiled"), [("tile64", True), ("element", False)])
def test_model_and_optimizer_are_freed_without_garbage_collection(pattern, tiled):
    model = nn.Sequential(nn.Linear(128, 192), nn.ReLU(), nn.Linear(192, 64))
    weights = {name: param for name, param in model.named_parameters() if param.dim() == 2}
    optimizer = SparseAdamW(model, MaskSet.random(weights, density=0.3, pattern=pattern), tile_backward=tiled)
    model(torch.randn(5, 128)).square().mean().backward()
    optimizer.step()
    seen = [weakref.ref(param) for param in model.parameters()]
    gc.collect()
    gc.disable()
    try:
        del optimizer
        assert all("forward" not in vars(module) for module in model)
        del model, weights
        assert all(param() is None for param in seen)
    finally:
        gc.enable()
