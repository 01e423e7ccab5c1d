"""What trainers do around an optimizer: clear gradients, autocast, checkpoint, compile, swap data, save at any time."""

import copy
from itertools import pairwise

import pytest
import torch
from small_runs import loss_of, make_model, same
from torch.utils.checkpoint import checkpoint

from sparse_opt import MaskSet, SparseAdamW, SparseSGD
from sparse_opt.errors import MaskError


@pytest.mark.parametrize("clear", ["optimizer", "model"])
def test_gradients_begin_anew_after_a_step_whoever_clears_them(clear, device):
    """transformers' Trainer calls model.zero_grad() alone, which finds no gradient to clear."""
    model = make_model(device)
    optimizer = SparseSGD(model, MaskSet.random(model, density=0.4), lr=0.0)
    norms = []
    for _ in range(3):
        loss_of(model, 0).backward()
        loss_of(model, 1).backward()
        norms.append(optimizer.clip_grad_norm_(1.0))
        optimizer.step()
        optimizer.zero_grad() if clear == "optimizer" else model.zero_grad()
    assert all(torch.equal(a, b) for a, b in pairwise(norms))


def test_gradients_from_before_the_optimizer_are_dropped(device):
    model, fresh = make_model(device), make_model(device)
    mask = MaskSet.random(model, density=0.4)
    (1000 * loss_of(model, 0)).backward()
    optimizers = [SparseAdamW(m, mask) for m in (model, fresh)]
    for m in (model, fresh):
        loss_of(m, 1).backward()
    assert torch.equal(optimizers[0].clip_grad_norm_(1.0), optimizers[1].clip_grad_norm_(1.0))


@pytest.mark.parametrize("order", ["reference first", "policy first"])
def test_base_weights_under_autocast(order, device):
    model = make_model(device)
    start = copy.deepcopy(model)
    optimizer = SparseAdamW(model, MaskSet.random(model, density=0.4), lr=0.5)
    loss_of(model, 0).backward()
    optimizer.step()
    x = torch.randn(8, 12, device=device)
    with torch.autocast(device.type, torch.bfloat16):
        expected = start(x)
        now = copy.deepcopy(model)(x)

    def reference():
        with torch.no_grad(), optimizer.base_weights():
            return model(x)

    with torch.autocast(device.type, torch.bfloat16):
        if order == "reference first":
            ref, policy = reference(), model(x)
        else:
            policy, ref = model(x), reference()
    assert torch.equal(ref, expected)
    assert torch.equal(policy, now)
    assert not torch.equal(ref, policy)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_gradient_checkpointing(use_reentrant, device):
    plain, saving = make_model(device), make_model(device)
    mask = MaskSet.random(plain, density=0.4)
    optimizers = [SparseAdamW(m, mask, lr=1e-2) for m in (plain, saving)]
    x = torch.randn(8, 12, device=device, requires_grad=True)
    for _ in range(3):
        plain(x).square().mean().backward()
        checkpoint(saving, x, use_reentrant=use_reentrant).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert same(plain, saving)


def test_a_compiled_model_has_the_names_of_its_own(device):
    model = make_model(device)
    compiled = torch.compile(model, backend="aot_eager")
    optimizer = SparseAdamW(compiled, MaskSet.random(model, density=0.4), lr=1e-2)
    plain = make_model(device)
    other = SparseAdamW(plain, optimizer.mask, lr=1e-2)
    for seed in range(2):
        for m, o in ((compiled, optimizer), (plain, other)):
            loss_of(m, seed).backward()
            o.step()
            o.zero_grad()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p, q)  # the compiler may fuse and so round otherwise


@pytest.mark.parametrize("pattern", ["element", "tile64"])
def test_a_gradient_of_a_parameter_whose_data_grew_names_it(pattern, device):
    model = torch.nn.Sequential(torch.nn.Linear(64, 128)).to(device)
    optimizer = SparseAdamW(model, MaskSet.random(model, density=0.6, pattern=pattern), tile_backward=None)
    model[0].weight.data = torch.randn(256, 64, device=device)
    model[0].bias.data = torch.randn(256, device=device)
    with pytest.raises(ValueError, match=r"the gradient of '0.(weight|bias)' has \d+ elements, but .* had \d+ when"):
        loss_of(model, 0).backward()
    optimizer.close()


