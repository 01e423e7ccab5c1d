"""A step that raises has written nothing: every bucket is checked before the first one changes."""

import pytest
import torch
from small_runs import assert_same, snapshot
from torch import nn

from sparse_opt import MaskSet, SparseAdamW, SparseSGD
from sparse_opt.optim import OPTIMIZERS

OPTIONS = {SparseAdamW: {"betas": (0.8, 0.9)}, SparseSGD: {"momentum": 0.9}}


def make_params(device):
    """Three parameters in two groups and, since two dtypes are in the second, three buckets."""
    generator = torch.Generator().manual_seed(0)
    dtypes = {"a": torch.float32, "b": torch.float32, "c": torch.bfloat16}
    return {n: nn.Parameter(torch.randn(6, 4, generator=generator).to(device, d)) for n, d in dtypes.items()}


def build(kind, params, backend, **options):
    mask = MaskSet.random(params, density=0.5)
    groups = [{"params": [("a", params["a"])]}, {"params": [(n, params[n]) for n in "bc"], "weight_decay": 0.1}]
    return kind(groups, mask, backend=backend, **{"lr": 1e-2, **OPTIONS.get(kind, {}), **options})


def backward(params, seed):
    generator = torch.Generator().manual_seed(seed)
    sum((p * torch.randn(p.shape, generator=generator).to(p)).float().sum() for p in params.values()).backward()


def option(name, value):
    def damage(params, optimizer):
        group = optimizer.param_groups[1]
        before = group[name]
        if value is KeyError:
            del group[name]
        else:
            group[name] = value
        return lambda: group.__setitem__(name, before)

    return damage


def data(change):
    """For the last parameter; a parameter of the second bucket would behave the same."""

    def damage(params, optimizer):
        before = params["c"].data
        params["c"].data = change(before)

        def repair():
            params["c"].data = before

        return repair

    return damage


DAMAGES = {
    "lr-text": (option("lr", "x"), r"parameter group 1: lr is 'x', expected a finite number >= 0"),
    "lr-gone": (option("lr", KeyError), "group 1 has no option 'lr'"),
    "size": (data(lambda t: t[:2].clone()), "'c' has 8 elements, but had 24 when its mask was bound"),
    "strides": (data(lambda t: t.t().contiguous().t()), r"'c' has strides \(1, 6\), expected a contiguous"),
    "dtype": (data(torch.Tensor.double), "'c' is torch.float64, but was torch.(bfloat16|float32) when its mask"),
}
# (option, value, the end of the error)
BAD_OPTIONS = [
    ("lr", 1e39, r"is 1e\+39, expected a finite number >= 0 in the range of fp32"),
    ("lr", True, "is True, expected a finite number"),
    ("lr", torch.ones(2), r"is a torch.float32 tensor of shape \[2\] on .*, expected .* one floating-point element"),
    ("weight_decay", [1], r"is \[1\]"),
    ("seed", 2**32, r"is 4294967296, expected an integer, 0 <= seed < 2\*\*32"),
    ("betas", (0.9, 1.0), r"is \(0.9, 1.0\)"),
    ("eps", -1e-8, "is -1e-08"),
    ("momentum", "x", "is 'x'"),
    ("nesterov", 2, "is 2, expected True or False"),
]
CASES = [
    *[(SparseAdamW, name, {}) for name in DAMAGES],
    *[(kind, name, {}) for kind in OPTIMIZERS for name in ("lr-text", "size") if kind is not SparseAdamW],
    *[(SparseAdamW, name, {"max_grad_norm": 0.1}) for name in ("lr-text", "size")],
    *[(SparseAdamW, name, {"master_weights": True}) for name in ("lr-text", "size")],
]


@pytest.mark.parametrize(("name", "value", "message"), BAD_OPTIONS, ids=[f"{c[0]}-{c[1]}"[:30] for c in BAD_OPTIONS])
def test_the_values_of_options(name, value, message, device):
    kind = SparseSGD if name in ("momentum", "dampening", "nesterov") else SparseAdamW
    params = make_params(device)
    optimizer = build(kind, params, None)
    optimizer.param_groups[1][name] = value
    with pytest.raises(ValueError, match=f"^parameter group 1: {name} {message}"):
        optimizer.step()


def check_refused(kind, damage, message, error, device, backend, **options):
    params, twins = make_params(device), make_params(device)
    optimizer, undisturbed = build(kind, params, backend, **options), build(kind, twins, backend, **options)
    for seed in range(2):
        for named, o in ((params, optimizer), (twins, undisturbed)):
            backward(named, seed)
            if seed == 0:
                o.step()
                o.zero_grad()
    before = snapshot(params.values(), optimizer)
    norm = optimizer.grad_norm
    repair = damage(params, optimizer)
    for _ in range(2):
        with pytest.raises(error, match=message) as raised:
            optimizer.step()
        assert "\n" not in str(raised.value)
    for part in repair if isinstance(repair, tuple) else (repair,):
        part()
    assert_same(snapshot(params.values(), optimizer), before)
    assert optimizer.grad_norm is norm
    for o in (optimizer, undisturbed):
        o.step()
        o.zero_grad()
    assert_same(snapshot(params.values(), optimizer), snapshot(twins.values(), undisturbed))
    for named, o in ((params, optimizer), (twins, undisturbed)):
        backward(named, 5)
        o.step()
    assert_same(snapshot(params.values(), optimizer), snapshot(twins.values(), undisturbed))


