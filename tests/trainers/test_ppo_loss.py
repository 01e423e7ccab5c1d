"""PPO's arithmetic compared with numpy in fp64, token by token from the papers and TRL 0.8.6's documentation."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from sparse_opt.trainers.ppo.losses import (
    KLController,
    ScoreScaling,
    explained_variance,
    generalized_advantages,
    policy_loss,
    sequence_kl,
    token_rewards,
    value_loss,
    whiten,
)

EPS = 2**-23


class Batch:
    """Ragged completions of 1 to P tokens at random columns; outside them, numbers that must not matter."""

    def __init__(self, seed: int, rows: int = 6, columns: int = 11):
        generator = np.random.default_rng(seed)
        self.spans = [(0, columns), (4, 5)]  # all columns, and a single token
        while len(self.spans) < rows:
            start = int(generator.integers(0, columns))
            self.spans.append((start, int(generator.integers(start + 1, columns + 1))))
        self.mask = np.zeros((rows, columns), dtype=bool)
        for row, (start, end) in enumerate(self.spans):
            self.mask[row, start:end] = True
        # Rounded to fp32 once, so that both sides begin with the same numbers.
        self.arrays = {
            name: generator.normal(scale=scale, size=(rows, columns)).astype(np.float32).astype(np.float64)
            for name, scale in {"logprobs": 1, "old": 1, "ref": 1, "values": 2, "old_values": 2, "rewards": 3}.items()
        }
        self.scores = generator.normal(size=rows).astype(np.float32).astype(np.float64)

    def tensor(self, name: str) -> torch.Tensor:
        return torch.tensor(self.arrays[name], dtype=torch.float32)

    @property
    def mask_tensor(self) -> torch.Tensor:
        return torch.tensor(self.mask)

    @property
    def tokens(self) -> list[tuple[int, int]]:
        return [(row, t) for row, (start, end) in enumerate(self.spans) for t in range(start, end)]


@pytest.fixture(params=range(4), ids="seed{}".format)
def batch(request) -> Batch:
    return Batch(request.param)


def expected_advantages(batch: Batch, gamma: float, lam: float) -> tuple[np.ndarray, np.ndarray]:
    """A_t as the sum over later tokens of (gamma lambda)^k delta_(t+k), equation 16 of the paper: no recursion."""
    advantages, returns = np.zeros(batch.mask.shape), np.zeros(batch.mask.shape)
    rewards, values = batch.arrays["rewards"], batch.arrays["values"]
    for row, (start, end) in enumerate(batch.spans):
        deltas = [
            rewards[row, t] + gamma * (values[row, t + 1] if t + 1 < end else 0.0) - values[row, t]
            for t in range(start, end)
        ]
        for t in range(start, end):
            advantages[row, t] = sum((gamma * lam) ** k * delta for k, delta in enumerate(deltas[t - start :]))
            returns[row, t] = advantages[row, t] + values[row, t]
    return advantages, returns


@pytest.mark.parametrize("norm", [False, True])
def test_scores_are_scaled_by_those_so_far(norm):
    batches = [np.random.default_rng(seed).normal(3, 2, 16).astype(np.float32) for seed in range(4)]
    scaling, restored = ScoreScaling(True, norm), ScoreScaling(True, norm)
    for i, batch in enumerate(batches):
        so_far = np.concatenate(batches[: i + 1]).astype(np.float64)
        expected = (batch - so_far.mean() * norm) / (so_far.std(ddof=1) + EPS)
        restored.load_state_dict(scaling.state_dict())
        found = scaling(torch.tensor(batch))
        assert found.dtype == torch.float32
        np.testing.assert_allclose(found.numpy(), expected, rtol=4 * EPS, atol=8 * EPS)
        assert torch.equal(restored(torch.tensor(batch)), found)


def test_scores_that_are_only_clipped_or_the_same():
    scores = torch.tensor([-3.0, 0.5, 2.0])
    assert ScoreScaling(clip=1.0)(scores).tolist() == [-1.0, 0.5, 1.0]
    assert ScoreScaling()(scores) is scores
    of_batch = ScoreScaling(batch_norm=True)(scores)
    torch.testing.assert_close(of_batch, (scores - scores.mean()) / (scores.std(correction=0) + 1e-6))
    assert ScoreScaling(True)(torch.tensor([5.0])).tolist() == [5.0]  # the deviation of one score is undefined
    assert ScoreScaling(True, norm=True)(torch.tensor([5.0, 5.0])).tolist() == [0.0, 0.0]


def test_token_rewards(batch):
    expected = np.zeros(batch.mask.shape)
    for row, (start, end) in enumerate(batch.spans):
        for t in range(start, end):
            expected[row, t] = -0.3 * (batch.arrays["logprobs"][row, t] - batch.arrays["ref"][row, t])
        expected[row, end - 1] += batch.scores[row]
    found = token_rewards(
        torch.tensor(batch.scores), batch.tensor("logprobs"), batch.tensor("ref"), batch.mask_tensor, 0.3
    )
    # Three roundings of numbers up to 6.
    np.testing.assert_allclose(found.double(), expected, rtol=0, atol=3 * 6 * EPS)
    assert (found[~batch.mask_tensor] == 0).all()


def test_a_completion_without_tokens_is_refused():
    mask = torch.tensor([[True, False], [False, False]])
    with pytest.raises(ValueError, match="1 of 2 completions have no token"):
        token_rewards(torch.zeros(2), torch.zeros(2, 2), torch.zeros(2, 2), mask, 0.1)


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 0.5), (1.0, 1.0), (0.99, 0.0)])
def test_advantages_and_returns(batch, gamma, lam):
    advantages, returns = generalized_advantages(
        batch.tensor("rewards"), batch.tensor("values"), batch.mask_tensor, gamma=gamma, gae_lambda=lam
    )
    expected, expected_returns = expected_advantages(batch, gamma, lam)
    # 11 steps of 5 roundings each, of sums that stay below 11 * 20.
    tolerance = 11 * 5 * 220 * EPS
    np.testing.assert_allclose(advantages.double(), expected, rtol=0, atol=tolerance)
    np.testing.assert_allclose(returns.double(), expected_returns, rtol=0, atol=tolerance)
    assert (advantages[~batch.mask_tensor] == 0).all() and (returns[~batch.mask_tensor] == 0).all()


def test_with_lambda_1_the_return_is_the_sum_of_the_rewards_to_come(batch):
    """What every episode has, whatever the critic says: the returns do not come from whitened advantages."""
    _, returns = generalized_advantages(
        batch.tensor("rewards"), batch.tensor("values"), batch.mask_tensor, gamma=1.0, gae_lambda=1.0
    )
    for row, (start, end) in enumerate(batch.spans):
        for t in range(start, end):
            assert returns[row, t].item() == pytest.approx(batch.arrays["rewards"][row, t:end].sum(), abs=1e-4)


def test_numbers_outside_the_mask_do_not_matter(batch):
    mask = batch.mask_tensor
    other = Batch(seed=99)
    changed = {name: torch.where(mask, batch.tensor(name), other.tensor(name)) for name in batch.arrays}
    for arrays in (batch, changed):
        get = arrays.tensor if isinstance(arrays, Batch) else arrays.__getitem__
        rewards = token_rewards(torch.tensor(batch.scores), get("logprobs"), get("ref"), mask, 0.3)
        advantages, returns = generalized_advantages(rewards, get("values"), mask)
        found = [
            rewards,
            advantages,
            returns,
            whiten(get("values"), mask),
            sequence_kl(get("logprobs"), get("ref"), mask),
            policy_loss(get("logprobs"), get("old"), advantages, mask, clip=0.2, n_tokens=7)[0],
            value_loss(get("values"), get("old_values"), returns, mask, clip=0.2, n_tokens=7)[0],
            explained_variance(get("values"), returns, mask),
        ]
        if arrays is batch:
            first = found
    assert all(torch.equal(one, two) for one, two in zip(first, found, strict=True))


@pytest.mark.parametrize("shift_mean", [True, False])
def test_whitening(batch, shift_mean):
    inside = [batch.arrays["rewards"][row, t] for row, t in batch.tokens]
    mean = sum(inside) / len(inside)
    variance = sum((x - mean) ** 2 for x in inside) / (len(inside) - 1)
    expected = np.zeros(batch.mask.shape)
    for row, t in batch.tokens:
        centred = (batch.arrays["rewards"][row, t] - mean) / math.sqrt(variance + 1e-8)
        expected[row, t] = centred if shift_mean else centred + mean
    found = whiten(batch.tensor("rewards"), batch.mask_tensor, shift_mean=shift_mean)
    # A mean and a variance of at most 66 numbers, added pairwise, and four roundings of numbers up to 10.
    np.testing.assert_allclose(found.double(), expected, rtol=0, atol=20 * 10 * EPS)


def test_one_token_cannot_be_whitened():
    with pytest.raises(ValueError, match="the mask has 1 tokens"):
        whiten(torch.ones(1, 3), torch.tensor([[False, True, False]]))
    assert (whiten(torch.full((2, 2), 3.0), torch.ones(2, 2, dtype=torch.bool)) == 0).all()


def test_kl_is_a_sum_over_a_completions_tokens(batch):
    found = sequence_kl(batch.tensor("logprobs"), batch.tensor("ref"), batch.mask_tensor)
    for row, (start, end) in enumerate(batch.spans):
        expected = sum(batch.arrays["logprobs"][row, t] - batch.arrays["ref"][row, t] for t in range(start, end))
        assert found[row].item() == pytest.approx(expected, abs=11 * 2 * 40 * EPS)


def test_adaptive_controller():
    controller = KLController(0.2, target=6.0, horizon=10000)
    coefficient = 0.2
    for kl, error in [(6.0, 0.0), (6.6, 0.1), (60.0, 0.2), (5.7, -0.05), (-3.0, -0.2), (0.0, -0.2)]:
        controller.update(kl, 128)
        coefficient *= 1 + error * 128 / 10000
        assert controller.coefficient == pytest.approx(coefficient, rel=1e-12)
    other = KLController(0.7, target=6.0, horizon=10000)
    other.load_state_dict(controller.state_dict())
    assert other.coefficient == controller.coefficient


def test_fixed_controller():
    controller = KLController(0.05)
    controller.update(60.0, 128)
    assert controller.coefficient == 0.05


def expected_policy_loss(batch: Batch, advantages: np.ndarray, clip: float) -> tuple[float, int, np.ndarray]:
    """The loss, how many tokens are clipped, and the loss's derivative by each log-probability."""
    total, n_clipped, grad = 0.0, 0, np.zeros(batch.mask.shape)
    for row, t in batch.tokens:
        ratio = math.exp(batch.arrays["logprobs"][row, t] - batch.arrays["old"][row, t])
        advantage = advantages[row, t]
        bounded = min(max(ratio, 1 - clip), 1 + clip)
        total += -min(ratio * advantage, bounded * advantage)
        if bounded * advantage < ratio * advantage:
            n_clipped += 1
        else:
            grad[row, t] = -advantage * ratio / len(batch.tokens)
    return total / len(batch.tokens), n_clipped, grad


