"""Log-probabilities of the engine and of the policy compared, and importance weights that correct for the difference.

An engine samples with kernels, a cache or a dtype of its own, so the probability q of a token there differs from its
probability p under the policy in training, although both have the same weights. Trained as if they were equal, the
gradient is that of another distribution. Truncated importance sampling multiplies the policy loss of a token by
min(p / q, C) (Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training",
https://fengyao.notion.site/off-policy-rl). Names are those of TRL 1.16.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from sparse_opt.errors import SparseOptError

ImportanceMode = Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]


@torch.no_grad()
def importance_weights(
    logprobs: Tensor,
    engine_logprobs: Tensor,
    mask: Tensor,
    *,
    mode: ImportanceMode = "token_truncate",
    clip_max: float | None = 3.0,
    clip_min: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Weights of the tokens' policy loss, from d = logprobs - engine_logprobs: the `vllm_importance_sampling_mode`.

    | mode | weight of token t of a completion |
    |---|---|
    | token_truncate | min(max(exp(d_t), clip_min), clip_max) |
    | token_mask | exp(d_t), and 0 if that is below clip_min or above clip_max |
    | sequence_truncate | min(max(exp(sum of d over the completion), clip_min), clip_max) |
    | sequence_mask | exp(sum of d over the completion), and 0 if that is below clip_min or above clip_max |

    Args:
        logprobs: [R, P] fp32, of the sampled tokens under the policy that the engine sampled from, before an update.
        engine_logprobs: [R, P] fp32, of the same tokens in the distribution that the engine sampled from.
        mask: [R, P] bool, the sampled tokens. Values outside the mask have no effect.
        clip_max, clip_min: bounds; None for no bound.

    Returns:
        The weights, [R, P] fp32, 1 outside the mask; and [R, P] bool, the tokens whose weight is not exp(d_t), or the
        exponential of the sum.

    Raises:
        ValueError: the mode is unknown.
    """
    difference = torch.where(mask, logprobs - engine_logprobs, 0.0)
    level, _, action = mode.partition("_")
    if level not in ("token", "sequence") or action not in ("truncate", "mask"):
        raise ValueError(f"mode is {mode!r}, expected token_truncate, token_mask, sequence_truncate or sequence_mask")
    if level == "sequence":
        difference = difference.sum(dim=1, keepdim=True).expand_as(difference)
    ratio = difference.exp()
    outside = torch.zeros_like(mask)
    if clip_min is not None:
        outside |= ratio < clip_min
    if clip_max is not None:
        outside |= ratio > clip_max
    if action == "mask":
        weights = torch.where(outside, 0.0, ratio)
    elif clip_min is None and clip_max is None:
        weights = ratio
    else:
        weights = ratio.clamp(min=clip_min, max=clip_max)
    return torch.where(mask, weights, 1.0), outside & mask


@torch.no_grad()
def logprob_differences(logprobs: Tensor, engine_logprobs: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """Statistics of d = logprobs - engine_logprobs over the sampled tokens; shapes as in `importance_weights`.

    Returns:
        sampling_logp_difference_mean and sampling_logp_difference_max, of the absolute difference;
        importance_sampling_ratio_mean, the mean of exp(d), whose expectation is 1 for tokens sampled from the engine's
        distribution; and sampling_kl, the mean of exp(d) - 1 - d, which estimates the divergence KL(engine || policy).
        With top_p or top_k neither holds, because the engine's distribution is renormalised over the tokens that it
        keeps. All are scalars, fp32.
    """
    difference = (logprobs - engine_logprobs)[mask]
    ratio = difference.exp()
    return {
        "sampling_logp_difference_mean": difference.abs().mean(),
        "sampling_logp_difference_max": difference.abs().max(),
        "importance_sampling_ratio_mean": ratio.mean(),
        "sampling_kl": (ratio - 1 - difference).mean(),
    }


def require_agreement(statistics: dict[str, Tensor], largest: float | None) -> None:
    """Check that the engine samples from the policy's weights.

    Args:
        statistics: see `logprob_differences`.
        largest: upper bound of the mean absolute difference; None for no bound.

    Raises:
        SparseOptError: the mean absolute difference exceeds the bound.
    """
    found = statistics["sampling_logp_difference_mean"].item()
    if largest is not None and not found <= largest:
        raise SparseOptError(
            f"log-probabilities of the rollout engine and the policy differ by {found:.4g} on average, more than "
            f"max_logprob_difference {largest}: the engine has other weights, or its arithmetic is less exact"
        )