@pytest.mark.parametrize("grads", ["compact", "dense"])
@pytest.mark.parametrize(("kind", "name", "options"), CASES, ids=lambda value: getattr(value, "__name__", None))
def test_a_bad_second_group(kind, name, options, grads, device, backend):
    check_refused(kind, *DAMAGES[name], ValueError, device, backend, grads=grads, **options)


def test_options_that_contradict_each_other(device, backend):
    def damage(params, optimizer):
        return option("nesterov", True)(params, optimizer), option("dampening", 0.5)(params, optimizer)

    check_refused(SparseSGD, damage, "group 1: nesterov .* dampening", ValueError, device, backend)


def test_a_dense_gradient_that_no_hook_has_seen(device, backend):
    def damage(params, optimizer):
        params["c"].grad = torch.ones_like(params["c"])
        return lambda: setattr(params["c"], "grad", None)

    check_refused(SparseAdamW, damage, "c have dense gradients that no hook", RuntimeError, device, backend)


def grad_data(change):
    def damage(params, optimizer):
        before = params["c"].grad
        params["c"].grad = torch.empty_like(before)
        params["c"].grad.data = change(before)
        return lambda: setattr(params["c"], "grad", before)

    return damage


FOREIGN = {
    "shape": (grad_data(lambda g: g[:2].clone()), r"gradient of 'c' has shape \[2, 4\], expected \[6, 4\]"),
    "same-numel": (grad_data(lambda g: g.view(4, 6)), r"gradient of 'c' has shape \[4, 6\]"),
    "dtype": (grad_data(torch.Tensor.double), "gradient of 'c' is torch.float64, expected bfloat16"),
}


@pytest.mark.parametrize("options", [{}, {"max_grad_norm": 0.1}], ids=["", "clipped"])
@pytest.mark.parametrize("name", FOREIGN)
def test_a_foreign_dense_gradient(name, options, device, backend):
    check_refused(SparseAdamW, *FOREIGN[name], ValueError, device, backend, grads="dense", **options)


def test_gradients_of_two_dtypes_in_one_bucket(device, backend):
    params = make_params(device)
    mask = MaskSet.random(params, density=0.5)
    named = [(n, params[n]) for n in "ab"]
    optimizer = SparseAdamW(named, MaskSet({n: mask[n] for n in "ab"}, dict.fromkeys("ab", (6, 4))), grads="dense")
    backward(params, 0)
    params["b"].grad.data = params["b"].grad.data.bfloat16()
    before = [p.detach().clone() for _, p in named]
    with pytest.raises(ValueError, match="gradient of 'b' is torch.bfloat16, but that of 'a' is torch.float32"):
        optimizer.step()
    assert all(torch.equal(p, q) for (_, p), q in zip(named, before, strict=True))


@pytest.mark.parametrize("clip", [False, True], ids=["step", "clip"])
@pytest.mark.parametrize("grads", ["compact", "dense"])
def test_a_sparse_embedding(grads, clip, device, backend):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Linear(4, 2)).to(device)
    optimizer = SparseAdamW(model, MaskSet.random(model, density=0.5), grads=grads, backend=backend)
    before = [p.detach().clone() for p in model.parameters()]
    message = r"the gradient of '0.weight' is torch.sparse_coo, expected a strided tensor"

    def run():
        model(torch.tensor([1, 2], device=device)).sum().backward()  # a hook refuses it, with grads="compact"
        optimizer.clip_grad_norm_(1.0) if clip else optimizer.step()

    with pytest.raises(RuntimeError, match=message) as raised:
        run()
    assert "\n" not in str(raised.value)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("grads", ["compact", "dense"])
def test_a_bad_bucket_on_another_device(grads):
    """The first bucket is on the CPU, the second on a GPU, whose parameter has another size by then."""
    params = {"a": nn.Parameter(torch.ones(6, 4)), "b": nn.Parameter(torch.ones(6, 4, device="cuda"))}
    mask = MaskSet.from_bool({n: torch.ones(6, 4, dtype=torch.bool) for n in params})
    optimizer = SparseAdamW(list(params.items()), mask, grads=grads)
    for p in params.values():
        p.sum().backward()
    held = params["b"].data
    params["b"].data = held[:2].clone()
    with pytest.raises(ValueError, match="'b' has 8 elements, but had 24 when its mask was bound"):
        optimizer.step()
    assert bool((params["a"] == 1).all()) and not any(int(s["step"]) for s in optimizer.state.values())
    params["b"].data = held
    optimizer.step()
    assert torch.equal(params["a"], params["b"].cpu()) and not bool((params["a"] == 1).all())