def test_policy_loss_and_its_gradient(batch):
    advantages = batch.arrays["rewards"]
    loss, n_clipped, grad = expected_policy_loss(batch, advantages, 0.2)
    logprobs = batch.tensor("logprobs").requires_grad_()
    found, clipped = policy_loss(
        logprobs, batch.tensor("old"), batch.tensor("rewards"), batch.mask_tensor, clip=0.2, n_tokens=len(batch.tokens)
    )
    found.backward()
    # Ratios up to e^6 times advantages up to 10: the exponential's argument and value are rounded, 8 roundings in all.
    scale = math.exp(6) * 10
    assert found.item() == pytest.approx(loss, abs=8 * scale * EPS)
    assert int(clipped.sum()) == n_clipped > 0
    np.testing.assert_allclose(logprobs.grad.double(), grad, rtol=20 * EPS, atol=0)


def test_policy_gradient_by_finite_differences(batch):
    arrays = {name: torch.tensor(array, requires_grad=name == "logprobs") for name, array in batch.arrays.items()}
    mask, n_tokens = batch.mask_tensor, len(batch.tokens)

    def loss(logprobs):
        return policy_loss(logprobs, arrays["old"], arrays["rewards"], mask, clip=0.2, n_tokens=n_tokens)[0]

    assert torch.autograd.gradcheck(loss, arrays["logprobs"])


