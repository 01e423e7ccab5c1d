"""Group Relative Policy Optimization (https://arxiv.org/abs/2402.03300): its loss, its advantages and its rollout.

Each prompt gets a group of completions; a completion's advantage is its reward beside its group's. What a group's
completions share in reward, nothing can be learned from.

Left out: the training loop with its options, reward functions and data, several optimizer steps a rollout, ratios of
whole sequences (GSPO) and other engines for generation than `model.generate`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from .encoding import TokenBatch
from .logprobs import token_logprobs

LossType = Literal["grpo", "bnpo", "dapo", "dr_grpo"]
# Keeps a group of nearly equal rewards from being blown up; TRL's value.
_STD_FLOOR = 1e-4


def group_advantages(rewards: Tensor, n_generations: int, *, scale: bool = True) -> Tensor:
    """(reward - mean) / (std + 1e-4) in each group: [G * n_generations] fp32.

    Args:
        rewards: [G * n_generations], a group's completions next to each other.
        n_generations: completions per group, at least 2; the standard deviation is the sample's (n - 1).
        scale: divide by the standard deviation; Dr. GRPO (https://arxiv.org/abs/2503.20783) does not.

    Raises:
        ValueError: fewer than two completions a group, or rewards that do not divide into groups.
    """
    if n_generations < 2:
        raise ValueError(f"n_generations is {n_generations}, wanted at least 2: a group of one has no advantage")
    if rewards.dim() != 1 or rewards.numel() % n_generations:
        raise ValueError(f"rewards have shape {list(rewards.shape)}, wanted groups of n_generations {n_generations}")
    groups = rewards.float().view(-1, n_generations)
    advantages = groups - groups.mean(dim=1, keepdim=True)
    if scale:
        advantages = advantages / (groups.std(dim=1, keepdim=True) + _STD_FLOOR)
    return advantages.view(-1)


def grpo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    ref_logprobs: Tensor | None = None,
    beta: float = 0.0,
    correct_k3: bool = False,
    epsilon_low: float = 0.2,
    epsilon_high: float = 0.2,
    loss_type: LossType = "dapo",
    n_tokens: int | Tensor | None = None,
    max_completion_length: int | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The clipped policy loss, with the k3 estimate of the divergence from a reference, equations 3 and 4 of the paper.

    Per token -min(ratio * A, clip(ratio, 1 - epsilon_low, 1 + epsilon_high) * A) + beta * k3, with
    ratio = exp(logprob - old), k3 = exp(ref - logprob) - (ref - logprob) - 1. Over tokens it is averaged by type:

    | loss_type | |
    |---|---|
    | grpo | mean over sequences of the means over their tokens |
    | bnpo | mean over this batch's tokens |
    | dapo | sum over `n_tokens`, the tokens of all micro-batches of the step (https://arxiv.org/abs/2503.14476) |
    | dr_grpo | sum over sequences times `max_completion_length` (https://arxiv.org/abs/2503.20783) |

    The names, and the defaults, are TRL's. grpo, bnpo and dr_grpo are means over one batch: the caller divides by the
    number of micro-batches.

    Args:
        logprobs: [R, P] of the tokens under the policy, with gradient; likewise fp32 all that follow.
        old_logprobs: [R, P] under the policy that made them.
        advantages: [R] one a completion.
        mask: [R, P] bool, the completions' tokens; what stands elsewhere must be finite, and has no effect.
        ref_logprobs: [R, P] under the reference; wanted where beta is not 0.
        beta: weight of k3.
        correct_k3: multiply k3 by the ratio, so that its gradient is that of the divergence (DeepSeek-V3.2,
            https://arxiv.org/abs/2512.02556). TRL 1.16 does unless told otherwise; the paper of GRPO does not.
        epsilon_low, epsilon_high: how far a ratio may go below and above 1.
        n_tokens: of loss type dapo; None takes this batch's.
        max_completion_length: of loss type dr_grpo.

    Returns:
        The loss, a scalar; and without gradient the ratios [R, P] and k3 [R, P] (None without ref_logprobs), 1 and 0
        outside the mask.

    Raises:
        ValueError: shapes that differ, an argument that the loss type or beta wants, or an unknown loss type.
    """
    if not logprobs.shape == old_logprobs.shape == mask.shape or logprobs.shape[:1] != advantages.shape:
        shapes = [list(tensor.shape) for tensor in (logprobs, old_logprobs, mask, advantages)]
        raise ValueError(f"logprobs, old_logprobs, mask and advantages have shapes {shapes}, wanted [R, P] and [R]")
    if beta != 0.0 and ref_logprobs is None:
        raise ValueError(f"beta is {beta}, which wants ref_logprobs")
    advantage = advantages[:, None]
    ratio = torch.where(mask, logprobs - old_logprobs, 0.0).exp()
    per_token = -torch.minimum(ratio * advantage, ratio.clamp(1 - epsilon_low, 1 + epsilon_high) * advantage)
    k3 = None
    if ref_logprobs is not None:
        difference = torch.where(mask, ref_logprobs - logprobs, 0.0)
        k3 = difference.exp() - difference - 1
        per_token = per_token + beta * (k3 * ratio if correct_k3 else k3)
    per_token = torch.where(mask, per_token, 0.0)
    if loss_type == "grpo":
        loss = (per_token.sum(dim=1) / mask.sum(dim=1).clamp(min=1)).mean()
    elif loss_type == "bnpo":
        loss = per_token.sum() / mask.sum().clamp(min=1)
    elif loss_type == "dapo":
        loss = per_token.sum() / (mask.sum().clamp(min=1) if n_tokens is None else n_tokens)
    elif loss_type == "dr_grpo":
        if max_completion_length is None:
            raise ValueError("loss_type 'dr_grpo' wants max_completion_length")
        loss = per_token.sum() / (len(per_token) * max_completion_length)
    else:
        raise ValueError(f"loss_type is {loss_type!r}, wanted grpo, bnpo, dapo or dr_grpo")
    return loss, ratio.detach(), None if k3 is None else k3.detach()


@dataclass(frozen=True)
class Rollout:
    """Sampled completions, a prompt's next to each other."""

    batch: TokenBatch  # [R, T] prompts and completions; completion_mask holds the sampled tokens, EOS among them
    logprobs: Tensor  # [R, T - batch.first_trained] fp32, of the sampled tokens under the policy that sampled them

    @property
    def mask(self) -> Tensor:
        """[R, T - batch.first_trained] bool, the sampled tokens, in the columns of `token_logprobs`."""
        return self.batch.completion_mask[:, self.batch.first_trained :]


@torch.no_grad()
def rollout(
    model: Any,
    prompts: Sequence[Sequence[int]],
    *,
    n_generations: int,
    max_new_tokens: int,
    pad_id: int,
    eos_id: int,
    min_new_tokens: int = 0,
    temperature: float = 1.0,
) -> Rollout:
    """Sample `n_generations` completions of each prompt from the model, and their log-probabilities.

    Completions are drawn from the whole distribution (no top-k, top-p or penalty) with torch's global random state. A
    completion ends with its first EOS or at `max_new_tokens`. Log-probabilities come from a forward pass of their own,
    the one that training runs, at the sampling temperature: what `generate` computes along the way comes from other
    kernels and a cache, and differs from it. The model is in eval mode while it generates, as activation checkpointing
    allows no cache.

    Args:
        model: a transformers causal language model.
        prompts: token ids; none empty.
        min_new_tokens: EOS is not sampled before.

    Raises:
        ValueError: an empty prompt.
    """
    if not prompts or not all(prompts):
        raise ValueError(f"{len(prompts)} prompts, of lengths {[len(ids) for ids in prompts]}: wanted none empty")
    width = max(map(len, prompts))
    input_ids = torch.tensor([[pad_id] * (width - len(ids)) + list(ids) for ids in prompts])
    attention_mask = torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids in prompts])
    device = next(model.parameters()).device
    training = model.training
    model.eval()
    try:
        generated = model.generate(
            input_ids=input_ids.to(device),
            attention_mask=attention_mask.to(device),
            do_sample=True,
            temperature=temperature,
            top_k=0,
            top_p=1.0,
            repetition_penalty=1.0,
            num_return_sequences=n_generations,
            min_new_tokens=min_new_tokens,
            max_new_tokens=max_new_tokens,
            pad_token_id=pad_id,
            eos_token_id=eos_id,
            use_cache=True,
        )
    finally:
        model.train(training)
    prompt_lengths = [len(ids) for ids in prompts for _ in range(n_generations)]
    batch = right_padded(generated, prompt_lengths, pad_id=pad_id, eos_id=eos_id)
    return Rollout(batch, token_logprobs(model, batch, temperature))


