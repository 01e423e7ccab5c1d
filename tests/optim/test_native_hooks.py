"""Hooks that gather without Python: when they do, and when they leave it to the Python ones."""

from __future__ import annotations

import gc

import pytest
import torch

from sparse_opt import MaskSet, SparseAdamW, backends


@pytest.fixture(autouse=True)
def native(device, monkeypatch):
    monkeypatch.delenv("SPARSE_OPT_BACKEND", raising=False)
    if backends.choose("indexed_adamw_", device.type) not in ("cpu", "cuda"):
        pytest.skip("needs the extension: " + backends.why_unavailable(device.type, device.type))


@pytest.fixture
def model(device):
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(12, 16), torch.nn.Linear(16, 8)).to(device)


def backward(model, **options):
    x = torch.ones(3, 12, device=next(model.parameters()).device)
    model(x).square().sum().backward(**options)


@pytest.fixture
def python_calls(monkeypatch):
    """The names of parameters whose gradient came to the Python hook."""
    calls = []
    receive = SparseAdamW._receive

    def counted(self, bucket, i, param):
        calls.append(bucket.names[i])
        receive(self, bucket, i, param)

    monkeypatch.setattr(SparseAdamW, "_receive", counted)
    return calls


def wanted(model, mask):
    """Dense gradients at the mask, of a copy without an optimizer."""
    copy = torch.nn.Sequential(torch.nn.Linear(12, 16), torch.nn.Linear(16, 8)).to(next(model.parameters()).device)
    copy.load_state_dict(model.state_dict())
    backward(copy)
    grads = {name: p.grad.view(-1) for name, p in copy.named_parameters()}
    return {name: grads[name][mask[name].long().to(grads[name].device)] for name in mask.names}


def assert_gathered(model, optimizer, mask, times=1):
    for name, grad in wanted(model, mask).items():
        param = model.get_parameter(name)
        assert param.grad is None
        if mask[name].numel():
            torch.testing.assert_close(optimizer.compact_grad(param), times * grad)


@pytest.mark.parametrize("options", [{}, {"create_graph": True}], ids=["", "create-graph"])
def test_python_is_not_asked(model, python_calls, options):
    mask = MaskSet.random(model, density=0.5)
    optimizer = SparseAdamW(model, mask)
    backward(model, **options)
    backward(model, **options)
    assert_gathered(model, optimizer, mask, times=2)
    assert python_calls == []


def test_python_begins_the_next_step(model, python_calls):
    mask = MaskSet.random(model, density=0.5)
    optimizer = SparseAdamW(model, mask, max_grad_norm=1.0)
    backward(model)
    optimizer.step()
    backward(model)  # without zero_grad(): what was stepped with is forgotten when the first gradient comes
    assert len(python_calls) == 1
    assert_gathered(model, optimizer, mask)
    optimizer.step()
    optimizer.zero_grad()
    backward(model)
    assert len(python_calls) == 1
    assert_gathered(model, optimizer, mask)


@pytest.mark.parametrize("first", [True, False], ids=["before-ours", "after-ours"])
def test_hooks_of_others_run_in_their_order(model, python_calls, first):
    seen = []
    mask, weight = MaskSet.random(model, density=0.5), model[0].weight
    handle = None
    if first:
        handle = weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad is not None))
    optimizer = SparseAdamW(model, mask)
    if not first:
        handle = weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad is not None))
    backward(model)
    assert_gathered(model, optimizer, mask)
    assert seen == [first]
    assert python_calls == ["0.weight"]
    handle.remove()
    backward(model)
    assert_gathered(model, optimizer, mask, times=2)
    assert python_calls == ["0.weight"] and seen == [first]


def test_a_new_mask_and_a_new_optimizer(model, python_calls):
    first, second = MaskSet.random(model, density=0.5, seed=1), MaskSet.random(model, density=0.5, seed=2)
    optimizer = SparseAdamW(model, first)
    backward(model)
    optimizer.zero_grad()
    optimizer.set_mask(second)
    backward(model)
    assert_gathered(model, optimizer, second)
    optimizer.close()
    backward(model)
    assert all(p.grad is not None for p in model.parameters())
    model.zero_grad()
    optimizer = SparseAdamW(model, first)
    backward(model)
    assert_gathered(model, optimizer, first)
    assert python_calls == []


def test_an_optimizer_that_is_gone_leaves_gradients_alone(model):
    optimizer = SparseAdamW(model, MaskSet.random(model, density=0.5))
    backward(model)
    assert model[0].weight.grad is None
    del optimizer
    gc.collect()
    backward(model)
    assert model[0].weight.grad is not None


def test_a_model_without_its_optimizer_is_freed(device):
    """A native hook that held buffers or parameters would close a circle that no garbage collector sees."""
    import weakref

    model = torch.nn.Linear(12, 16).to(device)
    optimizer = SparseAdamW(model, MaskSet.random(model, density=0.5))
    weight = weakref.ref(model.weight)
    del optimizer, model
    gc.collect()
    assert weight() is None


def test_gradients_that_must_not_come_are_refused(model, python_calls):
    optimizer = SparseAdamW(model, MaskSet.random(model, density=0.5))
    with optimizer.base_weights(), pytest.raises(RuntimeError, match="arrived inside base_weights"):
        backward(model)
    backward(model)
    optimizer.clip_grad_norm_(1.0)
    with pytest.raises(RuntimeError, match="arrived after clip_grad_norm_"):
        backward(model)
    assert len(python_calls) == 2
