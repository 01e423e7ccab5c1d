"""The sparse optimizers against torch's dense ones with masked gradients, over many steps."""

import itertools
import os

import pytest
import torch

from sparse_opt import MaskSet, SparseAdamW, SparseSGD

# Under Triton's interpreter a step takes a thirtieth of a second.
STEPS = 60 if os.environ.get("TRITON_INTERPRET") == "1" else 300
EPS32 = torch.finfo(torch.float32).eps


def make_model(device, dtype=torch.float32):
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(13, 17), torch.nn.Tanh(), torch.nn.Linear(17, 3)).to(device, dtype)


def masks_of(model, mask):
    return {name: mask.bool(name).to(p.device) for name, p in model.named_parameters()}


def twins(device, **mask):
    """Two equal models, a random mask, its bool tensors, and the weights at the start."""
    dense, sparse = make_model(device), make_model(device)
    mask = MaskSet.random(sparse, **mask)
    return dense, sparse, mask, masks_of(dense, mask), {n: p.detach().clone() for n, p in dense.named_parameters()}


def dense_step(optimizer, model, active, start):
    """torch's optimizer with gradients times mask; what its decay did to inactive elements is undone."""
    for name, p in model.named_parameters():
        if p.grad is not None:
            p.grad.mul_(active[name])
    optimizer.step()
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(torch.where(active[name], p, start[name]))


def set_gradients(model, seed, used=lambda i: True):
    """The same pseudo-random gradients for any model of these shapes, through autograd, so that hooks run.

    Parameter i has one if `used(i)`.
    """
    generator = torch.Generator().manual_seed(seed)
    loss = 0.0
    for i, p in enumerate(model.parameters()):
        g = torch.randn(p.shape, generator=generator)
        loss = loss + (p * g.to(p.device, p.dtype)).sum() if used(i) else loss
    loss.backward()


PAIRS = {
    "adamw": (
        lambda params: torch.optim.AdamW(params, lr=1e-2, betas=(0.8, 0.95), weight_decay=0.1),
        lambda params, mask, **kw: SparseAdamW(params, mask, lr=1e-2, betas=(0.8, 0.95), weight_decay=0.1, **kw),
    ),
    "sgd": (
        lambda params: torch.optim.SGD(params, lr=1e-2, weight_decay=0.1),
        lambda params, mask, **kw: SparseSGD(params, mask, lr=1e-2, weight_decay=0.1, **kw),
    ),
    "sgd-nesterov": (
        lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.9, weight_decay=0.1, nesterov=True),
        lambda params, mask, **kw: SparseSGD(
            params, mask, lr=1e-2, momentum=0.9, weight_decay=0.1, nesterov=True, **kw
        ),
    ),
    "sgd-dampening": (
        lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.9, dampening=0.3),
        lambda params, mask, **kw: SparseSGD(params, mask, lr=1e-2, momentum=0.9, dampening=0.3, **kw),
    ),
}


@pytest.mark.parametrize("grads", ["compact", "dense"])
@pytest.mark.parametrize("pair", PAIRS)
def test_many_steps_equal_torch_in_fp32(pair, grads, device):
    dense, sparse, mask, active, start = twins(device, density=0.3, seed=1)
    theirs, ours = PAIRS[pair][0](dense.parameters()), PAIRS[pair][1](sparse, mask, grads=grads)
    for step in range(STEPS):
        set_gradients(dense, step)
        set_gradients(sparse, step)
        dense_step(theirs, dense, active, start)
        ours.step()
        theirs.zero_grad()
        ours.zero_grad()
    largest = max(p.abs().max().item() for p in dense.parameters())
    # Each of the two runs rounds every weight to nearest once or twice a step: a random walk of 2 * STEPS errors of up
    # to one unit in the last place, and 4 standard deviations of it.
    tolerance = 4 * (2 * STEPS) ** 0.5 * EPS32 * largest
    for (name, p), q in zip(sparse.named_parameters(), dense.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=tolerance, msg=lambda m, name=name: f"{name}: {m}")
        assert torch.equal(p[~active[name]], start[name][~active[name]])
        assert (p != start[name]).sum() == mask[name].numel()


def test_bf16_with_masters_is_the_fp32_run_rounded(device):
    start = make_model(device, torch.bfloat16)
    dense, sparse = make_model(device).to(torch.bfloat16).float(), start
    mask = MaskSet.random(sparse, density=0.3, seed=1)
    active = masks_of(dense, mask)
    held = {n: p.detach().clone() for n, p in dense.named_parameters()}
    theirs, ours = PAIRS["adamw"][0](dense.parameters()), PAIRS["adamw"][1](sparse, mask, master_weights=True)
    for step in range(STEPS):
        set_gradients(sparse, step)
        generator = torch.Generator().manual_seed(step)
        for p in dense.parameters():
            p.grad = torch.randn(p.shape, generator=generator).bfloat16().float().to(device)
        dense_step(theirs, dense, active, held)
        ours.step()
        ours.zero_grad()
    for p, q in zip(sparse.parameters(), dense.parameters(), strict=True):
        ulp = 2.0 ** (torch.frexp(q.bfloat16().float()).exponent - 8)  # of a bf16: 8 significant bits
        assert ((p.float() - q.bfloat16().float()).abs() <= ulp).all()
        assert (p.float() != q.bfloat16().float()).float().mean() < 0.01  # one ulp only where q is near a midpoint


