"""indexed_adamw_ and indexed_sgd_ against torch.optim.AdamW and torch.optim.SGD, on every backend.

The backends share the reference's formulas, so comparing them with each other cannot find a wrong formula.
tests/optim/test_equivalence.py compares many steps of AdamW.
"""

from __future__ import annotations

import pytest
import torch

from sparse_opt import ops

ULP = 2.0**-24  # the largest relative error of one fp32 operation
BETAS = (0.0, 0.1, 0.3, 0.4999, 0.5, 0.5001, 0.9)
LR = 1e-3


@pytest.mark.parametrize("beta1", BETAS)
def test_adamw_averages_gradients_of_any_magnitude_as_torch_does(beta1, any_place):
    """exp_avg after two steps, for each pair of a first and a second gradient of one sign from 1e-8 to 1e4.

    No terms cancel: both libraries are within three roundings of the exact average, for the larger of the products is
    no larger than the result.
    """
    device, backend = any_place
    magnitudes = torch.logspace(-8, 4, 25)
    first, second = torch.cartesian_prod(magnitudes, magnitudes).to(device).unbind(1)
    first, second = torch.cat([first, -first]), torch.cat([second, -second])
    n = first.numel()
    indices, lr = torch.arange(n, dtype=torch.int32, device=device), torch.tensor([LR], device=device)
    p, exp_avg, exp_avg_sq = torch.zeros(3, n, device=device)
    theirs = torch.nn.Parameter(p.clone())
    optimizer = torch.optim.AdamW([theirs], lr=LR, betas=(beta1, 0.999), foreach=False, fused=False)
    for step, g in enumerate((first, second), start=1):
        steps = torch.tensor([float(step)], device=device)
        state = exp_avg, exp_avg_sq, lr, steps
        ops.indexed_adamw_([p], indices, [0], [n], *state, grad=g, beta1=beta1, backend=backend)
        theirs.grad = g
        optimizer.step()
    torch.testing.assert_close(exp_avg, optimizer.state[theirs]["exp_avg"], rtol=6 * ULP, atol=0)
    if beta1 == 0.0:
        assert torch.equal(exp_avg, second)


SGD_OPTIONS = (
    {"momentum": 0.9},
    {"momentum": 0.3, "dampening": 0.7, "weight_decay": 0.1},
    {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    {"momentum": 0.0, "dampening": 0.7},
)


@pytest.mark.parametrize("options", SGD_OPTIONS, ids=str)
def test_sgd_steps_as_torch_does(options, any_place):
    """Many steps on positive weights and gradients: each library rounds five times a step, for its buffer and weight.

    One weight is infinite, as a bias that masks something may be: without decay it must not become NaN. Without
    momentum there is no dampening either, and a buffer stays as it is.
    """
    device, backend = any_place
    n, steps = 100, 20
    generator = torch.Generator().manual_seed(0)
    start = (1 + torch.rand(n, generator=generator)).to(device)
    start[0] = -torch.inf
    p, theirs = start.clone(), torch.nn.Parameter(start.clone())
    optimizer = torch.optim.SGD([theirs], lr=LR, foreach=False, fused=False, **options)
    held = torch.full_like(start, 7.0)
    buffer, count, lr = held.clone(), torch.zeros(1, device=device), torch.tensor([LR], device=device)
    indices = torch.arange(n, dtype=torch.int32, device=device)
    for _ in range(steps):
        g = torch.rand(n, generator=generator).to(device)
        theirs.grad = g.clone()
        optimizer.step()
        count += 1
        ops.indexed_sgd_([p], indices, [0], [n], buffer, lr, count, grad=g, backend=backend, **options)
    # A buffer forgets a rounding by `momentum` a step, so it holds 1 / (1 - momentum) of them; a weight holds all, and
    # those of its buffer times the learning rate.
    rounding = 2 * 5 * ULP / (1 - options["momentum"])
    torch.testing.assert_close(p, theirs.detach(), rtol=steps * rounding, atol=0, equal_nan=True)
    assert options.get("weight_decay") or p[0] == -torch.inf
    if options["momentum"] == 0.0:
        assert torch.equal(buffer, held)
    else:
        expected = optimizer.state[theirs]["momentum_buffer"]
        torch.testing.assert_close(buffer[1:], expected[1:], rtol=rounding * (1 + steps * LR), atol=0)
