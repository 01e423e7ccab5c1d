"""indexed_adamw_ and indexed_sgd_ against torch.optim.AdamW and torch.optim.SGD, on every backend.

The backends share the reference's formulas, so comparing them with each other cannot find a wrong formula.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sparse_opt import ops

ULP = 2.0**-24  # the largest relative error of one fp32 operation
BETAS = (0.0, 0.1, 0.3, 0.4999, 0.5, 0.5001, 0.9)
LR = 1e-3


class OurAdamW:
    """One parameter, all of its elements active."""

    def __init__(self, p: Tensor, backend: str, **options: float) -> None:
        self.p, self.backend, self.options = p.clone(), backend, options
        self.exp_avg, self.exp_avg_sq = torch.zeros_like(p), torch.zeros_like(p)
        self.steps, self.lr = torch.zeros(1, device=p.device), torch.tensor([LR], device=p.device)

    def step(self, g: Tensor) -> None:
        n = g.numel()
        indices = torch.arange(n, dtype=torch.int32, device=g.device)
        self.steps += 1
        state = self.exp_avg, self.exp_avg_sq, self.lr, self.steps
        ops.indexed_adamw_([self.p], indices, [0], [n], *state, grad=g, backend=self.backend, **self.options)


class TorchAdamW:
    def __init__(self, p: Tensor, beta1: float, beta2: float, weight_decay: float) -> None:
        self.p = torch.nn.Parameter(p.clone())
        self.optimizer = torch.optim.AdamW(
            [self.p], lr=LR, betas=(beta1, beta2), weight_decay=weight_decay, foreach=False, fused=False
        )

    def step(self, g: Tensor) -> None:
        self.p.grad = g
        self.optimizer.step()

    def state(self, name: str) -> Tensor:
        return self.optimizer.state[self.p][name]


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
    ours = OurAdamW(torch.zeros_like(first), backend, beta1=beta1)
    theirs = TorchAdamW(torch.zeros_like(first), beta1, 0.999, 0.01)
    for g in (first, second):
        for optimizer in (ours, theirs):
            optimizer.step(g)
    torch.testing.assert_close(ours.exp_avg, theirs.state("exp_avg"), rtol=6 * ULP, atol=0)
    if beta1 == 0.0:
        assert torch.equal(ours.exp_avg, second)


@pytest.mark.parametrize("beta2", [0.0, 0.9])
@pytest.mark.parametrize("beta1", BETAS)
def test_adamw_steps_as_torch_does(beta1, beta2, any_place):
    """Many steps on positive gradients that jump between magnitudes, so that all errors are relative.

    An average forgets its errors as it forgets its gradients: three roundings a step add up to 3 / (1 - beta) of them
    in each library. The parameter's update has half the error of exp_avg_sq, that of exp_avg and some roundings.
    """
    device, backend = any_place
    steps = 40
    generator = torch.Generator().manual_seed(0)
    p = torch.randn(300, generator=generator).to(device)
    ours = OurAdamW(p, backend, beta1=beta1, beta2=beta2, weight_decay=0.1)
    theirs = TorchAdamW(p, beta1, beta2, 0.1)
    moved = torch.zeros_like(p)
    for _ in range(steps):
        g = (10.0 ** (12 * torch.rand(300, generator=generator) - 8)).to(device)
        before = theirs.p.detach().clone()
        for optimizer in (ours, theirs):
            optimizer.step(g)
        moved += (theirs.p.detach() - before).abs()
    first, second = 6 / (1 - beta1) * ULP, 6 / (1 - beta2) * ULP
    torch.testing.assert_close(ours.exp_avg, theirs.state("exp_avg"), rtol=first, atol=0)
    torch.testing.assert_close(ours.exp_avg_sq, theirs.state("exp_avg_sq"), rtol=second, atol=0)
    error = (ours.p - theirs.p.detach()).abs()
    assert (error <= moved * (first + second / 2 + 8 * ULP) + steps * 4 * ULP * (p.abs() + moved)).all()


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