def test_value_loss_and_its_gradient(batch):
    values, old, returns = (batch.arrays[name] for name in ("values", "old_values", "rewards"))
    loss, n_clipped, grad = 0.0, 0, np.zeros(batch.mask.shape)
    n_tokens = len(batch.tokens)
    for row, t in batch.tokens:
        bounded = min(max(values[row, t], old[row, t] - 0.2), old[row, t] + 0.2)
        plain, clipped = (values[row, t] - returns[row, t]) ** 2, (bounded - returns[row, t]) ** 2
        loss += 0.5 * max(plain, clipped) / n_tokens
        if clipped > plain:
            n_clipped += 1
        else:
            grad[row, t] = (values[row, t] - returns[row, t]) / n_tokens
    tensor = batch.tensor("values").requires_grad_()
    found, was_clipped = value_loss(
        tensor, batch.tensor("old_values"), batch.tensor("rewards"), batch.mask_tensor, clip=0.2, n_tokens=n_tokens
    )
    found.backward()
    # Squares of differences up to 16, of four roundings each.
    assert found.item() == pytest.approx(loss, abs=4 * 256 * EPS)
    assert int(was_clipped.sum()) == n_clipped > 0
    np.testing.assert_allclose(tensor.grad.double(), grad, rtol=0, atol=4 * 16 * EPS / n_tokens)

    wide = {name: torch.tensor(batch.arrays[name]) for name in ("old_values", "rewards")}
    mask = batch.mask_tensor
    assert torch.autograd.gradcheck(
        lambda v: value_loss(v, wide["old_values"], wide["rewards"], mask, clip=0.2, n_tokens=n_tokens)[0],
        torch.tensor(values, requires_grad=True),
    )


