from __future__ import annotations

import numpy as np
import pytest
import torch

from sparse_opt.trainers.dpo import dpo_loss

LOGPROBS = torch.randn(4, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 10 - 40


def papers_loss(loss_type, h, beta, e=0.0):
    """The formulas as the papers print them, in fp64."""
    right, wrong = np.log1p(np.exp(-beta * h)), np.log1p(np.exp(beta * h))
    if loss_type == "sigmoid":
        return (1 - e) * right + e * wrong
    if loss_type == "robust":
        return ((1 - e) * right - e * wrong) / (1 - 2 * e)
    if loss_type == "hinge":
        return np.maximum(0.0, 1 - beta * h)
    return (h - 1 / (2 * beta)) ** 2


CASES = [("sigmoid", 0.0), ("sigmoid", 0.1), ("sigmoid", 0.4), ("robust", 0.0), ("robust", 0.4), ("hinge", 0.0),
         ("ipo", 0.0)]  # fmt: skip


@pytest.mark.parametrize("beta", [0.01, 0.1, 1.0])
@pytest.mark.parametrize(("loss_type", "e"), CASES)
def test_losses_and_gradients_are_the_papers(loss_type, e, beta):
    policy_chosen, policy_rejected = LOGPROBS[0].clone().requires_grad_(), LOGPROBS[1].clone().requires_grad_()
    losses, *rewards = dpo_loss(policy_chosen, policy_rejected, LOGPROBS[2], LOGPROBS[3], beta, loss_type, e)
    losses.sum().backward()
    for reward, policy, reference in zip(rewards, LOGPROBS[:2], LOGPROBS[2:], strict=True):
        torch.testing.assert_close(reward, beta * (policy - reference), rtol=1e-12, atol=0)
    h = (LOGPROBS[0] - LOGPROBS[2] - LOGPROBS[1] + LOGPROBS[3]).numpy()
    np.testing.assert_allclose(losses.detach().numpy(), papers_loss(loss_type, h, beta, e), rtol=1e-12, atol=1e-12)
    step = 1e-5
    slope = (papers_loss(loss_type, h + step, beta, e) - papers_loss(loss_type, h - step, beta, e)) / (2 * step)
    # A central difference errs by step^2 times a third derivative of 1 at most, and by the losses' rounding over step.
    rounding = 4 * 2**-53 * losses.detach().abs().max().item() / step
    np.testing.assert_allclose(policy_chosen.grad.numpy(), slope, rtol=0, atol=1e-10 + rounding)
    np.testing.assert_allclose(policy_rejected.grad.numpy(), -slope, rtol=0, atol=1e-10 + rounding)


@pytest.mark.parametrize(("loss_type", "e"), CASES)
def test_finite_far_from_the_reference(loss_type, e):
    far = torch.tensor([1e4, -1e4])
    losses, *_ = dpo_loss(far, -far, -far, far, 0.1, loss_type, e)
    assert torch.isfinite(losses).all()
