"""SparseLion against Lion written in plain torch, over many steps."""

import pytest
import torch
from torch import Tensor, nn

from sparse_opt import MaskSet, SparseLion

LR, BETA1, BETA2, DECAY = 1e-2, 0.8, 0.95, 0.1
STEPS = 100
ULP = 2.0**-24  # the largest relative error of one fp32 operation


def gradient(m: Tensor) -> Tensor:
    """A gradient for which no average is so close to 0 that rounding determines its sign."""
    g = torch.randn(m.shape)
    return torch.where((BETA1 * m + (1 - BETA1) * g).abs() < 0.01, g + 1, g)


def plain_lion(p: Tensor, m: Tensor, g: Tensor, active: Tensor) -> None:
    """One step as in the authors' code, on the active elements."""
    sign = (BETA1 * m + (1 - BETA1) * g).sign()
    p.copy_(torch.where(active, p * (1 - LR * DECAY) - LR * sign, p))
    m.copy_(BETA2 * m + (1 - BETA2) * g)


@pytest.mark.parametrize("grads", ["compact", "dense"])
def test_many_steps_equal_plain_torch(grads, device):
    torch.manual_seed(0)
    model = nn.Linear(40, 25, device=device)
    mask = MaskSet.random(model, density=0.3, seed=1)
    optimizer = SparseLion(model, mask, lr=LR, betas=(BETA1, BETA2), weight_decay=DECAY, grads=grads)
    active = {name: torch.zeros(p.numel(), dtype=torch.bool) for name, p in model.named_parameters()}
    for name in active:
        active[name][mask[name]] = True
    expected = {name: p.detach().cpu().clone() for name, p in model.named_parameters()}
    momentum = {name: torch.zeros_like(p) for name, p in expected.items()}
    for _ in range(STEPS):
        gradients = {name: gradient(m) for name, m in momentum.items()}
        sum((p * gradients[name].to(device)).sum() for name, p in model.named_parameters()).backward()
        optimizer.step()
        optimizer.zero_grad()
        for name, p in expected.items():
            plain_lion(p, momentum[name], gradients[name], active[name].view(p.shape))
    largest = max(p.abs().max().item() for p in expected.values())
    for name, p in model.named_parameters():  # a step rounds its decay, product and difference, in both libraries
        torch.testing.assert_close(p.detach().cpu(), expected[name], rtol=0, atol=STEPS * 2 * 4 * ULP * largest)