def test_micro_batches_add_up_to_the_batch(batch):
    mask, n_tokens = batch.mask_tensor, len(batch.tokens)
    for loss, names in (
        (policy_loss, ("logprobs", "old", "rewards")),
        (value_loss, ("values", "old_values", "rewards")),
    ):
        tensors = [batch.tensor(name) for name in names]
        whole, _ = loss(*tensors, mask, clip=0.2, n_tokens=n_tokens)
        parts = [
            loss(*(tensor[rows] for tensor in tensors), mask[rows], clip=0.2, n_tokens=n_tokens)[0]
            for rows in ([0, 3], [1], [2, 4, 5])
        ]
        assert sum(parts).item() == pytest.approx(whole.item(), rel=66 * EPS)


def test_explained_variance(batch):
    values, returns = ([batch.arrays[name][row, t] for row, t in batch.tokens] for name in ("values", "rewards"))
    expected = 1 - np.mean((np.array(values) - np.array(returns)) ** 2) / np.var(returns)
    mask = batch.mask_tensor
    assert explained_variance(batch.tensor("values"), batch.tensor("rewards"), mask).item() == pytest.approx(
        expected, rel=1e-5
    )
    assert explained_variance(batch.tensor("rewards"), batch.tensor("rewards"), mask).item() == 1.0
    assert explained_variance(batch.tensor("values"), torch.ones(mask.shape), mask).item() == 0.0
