from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from sparse_opt.trainers.policy.dense.adamw import DenseAdamW
from sparse_opt.trainers.policy.dense.sgd import DenseSGD

# An epsilon of the gradients' own size: with a smaller one Adam would not notice a gradient scaled by mistake.
OPTIONS = {"lr": 1e-3, "betas": (0.9, 0.99), "eps": 0.1, "weight_decay": 0.1}
OF_SGD = {"lr": 1e-2, "weight_decay": 0.1}
BOTH = [(DenseAdamW, torch.optim.AdamW, OPTIONS), (DenseSGD, torch.optim.SGD, OF_SGD)]
SHAPES = [(7, 5), (11,), (1,)]


def random_weights(dtype):
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]


def gradients(dtype, n_steps):
    generator = torch.Generator().manual_seed(1)
    return [[torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES] for _ in range(n_steps)]


@pytest.mark.parametrize(("dense", "torchs", "options"), BOTH)
@pytest.mark.parametrize("max_grad_norm", [None, 0.5])
def test_masters_are_torchs_fp32_weights_and_weights_are_the_masters_rounded(max_grad_norm, dense, torchs, options):
    weights = random_weights(torch.bfloat16)
    exact = [nn.Parameter(weight.detach().float()) for weight in weights]
    ours = dense(weights, **options, max_grad_norm=max_grad_norm, master_weights=True)
    theirs = torchs(exact, **options, fused=True)
    for step in gradients(torch.bfloat16, 50):
        for weight, grad in zip(weights, step, strict=True):
            weight.grad = grad.clone()
        if max_grad_norm is not None:
            norm = nn.utils.clip_grad_norm_(weights, max_grad_norm)
        for weight, parameter, grad in zip(weights, exact, step, strict=True):
            parameter.grad = weight.grad.float()  # clipped in bf16, where the gradients are
            weight.grad = grad.clone()
        ours.step()
        theirs.step()
        assert all(weight.grad is None for weight in weights)
        assert ours.grad_norm is None if max_grad_norm is None else torch.equal(ours.grad_norm, norm)
    for weight, parameter in zip(weights, exact, strict=True):
        assert torch.equal(weight, parameter.bfloat16())


def test_without_masters_it_is_torchs_adamw():
    weights, expected = random_weights(torch.bfloat16), random_weights(torch.bfloat16)
    ours = DenseAdamW(weights, **OPTIONS, max_grad_norm=0.5)
    theirs = torch.optim.AdamW(expected, **OPTIONS, fused=True)
    for step in gradients(torch.bfloat16, 20):
        for parameters in (weights, expected):
            for parameter, grad in zip(parameters, step, strict=True):
                parameter.grad = grad.clone()
        nn.utils.clip_grad_norm_(expected, 0.5)
        ours.step()
        theirs.step()
        ours.zero_grad()
        assert all(weight.grad is None for weight in weights)
    assert all(torch.equal(weight, parameter) for weight, parameter in zip(weights, expected, strict=True))


def test_masters_keep_updates_that_bf16_weights_lose():
    """Steps of 1e-4 down from 1.0, where bf16 weights are 2^-8 = 4e-3 apart below 1."""
    ends = {}
    for masters in (True, False):
        weight = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
        optimizer = DenseAdamW(
            [weight], **{**OPTIONS, "lr": 1e-4, "eps": 1e-8, "weight_decay": 0.0}, master_weights=masters
        )
        for _ in range(30):
            weight.grad = torch.ones(1, dtype=torch.bfloat16)
            optimizer.step()
        ends[masters] = weight.item()
    assert ends == {True: 1 - 2**-8, False: 1.0}  # 30 steps of 1e-4 are 0.003, nearest to one unit below


@pytest.mark.parametrize("masters", [True, False])
def test_a_restored_optimizer_continues_bit_for_bit(masters):
    steps = gradients(torch.bfloat16, 20)

    def run(weights, optimizer, steps):
        for step in steps:
            for weight, grad in zip(weights, step, strict=True):
                weight.grad = grad.clone()
            optimizer.step()

    straight = random_weights(torch.bfloat16)
    run(straight, DenseAdamW(straight, **OPTIONS, master_weights=masters), steps)
    weights = random_weights(torch.bfloat16)
    optimizer = DenseAdamW(weights, **OPTIONS, master_weights=masters)
    run(weights, optimizer, steps[:10])
    saved = copy.deepcopy(optimizer.state_dict())
    resumed = DenseAdamW(weights, **OPTIONS, master_weights=masters)
    resumed.load_state_dict(saved)
    run(weights, resumed, steps[10:])
    assert all(torch.equal(a, b) for a, b in zip(weights, straight, strict=True))
    with pytest.raises(ValueError, match="master_weights"):
        DenseAdamW(weights, **OPTIONS, master_weights=not masters).load_state_dict(saved)
