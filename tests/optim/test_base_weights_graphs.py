"""Graphs built inside and outside `base_weights()`, also if autograd saves no weight whose version it could compare."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from sparse_opt import MaskSet, SparseAdamW

MODES = {
    "compact": {},
    "dense": {"grads": "dense"},
    "python": {"backend": "reference"},
    "python-dense": {"backend": "reference", "grads": "dense"},
}


class Lookup(nn.Module):
    """Uses its weight in ways for which the backward pass does not need it again."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.weight = nn.Parameter(torch.randn(64, 64))

    def forward(self):
        device = self.weight.device
        if self.kind == "embedding":
            return F.embedding(torch.tensor([1, 5], device=device), self.weight).sum()
        if self.kind == "bias":
            return (torch.ones(64, 64, device=device) + self.weight).sum()
        return F.linear(torch.ones(2, 64, device=device), self.weight).sum()


@pytest.fixture(params=["embedding", "bias", "linear", "tiles"])
def make(request, device):
    """Makes a model and its optimizer, which has stepped."""

    def made(**options):
        torch.manual_seed(0)
        if request.param == "tiles":
            if options.get("grads") == "dense":
                pytest.skip("tiles are compact gradients")
            model = nn.Sequential(nn.Linear(64, 64, bias=False)).to(device)
            model.forward = lambda: model[0](torch.ones(2, 64, device=device)).sum()
            options["tile_backward"] = True
        else:
            model = Lookup(request.param).to(device)
        optimizer = SparseAdamW(model, MaskSet.random(model, density=1.0, pattern="tile64"), lr=0.1, **options)
        model.forward().backward()
        optimizer.step()
        optimizer.zero_grad()
        return model, optimizer

    return made


def weight_of(model):
    return next(model.parameters())


def gradient_of(model, optimizer):
    weight = weight_of(model)
    return weight.grad if optimizer.grads == "dense" else optimizer.compact_grad(weight)


@pytest.mark.parametrize("mode", MODES)
def test_a_graph_made_inside_trains_nothing_outside(make, mode, device):
    model, optimizer = make(**MODES[mode])
    factor = torch.ones((), device=device, requires_grad=True)
    with optimizer.base_weights():
        alone, loss = model.forward(), model.forward() * factor
    loss.backward()
    assert torch.equal(factor.grad, loss.detach())
    assert gradient_of(model, optimizer) is None
    with pytest.raises(RuntimeError, match="does not require grad"):
        alone.backward()


@pytest.mark.parametrize("mode", MODES)
def test_a_graph_made_outside_is_refused_inside(make, mode):
    model, optimizer = make(**MODES[mode])
    loss = model.forward()
    with optimizer.base_weights(), pytest.raises(RuntimeError, match=r"'.*weight' arrived inside base_weights\(\)"):
        loss.backward()
    assert weight_of(model).grad is None and gradient_of(model, optimizer) is None
    model.forward().backward()  # the refusal has no lasting effect
    assert gradient_of(model, optimizer) is not None


@pytest.mark.parametrize("mode", MODES)
def test_a_graph_made_before_runs_backward_after(make, mode):
    model, optimizer = make(**MODES[mode])
    model.forward().backward()
    expected = gradient_of(model, optimizer).clone()
    optimizer.zero_grad()
    loss = model.forward()
    with optimizer.base_weights(), torch.no_grad():
        model.forward()
    loss.backward()
    assert torch.equal(gradient_of(model, optimizer), expected)


def test_a_parameter_without_our_hook_refuses_too(device):
    """Where the optimizer is detached, and where the elements of a parameter have left the mask."""
    params = {name: nn.Parameter(torch.randn(64, device=device)) for name in "ab"}
    masks = [{name: torch.full((64,), name in active) for name in params} for active in ("a", "b")]
    first, second = (MaskSet.from_bool(mask) for mask in masks)
    optimizer = SparseAdamW(list(params.items()), first, lr=0.1, freeze_inactive=False)
    for refused in ("a", "b"):
        if refused == "a":
            optimizer.set_mask(second)  # its base weights are kept
        else:
            optimizer.detach()
        loss = params[refused].sum()
        with optimizer.base_weights(), pytest.raises(RuntimeError, match=f"'{refused}' arrived inside"):
            loss.backward()
        assert params[refused].grad is None
        seen = []
        handle = params[refused].register_post_accumulate_grad_hook(lambda p, seen=seen: seen.append(p))
        params[refused].sum().backward()
        handle.remove()
        assert len(seen) == 1 and params[refused].grad is not None
    optimizer.attach()
    params["b"].grad = None
    params["b"].sum().backward()
    assert optimizer.compact_grad(params["b"]) is not None


def test_a_dense_gradient_after_tiles_of_the_same_weight_is_refused_inside(device):
    """A tied weight: the layer's gradient has arrived as tiles, so the hook may be called without one."""
    head = nn.Linear(64, 64, bias=False).to(device)
    optimizer = SparseAdamW(head, MaskSet.random(head, density=1.0, pattern="tile64"), tile_backward=True)
    lookup = F.embedding(torch.tensor([3], device=device), head.weight).sum()
    head(torch.ones(2, 64, device=device)).sum().backward()
    before = optimizer.compact_grad(head.weight).clone()
    with optimizer.base_weights(), pytest.raises(RuntimeError, match="'weight' arrived inside"):
        lookup.backward()
    assert torch.equal(optimizer.compact_grad(head.weight), before)


@pytest.mark.parametrize("mode", MODES)
def test_requires_grad_is_as_it_was(mode, device):
    params = {name: nn.Parameter(torch.randn(64, device=device)) for name in "abc"}
    mask = MaskSet.from_bool({name: torch.full((64,), name != "c") for name in params})
    optimizer = SparseAdamW(list(params.items()), mask, **MODES[mode])
    params["b"].requires_grad_(False)  # by other code, temporarily
    outside = [True, False, False]

    def found():
        return [p.requires_grad for p in params.values()]

    assert found() == outside
    with optimizer.base_weights():
        assert found() == [False, False, False]
    assert found() == outside
    with pytest.raises(KeyError), optimizer.base_weights():
        raise KeyError("inside")
    assert found() == outside


def test_a_compiled_model_is_not_compiled_again_and_again(device):
    testing = pytest.importorskip("torch._dynamo.testing")
    model = nn.Linear(16, 16).to(device)
    optimizer = SparseAdamW(model, MaskSet.random(model, density=0.5), lr=0.1)
    counter = testing.CompileCounter()
    compiled = torch.compile(model, backend=counter)
    x, counts = torch.ones(2, 16, device=device), []
    for _ in range(3):
        with torch.no_grad(), optimizer.base_weights():
            reference = compiled(x)
            assert torch.equal(reference, model(x))
        (compiled(x) - reference).square().sum().add(compiled(x).sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
        counts.append(counter.frame_count)
    torch._dynamo.reset()
    assert counts == [2, 2, 2]
