"""Compact gradients: accumulation, clipping, freeing, GradScaler."""

import math

import numpy as np
import pytest
import torch

from sparse_opt import MaskSet, SparseAdamW

EPS32 = torch.finfo(torch.float32).eps


def make_model(device, width=16, depth=3):
    torch.manual_seed(0)
    return torch.nn.Sequential(*[torch.nn.Linear(width, width) for _ in range(depth)]).to(device)


def backward(model, seed, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(4, model[0].in_features, generator=generator).to(next(model.parameters()).device)
    (scale * model(x).square().mean()).backward()


def active_grads(model, mask):
    return {n: p.grad.view(-1)[mask[n].long().to(p.device)] for n, p in model.named_parameters()}


@pytest.mark.parametrize("pattern", ["element", "run16"])
def test_micro_batches_add_up_in_the_compact_buffer(pattern, device):
    dense, sparse = make_model(device), make_model(device)
    mask = MaskSet.random(sparse, density=0.5, pattern=pattern)
    optimizer = SparseAdamW(sparse, mask)
    for seed in range(3):
        backward(dense, seed)
        backward(sparse, seed)
        assert all(p.grad is None for p in sparse.parameters())
    for (name, p), expected in zip(sparse.named_parameters(), active_grads(dense, mask).values(), strict=True):
        assert torch.equal(optimizer.compact_grad(p), expected), name  # the same two fp32 additions
    optimizer.zero_grad()
    assert optimizer.compact_grad(next(sparse.parameters())) is None
    dense.zero_grad()
    backward(dense, 9)
    backward(sparse, 9)  # overwrites what zero_grad left in the buffer
    for (_, p), expected in zip(sparse.named_parameters(), active_grads(dense, mask).values(), strict=True):
        assert torch.equal(optimizer.compact_grad(p), expected)


def test_bf16_micro_batches_add_up_in_fp32(device):
    w = torch.nn.Parameter(torch.ones(64, device=device, dtype=torch.bfloat16))
    optimizer = SparseAdamW([("w", w)], MaskSet.from_bool({"w": torch.ones(64, dtype=torch.bool)}))
    for scale in (1.0, *[2.0**-9] * 64):  # each alone is lost when added to 1 in bf16
        (w * scale).sum().backward()
    assert torch.equal(optimizer.compact_grad(w), torch.full((64,), 1.125, device=device))


@pytest.mark.parametrize("grads", ["compact", "dense"])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e4])
@pytest.mark.parametrize("pattern", ["element", "run16"])
def test_clipping_equals_torch_over_the_active_gradients(sparse_optimizer, pattern, grads, scale, device):
    sparse, reference = make_model(device), make_model(device)
    mask = MaskSet.random(sparse, density=0.4, pattern=pattern)
    optimizer = sparse_optimizer(sparse, mask, lr=1e-2, grads=grads)
    theirs = sparse_optimizer(reference, mask, lr=1e-2, grads="dense")
    for seed in range(5):
        for model in (sparse, reference):
            backward(model, 2 * seed, scale)
            backward(model, 2 * seed + 1, scale)
        for name, p in reference.named_parameters():
            if p.requires_grad:
                p.grad.mul_(mask.bool(name).to(device))
        expected = torch.nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
        norm = optimizer.clip_grad_norm_(1.0)
        # Two orders of summing ~400 squares in fp32: each within sqrt(400) roundings.
        torch.testing.assert_close(norm, expected, rtol=20 * EPS32, atol=0)
        optimizer.step()
        theirs.step()
        optimizer.zero_grad()
        theirs.zero_grad()
    for p, q in zip(sparse.parameters(), reference.parameters(), strict=True):
        # Updates are of the size of lr times the clipped gradient, or of lr: so are the coefficient's errors.
        torch.testing.assert_close(p, q, rtol=4 * EPS32, atol=5 * 1e-2 * 100 * EPS32)


@pytest.mark.parametrize("grads", ["compact", "dense"])
def test_max_grad_norm_is_clip_grad_norm_in_the_step(sparse_optimizer, grads, device):
    models = make_model(device), make_model(device)
    mask = MaskSet.random(models[0], density=0.4)
    explicit = sparse_optimizer(models[0], mask, grads=grads)
    built_in = sparse_optimizer(models[1], mask, grads=grads, max_grad_norm=0.1)
    for seed in range(3):
        for model, optimizer in zip(models, (explicit, built_in), strict=True):
            optimizer.zero_grad()
            backward(model, seed)
            if optimizer is explicit:
                norm = optimizer.clip_grad_norm_(0.1)
            optimizer.step()
        assert torch.equal(norm, built_in.grad_norm)
    assert all(torch.equal(p, q) for p, q in zip(models[0].parameters(), models[1].parameters(), strict=True))


