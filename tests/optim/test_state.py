"""Base weights, saving and resuming, changing the mask, freezing, and refused arguments."""

import copy
import io
import os

import pytest
import torch
from small_runs import make_model, train

from sparse_opt import MaskSet, SparseAdamW
from sparse_opt.errors import MaskError

# 2.weight has rows of whole runs of 16, and 0.weight does not.
PATTERNS = ("element", "run16")
# The steps of a run that is resumed, and after how many it is saved: fewer under Triton's interpreter, which is slow.
N_STEPS, SAVED_AT = (5, 2) if os.environ.get("TRITON_INTERPRET") == "1" else (10, 4)


def bits(model):
    return {n: p.detach().clone() for n, p in model.named_parameters()}


def saved_state(model, optimizer):
    """A copy of what state_dict has of each parameter, by name."""
    saved = copy.deepcopy(optimizer.state_dict())
    names = saved["param_groups"][0]["param_names"]
    return {names[key]: state for key, state in saved["state"].items()}


def same(a, b):
    return all(torch.equal(a[n], b[n]) for n in a)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("master", [False, True])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_base_weights_are_w0_inside_and_the_same_bits_outside(sparse_optimizer, pattern, dtype, master, device):
    model = make_model(device, dtype)
    start = bits(model)
    mask = MaskSet.random(model, density=0.5, pattern=pattern)
    optimizer = sparse_optimizer(model, mask, lr=1e-2, master_weights=master)
    train(model, optimizer, range(5))
    now = bits(model)
    assert not same(now, start)
    with optimizer.base_weights():
        assert same(bits(model), start)
    assert same(bits(model), now)
    with pytest.raises(KeyError), optimizer.base_weights():
        raise KeyError("inside")
    assert same(bits(model), now)
    train(model, optimizer, [5])
    with optimizer.base_weights():
        assert same(bits(model), start)


def test_inside_base_weights_other_calls_are_refused(sparse_optimizer, device):
    model = make_model(device)
    optimizer = sparse_optimizer(model, MaskSet.random(model, density=0.3))
    with optimizer.base_weights():
        for call in (
            optimizer.step,
            optimizer.state_dict,
            lambda: optimizer.clip_grad_norm_(1.0),
            lambda: optimizer.set_mask(optimizer.mask),
            lambda: optimizer.base_weights().__enter__(),
        ):
            with pytest.raises(RuntimeError, match="holds its base weights"):
                call()


def test_a_step_invalidates_graphs_as_in_torch(sparse_optimizer, device):
    model = make_model(device)
    optimizer = sparse_optimizer(model, MaskSet.random(model, density=0.3))
    stale = model(torch.randn(2, 12, device=device)).square().sum()
    train(model, optimizer, [0])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        stale.backward()


