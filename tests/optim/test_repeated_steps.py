"""A step consumes the compact gradients: a second one without a backward pass between them does nothing."""

import copy

import pytest
import torch
from small_runs import assert_same, loss_of, make_model, snapshot

from sparse_opt import MaskSet, SparseAdamW, SparseSGD

OPTIONS = {
    "plain": {},
    "clipped": {"max_grad_norm": 0.1},
    "stochastic": {"stochastic_rounding": True, "state_dtype": torch.bfloat16},
    "master": {"master_weights": True},
}


def groups_of(model):
    """One for each layer, and so two buckets."""
    layers = [[(n, p) for n, p in model.named_parameters() if n.startswith(str(i))] for i in (0, 2)]
    return [{"params": layers[0]}, {"params": layers[1], "weight_decay": 0.5}]


def backward(model, seed=0):
    loss_of(model, seed).backward()


@pytest.mark.parametrize("options", OPTIONS)
def test_a_step_without_a_new_gradient_does_nothing(sparse_optimizer, options, backend, device):
    model = make_model(device, torch.bfloat16)
    mask = MaskSet.random(model, density=0.5)
    optimizer = sparse_optimizer(groups_of(model), mask, lr=1e-2, backend=backend, **OPTIONS[options])
    once = make_model(device, torch.bfloat16)
    other = sparse_optimizer(groups_of(once), mask, lr=1e-2, backend=backend, **OPTIONS[options])
    optimizer.step()  # before the first gradient
    assert not any(state["step"] for state in optimizer.state.values())
    for seed in range(3):
        backward(model, seed)
        optimizer.step()
        before = snapshot(model.parameters(), optimizer)
        model.zero_grad()
        optimizer.step()
        optimizer.zero_grad()
        optimizer.step()
        assert_same(snapshot(model.parameters(), optimizer), before)
        backward(once, seed)
        other.step()
    assert_same(
        snapshot(model.parameters(), optimizer), snapshot(once.parameters(), other)
    )  # random words included: they count steps


def test_only_parameters_with_a_new_gradient_move(backend, device):
    model = make_model(device)
    optimizer = SparseAdamW(groups_of(model), MaskSet.random(model, density=0.5), lr=1e-2, backend=backend)
    backward(model)
    optimizer.step()
    before = [p.detach().clone() for p in model.parameters()]
    model[2].weight.square().sum().backward()
    assert optimizer.compact_grad(model[0].weight) is None
    optimizer.step()
    moved = [not torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True)]
    assert moved == [False, False, True, False]
    assert [int(optimizer.state[p]["step"]) for p in model.parameters()] == [1, 1, 2, 1]


@pytest.mark.parametrize("grads", ["compact", "dense"])
def test_compact_gradients_are_readable_until_the_step(grads, backend, device):
    model = make_model(device)
    mask = MaskSet.random(model, density=0.5)
    optimizer = SparseAdamW(model, mask, grads=grads, backend=backend)
    backward(model)
    optimizer.clip_grad_norm_(1e9)
    found = [optimizer.compact_grad(p) for p in model.parameters()]
    if grads == "dense":
        assert found == [None] * 4
        return
    assert [g.numel() for g in found] == [mask[n].numel() for n in mask.names]
    optimizer.step()
    assert all(optimizer.compact_grad(p) is None for p in model.parameters())
    optimizer.zero_grad()
    assert all(optimizer.compact_grad(p) is None for p in model.parameters())


@pytest.mark.parametrize("grads", ["compact", "dense"])
def test_the_norm_of_no_gradients_is_zero_and_clips_nothing(grads, backend, device):
    """As torch.nn.utils.clip_grad_norm_, which is given no gradient then."""
    model, other = make_model(device), make_model(device)
    mask = MaskSet.random(model, density=0.5)
    optimizer = SparseAdamW(model, mask, grads=grads, backend=backend)
    unclipped = SparseAdamW(other, mask, grads=grads, backend=backend)
    for seed in range(2):
        norm = optimizer.clip_grad_norm_(1e-3)
        assert norm.item() == 0.0 and norm.dtype == torch.float32
        assert optimizer.grad_norm is norm
        for m, o in ((model, optimizer), (other, unclipped)):
            backward(m, seed)  # accepted: nothing was clipped
            o.step()
            m.zero_grad()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), other.parameters(), strict=True))


def test_dense_gradients_are_applied_again_as_in_torch(backend, device):
    models = [make_model(device) for _ in range(2)]
    mask = MaskSet.from_bool({n: torch.ones(p.shape, dtype=torch.bool) for n, p in models[0].named_parameters()})
    ours = SparseSGD(models[0], mask, lr=0.5, grads="dense", backend=backend)
    theirs = torch.optim.SGD(models[1].parameters(), lr=0.5)
    for model, optimizer in zip(models, (ours, theirs), strict=True):
        backward(model)
        optimizer.step()
        optimizer.step()
        optimizer.zero_grad()
        optimizer.step()
    for p, q in zip(*(m.parameters() for m in models), strict=True):
        torch.testing.assert_close(p, q, rtol=2.0**-22, atol=2.0**-24)


def test_a_step_that_the_scaler_refuses_consumes_the_gradients(backend, device):
    """Only the device knows whether the step is skipped; torch keeps the infinite gradients until zero_grad."""
    model = make_model(device)
    optimizer = SparseAdamW(model, MaskSet.random(model, density=0.5), lr=1e-2, amp_scaling=True, backend=backend)
    scaler = torch.amp.GradScaler(device.type, init_scale=2.0**10)
    before = snapshot(model.parameters(), optimizer)
    x = torch.ones(3, 12, device=device)
    scaler.scale(model(x).square().mean() * float("inf")).backward()
    scaler.step(optimizer)
    scaler.update()
    assert all(optimizer.compact_grad(p) is None for p in model.parameters())
    optimizer.step()
    assert_same(snapshot(model.parameters(), optimizer), before)
    scaler.scale(model(x).square().mean()).backward()  # starts again
    scaler.step(optimizer)
    assert all(p.isfinite().all() for p in model.parameters())
    assert all(int(state["step"]) == 1 for state in optimizer.state.values())


def test_state_and_mask_after_a_step(backend, device):
    """Consumed gradients are in no state, and no reason to refuse another mask."""
    model = make_model(device)
    optimizer = SparseAdamW(model, MaskSet.random(model, density=0.5), lr=1e-2, backend=backend)
    backward(model)
    optimizer.step()
    optimizer.set_mask(MaskSet.random(model, density=0.4, seed=1))
    before = snapshot(model.parameters(), optimizer)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    optimizer.step()
    assert_same(snapshot(model.parameters(), optimizer), before)