@pytest.mark.parametrize("norm", ["1", True, float("nan"), 10**400, torch.ones(2)], ids=str)
def test_norms_that_are_none_are_refused(norm, device):
    model = make_model(device)
    mask = MaskSet.random(model, density=0.4)
    with pytest.raises(ValueError, match="^max_grad_norm is .*, expected a number > 0, or None"):
        SparseAdamW(model, mask, max_grad_norm=norm)
    optimizer = SparseAdamW(model, mask)
    with pytest.raises(ValueError, match="^max_norm is .*, expected a number >= 0"):
        optimizer.clip_grad_norm_(norm)


@pytest.mark.parametrize("norm", [np.float32(0.5), np.int64(1), math.inf, 0])
def test_norms_of_every_type(norm, device):
    model, reference = make_model(device), make_model(device)
    optimizer = SparseAdamW(model, MaskSet.random(model, density=1.0), max_grad_norm=norm or None)
    for each in (model, reference):
        backward(each, 0)
    expected = torch.nn.utils.clip_grad_norm_(reference.parameters(), norm)
    torch.testing.assert_close(optimizer.clip_grad_norm_(norm), expected, rtol=20 * EPS32, atol=0)


def test_clipping_forgets_gradients_of_an_earlier_step(device):
    model = make_model(device)
    optimizer = SparseAdamW(model, MaskSet.random(model, density=0.4))
    backward(model, 0, 1e6)
    optimizer.zero_grad()
    model[2].weight.square().sum().backward()  # the others have no gradient this time
    index = optimizer.mask["2.weight"].long().to(device)
    expected = (2 * model[2].weight.detach()).view(-1)[index].norm()
    torch.testing.assert_close(optimizer.clip_grad_norm_(1.0), expected, rtol=20 * EPS32, atol=0)


@pytest.mark.parametrize(("pattern", "tiled"), [("element", None), ("tile64", True)])
def test_a_gradient_after_clipping_is_refused(pattern, tiled, device):
    model = make_model(device, width=64)
    optimizer = SparseAdamW(model, MaskSet.random(model, density=1.0, pattern=pattern), tile_backward=tiled)
    backward(model, 0)
    optimizer.clip_grad_norm_(1.0)
    with pytest.raises(RuntimeError, match=r"arrived after clip_grad_norm_\(\)"):
        backward(model, 1)


def test_error_if_nonfinite(device):
    model = make_model(device)
    optimizer = SparseAdamW(model, MaskSet.random(model, density=0.4))
    backward(model, 0, float("inf"))
    with pytest.raises(RuntimeError, match="norm of the active gradients is"):
        optimizer.clip_grad_norm_(1.0, error_if_nonfinite=True)


def strided_gradients(model):
    return sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)


@pytest.mark.parametrize("grads", ["compact", "dense"])
def test_dense_gradients_never_live_together_when_compact(grads, device):
    """Counts the bytes of live dense gradients whenever one is created: all of them, or one at a time."""
    model = make_model(device, depth=12)
    optimizer = SparseAdamW(model, MaskSet.random(model, density=0.1), grads=grads)
    alive = []
    for p in model.parameters():  # after the optimizer's hooks, and before: both moments of each gradient's life
        p.register_hook(lambda grad: alive.append(strided_gradients(model) + grad.nbytes))
        p.register_post_accumulate_grad_hook(lambda p: alive.append(strided_gradients(model)))
    for seed in range(2):
        backward(model, seed)
    total, largest = sum(p.nbytes for p in model.parameters()), max(p.nbytes for p in model.parameters())
    if grads == "dense":
        assert max(alive) >= total
    else:
        assert max(alive) == largest
        assert all(p.grad is None for p in model.parameters())
        assert optimizer.nbytes()["grad"] < 0.2 * total


@pytest.mark.parametrize(("pattern", "tiled"), [("element", None), ("tile64", True)])
def test_a_second_optimizer_on_the_same_parameter_is_refused_when_gradients_come(pattern, tiled, device):
    model = make_model(device, width=64)
    mask = MaskSet.random(model, density=1.0, pattern=pattern)
    first, second = (SparseAdamW(model, mask, tile_backward=tiled) for _ in range(2))
    with pytest.raises(RuntimeError, match="second sparse optimizer"):
        backward(model, 0)
    assert first.mask == second.mask