@pytest.mark.parametrize(
    "options", [{}, {"state_dtype": torch.bfloat16, "stochastic_rounding": True}], ids=["fp32", "sr"]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("master", [False, True])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_resumed_run_is_the_uninterrupted_one(sparse_optimizer, pattern, options, dtype, master, device):
    def build():
        model = make_model(device, dtype)
        mask = MaskSet.random(model, density=0.5, pattern=pattern)
        return model, sparse_optimizer(
            model, mask, lr=1e-2, max_grad_norm=1.0, master_weights=master, seed=5, **options
        )

    whole, optimizer = build()
    start = bits(whole)
    train(whole, optimizer, range(N_STEPS))

    first, optimizer_a = build()
    train(first, optimizer_a, range(SAVED_AT))
    file = io.BytesIO()
    torch.save({"model": first.state_dict(), "optimizer": optimizer_a.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    second = make_model(device, dtype)
    second.load_state_dict(saved["model"])
    optimizer_b = sparse_optimizer(
        second, optimizer.mask, lr=0.5, max_grad_norm=1.0, master_weights=master, seed=99, **options
    )  # lr and seed come from the state
    optimizer_b.load_state_dict(saved["optimizer"])
    train(second, optimizer_b, range(SAVED_AT, N_STEPS))
    assert same(bits(second), bits(whole))
    for key, state in optimizer.state_dict()["state"].items():
        other = optimizer_b.state_dict()["state"][key]
        assert state.keys() == other.keys()
        for name, value in state.items():
            assert torch.equal(value, other[name]), name
            assert value.dtype == other[name].dtype
        assert state["indices"].dtype == torch.int32
    with optimizer_b.base_weights():
        assert same(bits(second), start)  # W0 of the run, not of the process


@pytest.mark.parametrize("pattern", PATTERNS)
def test_set_mask_carries_what_is_kept(sparse_optimizer, pattern, device):
    model = make_model(device, torch.bfloat16)
    start = bits(model)
    old = MaskSet.random(model, density=0.5, pattern=pattern, seed=1)
    new = MaskSet.random(model, density=0.5, pattern=pattern, seed=2)
    optimizer = sparse_optimizer(model, old, lr=1e-2, master_weights=True)
    train(model, optimizer, range(4))
    before = saved_state(model, optimizer)
    now = bits(model)
    optimizer.set_mask(new)
    after = saved_state(model, optimizer)
    for name in before:
        state = after[name]
        position = {int(j): s for s, j in enumerate(before[name]["indices"])}
        assert state["step"] == before[name]["step"]
        for slot, j in enumerate(state["indices"].tolist()):
            kept = position.get(j)
            for key in state.keys() - {"step", "indices", "master", "base", "base_indices"}:  # the moments
                assert state[key][slot] == (0.0 if kept is None else before[name][key][kept])
            master = now[name].view(-1)[j].float() if kept is None else before[name]["master"][kept]
            assert state["master"][slot] == master
    train(model, optimizer, range(4, 8))
    for name, p in model.named_parameters():
        ever = old.bool(name) | new.bool(name)
        assert torch.equal(p.cpu()[~ever], start[name].cpu()[~ever])
        only_old = old.bool(name) & ~new.bool(name)
        assert torch.equal(p.cpu()[only_old], now[name].cpu()[only_old])  # unchanged
    with optimizer.base_weights():
        assert same(bits(model), start)

    saved = copy.deepcopy(optimizer.state_dict())  # base weights of elements that left the mask are saved too
    again = make_model(device, torch.bfloat16)
    again.load_state_dict(model.state_dict())
    resumed = sparse_optimizer(again, new, lr=1e-2, master_weights=True)
    resumed.load_state_dict(saved)
    with resumed.base_weights():
        assert same(bits(again), start)


def test_set_mask_moves_between_parameters_and_refuses_unused_gradients(device):
    model = make_model(device)
    empty = {n: torch.zeros(p.shape, dtype=torch.bool) for n, p in model.named_parameters()}
    first = MaskSet.from_bool({**empty, "0.weight": torch.ones(16, 12, dtype=torch.bool)})
    second = MaskSet.from_bool({**empty, "2.weight": torch.ones(4, 16, dtype=torch.bool)})
    start = bits(model)
    optimizer = SparseAdamW(model, first, lr=1e-2)
    train(model, optimizer, range(2))
    moved = model[0].weight.detach().clone()
    model(torch.randn(2, 12, device=device)).sum().backward()
    with pytest.raises(RuntimeError, match="there are unused gradients"):
        optimizer.set_mask(second)
    optimizer.zero_grad()
    optimizer.set_mask(second)
    assert [p.requires_grad for p in model.parameters()] == [False, False, True, False]
    train(model, optimizer, range(2))
    assert torch.equal(model[0].weight, moved)
    assert not torch.equal(model[2].weight, start["2.weight"])
    with optimizer.base_weights():
        assert same(bits(model), start)


def test_inactive_parameters_are_frozen_and_close_undoes_it(device):
    model = make_model(device)
    mask = MaskSet.from_bool({"2.weight": torch.ones(4, 16, dtype=torch.bool)})
    optimizer = SparseAdamW(model, mask)
    assert [p.requires_grad for p in model.parameters()] == [False, False, True, False]
    optimizer.close()
    assert all(p.requires_grad for p in model.parameters())
    model(torch.randn(2, 12, device=device)).sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    with pytest.raises(RuntimeError, match="step: the optimizer is closed"):
        optimizer.step()
    untouched = SparseAdamW(model, mask, freeze_inactive=False)
    assert all(p.requires_grad for p in model.parameters())
    untouched.close()


def test_tied_weights_are_one_parameter(device):
    class Tied(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = torch.nn.Embedding(10, 6)
            self.head = torch.nn.Linear(6, 10, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, x):
            return self.head(self.embed(x))

    torch.manual_seed(0)
    model = Tied().to(device)
    picked = torch.rand(10, 6) < 0.5
    with pytest.raises(MaskError, match="head.weight is not a parameter of the model"):  # named_parameters() lacks it
        SparseAdamW(model.named_parameters(), MaskSet.from_bool({"head.weight": picked}))
    for name in ("embed.weight", "head.weight"):  # a mask may have either name
        optimizer = SparseAdamW(model, MaskSet.from_bool({name: picked}), lr=1e-2)
        assert list(optimizer.mask.names) == ["embed.weight"]
        assert optimizer.mask.nnz == int(picked.sum())
        before = model.embed.weight.detach().clone()
        x = torch.arange(10, device=device)
        model(x).square().sum().backward()
        reference = torch.autograd.grad(model(x).square().sum(), model.embed.weight)[0]
        # both uses of the weight have arrived in the one compact gradient, summed in one order or the other
        torch.testing.assert_close(
            optimizer.compact_grad(model.embed.weight), reference[picked.to(device)], rtol=1e-5, atol=1e-5
        )
        optimizer.step()
        assert ((model.embed.weight != before).cpu() == picked).all()
        optimizer.close()


def test_what_cannot_be_right_is_refused(device):
    model = make_model(device)
    mask = MaskSet.random(model, density=0.3)
    named = list(model.named_parameters())
    with pytest.raises(ValueError, match="more than one parameter group"):
        SparseAdamW([{"params": named}, {"params": named[:1]}], mask)
    with pytest.raises(ValueError, match="no active element"):
        SparseAdamW(model, MaskSet.from_bool({n: torch.zeros(p.shape, dtype=torch.bool) for n, p in named}))
    with pytest.raises(ValueError, match="no parameter names"):
        SparseAdamW(list(model.parameters()), mask)
    with pytest.raises(MaskError, match=r"other\.weight"):
        SparseAdamW(model, MaskSet.from_bool({"other.weight": torch.ones(3, dtype=torch.bool)}))
    with pytest.raises(MaskError, match=r"0\.weight"):
        SparseAdamW(model, MaskSet.from_bool({"0.weight": torch.ones(3, 3, dtype=torch.bool)}))
    model[0].weight.requires_grad_(False)
    with pytest.raises(ValueError, match="'0.weight', which does not require grad"):
        SparseAdamW(model, mask)
    model[0].weight.requires_grad_(True)
    with pytest.raises(ValueError, match="lr is -1"):
        SparseAdamW(model, mask, lr=-1.0)
    with pytest.raises(ValueError, match="grads is 'sparse'"):
        SparseAdamW(model, mask, grads="sparse")
    optimizer = SparseAdamW(model, mask)
    with pytest.raises(RuntimeError, match="the mask has fixed the parameter groups"):
        optimizer.add_param_group({"params": [("x", torch.nn.Parameter(torch.zeros(1)))]})
    with pytest.raises(TypeError, match="can't be copied or pickled"):
        copy.deepcopy(optimizer)