def test_small_bf16_updates_vanish_unless_masters_or_stochastic_rounding_keep_them(device):
    torch.manual_seed(0)
    results = {}
    for name, options in {
        "nearest": {},
        "stochastic": {"stochastic_rounding": True, "seed": 7},
        "master": {"master_weights": True},
    }.items():
        model = torch.nn.ParameterDict({"w": torch.nn.Parameter(torch.ones(4096, device=device).bfloat16())})
        mask = MaskSet.from_bool({"w": torch.ones(4096, dtype=torch.bool)})
        optimizer = SparseSGD(model, mask, lr=1e-4, **options)  # bf16 has steps of 2^-8 below 1: updates of 1e-4 vanish
        for _ in range(50):
            model["w"].grad = None
            (model["w"] * torch.ones_like(model["w"])).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        results[name] = model["w"].float().mean().item()
    assert results["nearest"] == 1.0
    # 4096 weights, each off by less than one step of 2^-8: the mean is within 4 * 2^-8 / sqrt(4096) = 2.5e-4.
    assert abs(results["stochastic"] - (1 - 50e-4)) < 4 * 2**-8 / 4096**0.5
    assert abs(results["master"] - (1 - 50e-4)) <= 2**-9


def test_groups_of_any_seeds_round_independently(device):
    """Also seeds 1 and 0 of the first two groups; and the same seeds give the same bits again."""

    def rounded():
        params = {name: torch.nn.Parameter(torch.ones(4096, device=device).bfloat16()) for name in "abc"}
        mask = MaskSet.from_bool({name: torch.ones(4096, dtype=torch.bool) for name in params})
        seeds = {"a": 1, "b": 0, "c": 2**32 - 1}
        groups = [{"params": [(name, p)], "seed": seeds[name]} for name, p in params.items()]
        sum(p.sum() for p in params.values()).backward()
        optimizer = SparseSGD(groups, mask, lr=1e-3, stochastic_rounding=True, grads="dense")
        optimizer.step()
        return list(params.values())

    first, second = rounded(), rounded()
    assert all(torch.equal(p, q) for p, q in zip(first, second, strict=True))
    # A weight goes down with p = 1e-3 * 2^8, so two agree with p^2 + (1 - p)^2; 5 standard deviations of 4096 weights.
    agree = 0.256**2 + 0.744**2
    for p, q in itertools.combinations(first, 2):
        assert abs((p == q).float().mean().item() - agree) < 5 * (agree * (1 - agree) / 4096) ** 0.5


def test_parameter_groups_and_schedulers(device):
    dense, sparse, mask, active, start = twins(device, density=0.5, seed=3)

    def groups(model):
        named = list(model.named_parameters())
        return [
            {"params": [(n, p) for n, p in named if "weight" in n], "weight_decay": 0.3},
            {"params": [(n, p) for n, p in named if "bias" in n], "weight_decay": 0.0, "lr": 3e-2},
        ]

    theirs = torch.optim.AdamW(groups(dense), lr=1e-2)
    ours = SparseAdamW(groups(sparse), mask, lr=1e-2)
    schedules = [torch.optim.lr_scheduler.LambdaLR(o, lambda s: 0.9**s) for o in (theirs, ours)]
    for step in range(30):
        set_gradients(dense, step)
        set_gradients(sparse, step)
        dense_step(theirs, dense, active, start)
        ours.step()
        for o in (theirs, ours):
            o.zero_grad()
        for s in schedules:
            s.step()
    for p, q in zip(sparse.parameters(), dense.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=4 * 60**0.5 * EPS32 * q.abs().max().item())


def test_tensor_lr_and_closure(sparse_optimizer, device):
    model = make_model(device)
    mask = MaskSet.random(model, density=0.5, seed=3)
    reference = make_model(device)
    a = sparse_optimizer(model, mask, lr=torch.tensor(1e-2))
    b = sparse_optimizer(reference, mask, lr=1e-2)
    x = torch.randn(8, 13, device=device)

    def closure():
        a.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss

    for _ in range(3):
        loss = a.step(closure)
        b.zero_grad()
        other = reference(x).square().mean()
        other.backward()
        b.step()
        assert loss.item() == other.item()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), reference.parameters(), strict=True))
