from __future__ import annotations

import math

import pytest
import torch

from sparse_opt.trainers.dpo import dpo_loss

LOGPROBS = torch.randn(4, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 10 - 40


@pytest.mark.parametrize("beta", [0.01, 0.1, 1.0])
def test_closed_form(beta):
    losses, chosen_rewards, rejected_rewards = dpo_loss(*LOGPROBS, beta)
    for i, (pc, pr, rc, rr) in enumerate(LOGPROBS.T.tolist()):
        assert chosen_rewards[i].item() == pytest.approx(beta * (pc - rc), rel=1e-12)
        assert rejected_rewards[i].item() == pytest.approx(beta * (pr - rr), rel=1e-12)
        assert losses[i].item() == pytest.approx(math.log1p(math.exp(-beta * ((pc - rc) - (pr - rr)))), rel=1e-12)


def test_ln_2_where_the_policy_is_the_reference():
    losses, chosen_rewards, rejected_rewards = dpo_loss(LOGPROBS[0], LOGPROBS[1], LOGPROBS[0], LOGPROBS[1], 0.1)
    assert losses.tolist() == [math.log(2)] * 16
    assert not chosen_rewards.any() and not rejected_rewards.any()


def test_gradient_is_the_papers():
    """Of policy_chosen: -beta * sigmoid(rejected_reward - chosen_reward); of policy_rejected: its opposite."""
    policy_chosen, policy_rejected = LOGPROBS[0].clone().requires_grad_(), LOGPROBS[1].clone().requires_grad_()
    losses, chosen_rewards, rejected_rewards = dpo_loss(policy_chosen, policy_rejected, LOGPROBS[2], LOGPROBS[3], 0.1)
    losses.sum().backward()
    weight = -0.1 * torch.sigmoid(rejected_rewards - chosen_rewards)
    torch.testing.assert_close(policy_chosen.grad, weight, rtol=1e-12, atol=0)
    torch.testing.assert_close(policy_rejected.grad, -weight, rtol=1e-12, atol=0)
    assert not chosen_rewards.requires_grad and not rejected_rewards.requires_grad


def test_no_overflow_far_from_the_reference():
    far = torch.tensor([1e4])
    losses, *_ = dpo_loss(far, -far, -far, far, 1.0)
    assert losses.item() == 0.0
    losses, *_ = dpo_loss(-far, far, far, -far, 1.0)
    assert losses.item() == 4e4
