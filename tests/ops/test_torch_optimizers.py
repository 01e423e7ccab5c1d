"""The averages of indexed_adamw_ against those of torch.optim.AdamW, on every backend.

The backends share the reference's formulas, so comparing them with each other cannot find a wrong formula.
tests/optim/test_equivalence.py compares many steps of the optimizers.
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