def right_padded(generated: Tensor, prompt_lengths: Sequence[int], *, pad_id: int, eos_id: int) -> TokenBatch:
    """Left-padded prompts with their completions, as `generate` returns them, with all padding moved to the end.

    Training needs no position ids then, and a causal model no attention mask for the padding.

    Args:
        generated: [R, W + C] int64: prompts padded on the left to W, the longest, and completions, which end with their
            first EOS.
        prompt_lengths: of the R rows.
    """
    device, width = generated.device, max(prompt_lengths)
    is_eos = generated[:, width:] == eos_id
    # An EOS belongs to its completion, so a token counts if no EOS stands before it.
    lengths = ((is_eos.cumsum(dim=1) - is_eos.long()) == 0).sum(dim=1).tolist()
    ends = [prompt + length for prompt, length in zip(prompt_lengths, lengths, strict=True)]
    starts_column, ends_column = (torch.tensor(values, device=device)[:, None] for values in (prompt_lengths, ends))
    columns = torch.arange(max(ends), device=device)
    is_token = columns < ends_column
    ids = generated.gather(1, (columns + width - starts_column).clamp(max=generated.shape[1] - 1))
    return TokenBatch(
        torch.where(is_token, ids, pad_id),
        is_token.long(),
        is_token & (columns >= starts_column),
        first_trained=min(prompt_lengths),
        n_tokens=sum(ends),
        n_trained=sum(lengths),
    )