@pytest.mark.parametrize("grads", ["compact", "dense"])
def test_a_model_that_was_cast_after_the_optimizer_was_built(sparse_optimizer, grads, device):
    model = make_model(device)
    optimizer = sparse_optimizer(model, MaskSet.random(model, density=0.4), lr=1e-2, grads=grads)
    model.bfloat16()
    loss_of(model, 0).backward()
    message = r"'0.weight' is torch.bfloat16, but was torch.float32 when its mask was bound: cast the model before"
    with pytest.raises(ValueError, match=message):
        optimizer.step()
    with pytest.raises(RuntimeError, match="base_weights: " + message), optimizer.base_weights():
        pass
    optimizer.rebind(model)
    before = model[0].weight.detach().clone()
    loss_of(model, 0).backward()
    optimizer.step()
    assert not torch.equal(model[0].weight, before)
    with optimizer.base_weights():
        assert torch.equal(model[0].weight, before)


def test_a_refused_mask_changes_nothing(device):
    model, twin = make_model(device), make_model(device)
    mask = MaskSet.random(model, density=0.4)
    optimizer, other = SparseAdamW(model, mask, lr=1e-2), SparseAdamW(twin, mask, lr=1e-2)
    with pytest.raises(MaskError):
        optimizer.set_mask(MaskSet.from_bool({"foreign": torch.ones(3, dtype=torch.bool)}))
    empty = MaskSet.from_bool({n: torch.zeros(p.shape, dtype=torch.bool) for n, p in model.named_parameters()})
    with pytest.raises(ValueError, match="no active element"):
        optimizer.set_mask(empty)
    assert optimizer.mask == other.mask
    for m, o in ((model, optimizer), (twin, other)):
        loss_of(m, 0).backward()
        o.step()
    assert same(model, twin)


def test_amp_scaling_with_masks_and_distributed_checkpoints(sparse_optimizer, device):
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

    model = make_model(device)
    optimizer = sparse_optimizer(model, MaskSet.random(model, density=0.4), lr=1e-2, amp_scaling=True)
    scaler = torch.amp.GradScaler(device.type, init_scale=2.0**10)
    for seed in range(3):
        scaler.scale(loss_of(model, seed)).backward()
        scaler.scale(loss_of(model, seed + 10)).backward()
        assert len(optimizer.param_groups[0]["params"]) == 5  # the scaler_proxy, while there are unused gradients
        scaler.step(optimizer)
        scaler.update()
        assert len(optimizer.param_groups[0]["params"]) == 4
        saved = copy.deepcopy(get_optimizer_state_dict(model, optimizer))
        set_optimizer_state_dict(model, optimizer, saved)
        optimizer.set_mask(MaskSet.random(model, density=0.3, seed=seed))
    assert all(p.isfinite().all() for p in model.parameters())


def test_momentum_turned_on_later_is_refused(device):
    model = make_model(device)
    optimizer = SparseSGD(model, MaskSet.random(model, density=0.4), lr=0.1)
    optimizer.param_groups[0]["momentum"] = 0.9
    loss_of(model, 0).backward()
    with pytest.raises(RuntimeError, match="was 0 when the optimizer was built"):
        optimizer.step()


def test_a_mask_set_after_a_gather_that_failed_leaves_the_groups_as_they_were(device, monkeypatch):
    model = make_model(device)
    params = list(model.parameters())
    optimizer = SparseAdamW(model, MaskSet.random(model, density=0.4), amp_scaling=True)

    def fail(*args):
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patched:
        for buffer in optimizer.gradient_buffers:
            patched.setattr(buffer, "add_dense", fail)
        with pytest.raises(RuntimeError, match="out of memory"):
            loss_of(model, 0).backward()
    optimizer.set_mask(MaskSet.random(model, density=0.3, seed=1))
    assert [id(p) for p in optimizer.param_groups[0]["params"]] == [id(p) for p in params]
    loss_of(model, 1).backward()
    optimizer.step()
    SparseAdamW(model, optimizer.mask, amp_scaling=True).load_state_dict(optimizer.state_dict())