@pytest.mark.parametrize("grads", ["compact", "dense"])
@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("pattern", ["element", "run16"])
def test_grad_scaler(sparse_optimizer, pattern, grads, unscale, device):
    plain, scaled = make_model(device), make_model(device)
    mask = MaskSet.random(plain, density=0.5, pattern=pattern)
    a = sparse_optimizer(plain, mask, lr=1e-2, max_grad_norm=None if unscale else 0.5)
    b = sparse_optimizer(scaled, mask, lr=1e-2, grads=grads, amp_scaling=True, max_grad_norm=None if unscale else 0.5)
    scaler = torch.amp.GradScaler(device.type, init_scale=2.0**10, growth_interval=1000)
    x = torch.randn(4, 16, device=device)
    for step in range(6):
        for optimizer in (a, b):
            optimizer.zero_grad()
        overflow = step in (2, 3)
        plain(x).square().mean().backward()
        scaler.scale(scaled(x).square().mean() * (float("inf") if overflow else 1.0)).backward()
        norm = None
        if unscale:
            scaler.unscale_(b)
            norm = b.clip_grad_norm_(0.5)
        before = [p.detach().clone() for p in scaled.parameters()]
        scaler.step(b)
        scale = scaler.get_scale()
        scaler.update()
        if overflow:
            assert scaler.get_scale() == scale / 2
            assert all(torch.equal(p, q) for p, q in zip(scaled.parameters(), before, strict=True))
        else:
            if unscale:
                assert torch.equal(norm, a.clip_grad_norm_(0.5))  # powers of two scale exactly
            a.step()
        assert scaler.get_scale() == (scale / 2 if overflow else scale)
    assert all(torch.equal(p, q) for p, q in zip(plain.parameters(), scaled.parameters(), strict=True))
    assert len(b.state_dict()["param_groups"][0]["params"]) == 6  # the scaler_proxy is kept here


def test_grad_scaler_without_amp_scaling_is_refused(device):
    model = make_model(device)
    optimizer = SparseAdamW(model, MaskSet.random(model, density=0.4))
    scaler = torch.amp.GradScaler(device.type)
    scaler.scale(model(torch.randn(4, 16, device=device)).square().mean()).backward()
    with pytest.raises(RuntimeError, match="amp_scaling=True"):
        scaler.step(optimizer)


def test_nonfinite_gradients_without_a_scaler_reach_only_their_own_elements(sparse_optimizer, device):
    w = torch.nn.Parameter(torch.ones(8, device=device))
    optimizer = sparse_optimizer([("w", w)], MaskSet.from_bool({"w": torch.arange(8) < 6}))
    with torch.no_grad():
        w[0] = -torch.inf  # as a bias that masks something; decay must not make it NaN
    g = torch.ones(8, device=device)
    g[1], g[7] = float("nan"), float("nan")  # 7 is inactive
    (w * g).sum().backward()
    optimizer.step()
    assert w.isnan().tolist() == [False, True, *[False] * 6]
    assert w[7] == 1


def test_dense_gradients_that_are_not_contiguous(sparse_optimizer, device):
    models = [make_model(device), make_model(device)]
    mask = MaskSet.random(models[0], density=0.4)
    optimizers = [sparse_optimizer(m, mask, grads="dense") for m in models]
    for model, optimizer in zip(models, optimizers, strict=True):
        backward(model, 0)
        if model is models[0]:
            for p in model.parameters():
                if p.dim() == 2:
                    p.grad = p.grad.t().contiguous().t()
                    assert not p.grad.is_contiguous()
        optimizer.step()
    assert all(torch.equal(p, q) for p, q in zip(models[0].parameters(), models[1].parameters(), strict=True))


@pytest.mark.parametrize("grads", ["compact", "dense"])
def test_detach_leaves_the_model_alone_until_attach(grads, device):
    model = torch.nn.Sequential(torch.nn.Linear(12, 16), torch.nn.Linear(16, 8)).to(device, torch.bfloat16)
    mask = MaskSet.random({"0.weight": model[0].weight, "0.bias": model[0].bias}, density=0.5)
    optimizer = SparseAdamW(model, mask, lr=1e-2, grads=grads, master_weights=True)
    start = [p.detach().clone() for p in model.parameters()]

    def backward():
        model(torch.ones(3, 12, device=device, dtype=torch.bfloat16)).square().sum().backward()

    backward()
    optimizer.step()
    optimizer.detach()
    assert all(p.requires_grad for p in model.parameters())
    backward()
    assert all(p.grad is not None for p in model.parameters())
    model.zero_grad()
    with optimizer.base_weights():
        assert all(torch.equal(p, q) for p, q in zip(model.parameters(), start, strict=True))
    with torch.no_grad():
        model[0].weight.mul_(2)  # other code trains it
    optimizer.attach()
    assert not any(p.requires_grad for p in model[1].parameters())
    optimizer.zero_grad()
    changed = model[0].weight.detach().clone()
    backward()
    assert (model[0].weight.grad is None) == (grads == "compact")
    optimizer.step()
    moved = (model[0].weight.float() - changed.float()).abs()
    assert 0 < moved.max() < 0.1  # a step from the doubled weights, not back to the old masters
    optimizer.close()
    with pytest.raises(RuntimeError, match="attach: the optimizer is closed"):
        optimizer.attach()
