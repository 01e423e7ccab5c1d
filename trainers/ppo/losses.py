"""PPO's arithmetic, from scores to advantages and losses: pure functions of tensors, as in TRL 0.8.6.

The tokens of a completion are the actions of an episode. Each token is penalised by its part of the divergence from the
reference, and the last one is rewarded with the completion's score (https://arxiv.org/abs/1909.08593). Means that TRL
takes over a micro-batch are taken over an optimizer step here.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

# Added to the variance in `whiten`; TRL's.
_VARIANCE_FLOOR = 1e-8
# Added to the standard deviation of a batch of scores.
_DEVIATION_FLOOR = 1e-6
# Bound on the relative error that adapts the KL coefficient; Ziegler et al., section 2.2.
_LARGEST_ERROR = 0.2


# From scores to advantages. [R, P] tensors are fp32, one row per completion. `mask` [R, P] bool marks its tokens, which
# are contiguous; finite values outside the mask have no effect.


def token_rewards(
    scores: Tensor, logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor, kl_coefficient: float
) -> Tensor:
    """-kl_coefficient * (logprob - ref_logprob) at each token, and the score [R] on the last one: [R, P].

    0 outside the mask.

    Raises:
        ValueError: a completion has no tokens, and so none that its score could be added to.
    """
    empty = int((~mask.any(dim=1)).sum())
    if empty:
        raise ValueError(f"{empty} of {len(mask)} completions have no token, expected at least one in each")
    rewards = torch.where(mask, -kl_coefficient * (logprobs - ref_logprobs), 0.0)
    last = mask.long().cumsum(dim=1).argmax(dim=1, keepdim=True)  # the first of the largest counts
    return rewards.scatter_add(1, last, scores[:, None].to(rewards.dtype))


class ScoreScaling:
    """Scores divided by their running standard deviation, first reduced by their running mean if `norm`, then clipped.

    With `batch_norm` the scores of a batch are reduced by their mean and divided by their standard deviation instead.

    Mean and deviation are those of all scores so far, the present ones included, combined batch by batch as in Chan et
    al. (http://infolab.stanford.edu/pub/cstr/reports/cs/tr/79/773/CS-TR-79-773.pdf); in fp64.

    Args:
        scale: divide by the deviation plus the machine epsilon of fp32. A single score is left as it is.
        norm: subtract the mean first; only with `scale`.
        clip: the largest absolute score; None for no bound.
        batch_norm: without `scale`; the deviation is that of the population, plus 1e-6.
    """

    def __init__(self, scale: bool = False, norm: bool = False, clip: float | None = None, *, batch_norm: bool = False):
        self.scale, self.norm, self.clip, self.batch_norm = scale, norm, clip, batch_norm
        self.mean, self.squares, self.count = 0.0, 0.0, 0  # squares: the sum of squared deviations from the mean

    def __call__(self, scores: Tensor) -> Tensor:
        """The scores that rewards are made of: [R] fp32, from [R] fp32."""
        if self.scale:
            self._add(scores.double())
            if self.count > 1:
                deviation = (self.squares / (self.count - 1)) ** 0.5
                scores = (scores - self.mean if self.norm else scores) / (deviation + torch.finfo(torch.float32).eps)
        elif self.batch_norm:
            scores = (scores - scores.mean()) / (scores.std(correction=0) + _DEVIATION_FLOOR)
        return scores if self.clip is None else scores.clamp(-self.clip, self.clip)

    def _add(self, scores: Tensor) -> None:
        n, mean = len(scores), float(scores.mean())
        delta, total = mean - self.mean, self.count + n
        self.squares += float((scores - mean).square().sum()) + delta**2 * self.count * n / total
        self.mean += delta * n / total
        self.count = total

    def state_dict(self) -> dict[str, float]:
        """The state saved in a checkpoint."""
        return {"mean": self.mean, "squares": self.squares, "count": self.count}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restore the result of `state_dict()`."""
        self.mean, self.squares, self.count = state["mean"], state["squares"], int(state["count"])


def generalized_advantages(
    rewards: Tensor, values: Tensor, mask: Tensor, *, gamma: float = 1.0, gae_lambda: float = 0.95
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimates (https://arxiv.org/abs/1506.02438), and returns = advantages + values: [R, P].

    A_t = delta_t + gamma * gae_lambda * A_(t+1), delta_t = r_t + gamma * V_(t+1) - V_t; after the last token, A and V
    are 0. Both are 0 outside the mask.
    """
    values = torch.where(mask, values, 0.0)
    deltas = torch.where(mask, rewards + gamma * F.pad(values[:, 1:], (0, 1)) - values, 0.0)
    advantages = torch.zeros_like(deltas)
    following = deltas.new_zeros(len(deltas))
    for column in range(deltas.shape[1] - 1, -1, -1):
        following = deltas[:, column] + gamma * gae_lambda * following
        advantages[:, column] = following
    advantages = torch.where(mask, advantages, 0.0)
    return advantages, advantages + values


def whiten(values: Tensor, mask: Tensor, *, shift_mean: bool = True) -> Tensor:
    """(values - mean) / sqrt(variance + 1e-8) over all tokens of the mask, 0 elsewhere: [R, P].

    The variance is the sample variance (n - 1). Without `shift_mean` the mean is added back.

    Raises:
        ValueError: fewer than two tokens, so that the variance is undefined.
    """
    inside = values[mask]
    if inside.numel() < 2:
        raise ValueError(f"the mask has {inside.numel()} tokens, expected at least 2 to whiten")
    variance, mean = torch.var_mean(inside)
    whitened = (values - mean) * torch.rsqrt(variance + _VARIANCE_FLOOR)
    return torch.where(mask, whitened if shift_mean else whitened + mean, 0.0)


def sequence_kl(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor) -> Tensor:
    """The sampled divergence from the reference: the sum of logprob - ref_logprob over each completion, [R]."""
    return torch.where(mask, logprobs - ref_logprobs, 0.0).sum(dim=1)


class KLController:
    """The KL coefficient, adapted to a target divergence: section 2.2 of https://arxiv.org/abs/1909.08593.

    coefficient <- coefficient * (1 + clip(kl / target - 1, -0.2, 0.2) * n / horizon); constant without a target.
    """

    def __init__(self, coefficient: float, target: float | None = None, horizon: float = 10000.0):
        self.coefficient = coefficient
        self.target = target
        self.horizon = horizon

    def update(self, kl: float, n: int) -> None:
        """Update the coefficient from the mean `sequence_kl` of a step's `n` completions."""
        if self.target is not None:
            error = min(max(kl / self.target - 1, -_LARGEST_ERROR), _LARGEST_ERROR)
            self.coefficient *= 1 + error * n / self.horizon

    def state_dict(self) -> dict[str, float]:
        """The state saved in a checkpoint."""
        return {"coefficient": self.coefficient}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restore the result of `state_dict()`."""
        self.coefficient = state["coefficient"]


# The losses. A sum over the tokens of a micro-batch is divided by `n_tokens`, the token count of the whole optimizer
# step, so that the losses of the micro-batches add up to the mean over the step.


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip: float,
    n_tokens: int,
    importance_weights: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """max(-A * ratio, -A * clip(ratio, 1 - clip, 1 + clip)), ratio = exp(logprob - old_logprob): equation 7.

    Each token's loss is multiplied by its importance weight, if there are any.

    Args:
        logprobs: [R, P] under the policy, with gradient.
        old_logprobs: [R, P] under the policy that sampled the completions.
        advantages: [R, P].
        importance_weights: [R, P] fp32, see `rollouts.importance.importance_weights`.

    Returns:
        The loss, a scalar; and [R, P] bool, the tokens whose gradient is clipped to 0.
    """
    ratio = torch.where(mask, logprobs - old_logprobs, 0.0).exp()
    unclipped, clipped = -advantages * ratio, -advantages * ratio.clamp(1 - clip, 1 + clip)
    per_token = torch.maximum(unclipped, clipped)
    if importance_weights is not None:
        per_token = per_token * importance_weights
    return torch.where(mask, per_token, 0.0).sum() / n_tokens, (clipped > unclipped) & mask


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, *, clip: float, n_tokens: int
) -> tuple[Tensor, Tensor]:
    """0.5 * max((V - return)^2, (V_clipped - return)^2), V_clipped within `clip` of the value of the rollout.

    Args:
        values: [R, P] of the critic, with gradient.
        old_values: [R, P] of the critic when the completions were sampled.

    Returns:
        The loss, a scalar; and [R, P] bool, the tokens whose gradient is clipped to 0.
    """
    clipped_values = torch.maximum(torch.minimum(values, old_values + clip), old_values - clip)
    unclipped, clipped = (values - returns).square(), (clipped_values - returns).square()
    loss = 0.5 * torch.where(mask, torch.maximum(unclipped, clipped), 0.0).sum() / n_tokens
    return loss, (clipped > unclipped) & mask


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> Tensor:
    """1 - mean((V - return)^2) / var(return) over the tokens.

    1 for a perfect critic, 0 for one that predicts the mean return, and 0 if all returns are the same.
    """
    returns = returns[mask]
    error, variance = (values[mask] - returns).square().mean(), returns.var(correction=0)
    return torch.where(variance > 0, 1 - error / variance, 0.0)
