"""Group Relative Policy Optimization (https://arxiv.org/abs/2402.03300) and its variants: DAPO, Dr. GRPO, GSPO.

Each prompt gets a group of completions; the advantage of a completion is its reward relative to its group. A group
whose rewards are all equal gives no gradient. One rollout can be used for several optimizer steps; the ratio of each
token is relative to the policy that sampled it.

An engine whose probabilities differ from the policy's can be corrected for by `rollouts.importance`.

Not implemented: DAPO's dynamic sampling (resampling groups with equal rewards) and its penalty for long completions; an
entropy bonus.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from sparse_opt.config import option
from sparse_opt.errors import ConfigError

from .data.encoding import TokenSequence
from .data.order import chunks
from .data.shared_prompts import check_shared_prompts
from .options import LoggedOptions, RolloutOptions
from .policy.reference import Reference
from .rewards.functions import Rewards, Scores, load_rewards
from .rollouts import Engine, Rollout, configured_engine, sample
from .run.rollout_step import (
    completion_metrics,
    engine_agreement,
    reference_logprobs,
    rollout_weights,
    sample_rollout,
    sample_rows,
    sampling_of,
    score_completions,
)
from .run.training_run import TrainingRun

LossType = Literal["grpo", "bnpo", "dapo", "dr_grpo", "gspo"]
Scale = Literal["group", "batch", "none"]
# Limits the scale of the advantages in a group of nearly equal rewards; TRL's value.
_STD_FLOOR = 1e-4


# From rewards to the loss


def group_advantages(rewards: Tensor, n_generations: int, *, scale: Scale = "group") -> Tensor:
    """(reward - its group's mean) / (std + 1e-4): [G * n_generations] fp32.

    Exactly 0 in a group whose rewards are all the same, because Adam would turn a rounding error into a full step. A
    completion without a reward (NaN) has the advantage 0 and is excluded from mean and standard deviation, as in TRL.

    Args:
        rewards: [G * n_generations]; the completions of a group are contiguous.
        n_generations: completions per group, at least 2.
        scale: divide by the standard deviation of the group, or of all rewards (https://arxiv.org/abs/2508.08221), or
            do not divide, as in Dr. GRPO (https://arxiv.org/abs/2503.20783). It is the sample standard deviation (n -
            1).

    Raises:
        ValueError: fewer than two completions per group, or the number of rewards is not a multiple of n_generations.
    """
    if n_generations < 2:
        raise ValueError(f"n_generations is {n_generations}, expected at least 2: a group of one has no advantage")
    if rewards.dim() != 1 or rewards.numel() % n_generations:
        raise ValueError(f"rewards have shape {list(rewards.shape)}, expected groups of n_generations {n_generations}")
    groups = rewards.float().view(-1, n_generations)
    advantages = groups - groups.nanmean(dim=1, keepdim=True)
    if scale == "group":
        n_others = (~groups.isnan()).sum(dim=1, keepdim=True) - 1
        std = (advantages.square().nansum(dim=1, keepdim=True) / n_others.clamp(min=1)).sqrt()
        advantages = advantages / (std + _STD_FLOOR)
    elif scale == "batch":
        found = groups[~groups.isnan()]
        if found.numel() > 1:
            advantages = advantages / (found.std() + _STD_FLOOR)
    elif scale != "none":
        raise ValueError(f"scale is {scale!r}, expected group, batch or none")
    return torch.where(groups.isnan() | is_flat(groups), 0.0, advantages).view(-1)


def is_flat(groups: Tensor) -> Tensor:
    """Whether the rewards of a group are all the same, ignoring NaN: [G, 1] bool for [G, n]."""
    missing = groups.isnan()
    lowest = groups.masked_fill(missing, torch.inf).amin(dim=1, keepdim=True)
    return groups.masked_fill(missing, -torch.inf).amax(dim=1, keepdim=True) <= lowest


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
    n_sequences: int | None = None,
    n_tokens: int | Tensor | None = None,
    max_completion_length: int | None = None,
    importance_weights: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The clipped policy loss with the k3 estimate of the KL divergence from a reference: equations 3 and 4.

    Per token -min(ratio * A, clip(ratio, 1 - epsilon_low, 1 + epsilon_high) * A) * w + beta * k3, with
    ratio = exp(logprob - old), k3 = exp(ref - logprob) - (ref - logprob) - 1, and w the importance weight, which is 1
    without `importance_weights`. The loss type determines the average:

    | loss_type | |
    |---|---|
    | grpo | mean over sequences of the means over their tokens |
    | bnpo | mean over the tokens of this forward pass, then over the passes of the optimizer step |
    | dapo | mean over the tokens of the optimizer step (https://arxiv.org/abs/2503.14476) |
    | dr_grpo | sum over sequences times `max_completion_length` (https://arxiv.org/abs/2503.20783) |
    | gspo | grpo with one ratio per sequence, exp(mean of logprob - old) (https://arxiv.org/abs/2507.18071) |

    With `n_sequences` and `n_tokens` of the whole optimizer step, the losses of its forward passes add up to the loss
    of the step, however it is split. Only bnpo depends on the split, because it averages over the local batch.

    Names and defaults are those of TRL 1.16, where gspo is `importance_sampling_level="sequence"` with the loss type
    grpo. TRL differs if a rollout is used for several optimizer steps: its dapo divides each step by the mean token
    count of these steps instead of the step's own. With gspo, its `correct_k3` uses the ratio of the sequence instead
    of the token's.

    Args:
        logprobs: [R, P] fp32, of the tokens under the policy, with gradient.
        old_logprobs: [R, P] fp32, under the policy that sampled the tokens.
        advantages: [R] fp32, one per completion.
        mask: [R, P] bool, the tokens that count. Values outside the mask must be finite and have no effect. A row
            without tokens counts as a sequence whose loss is 0.
        ref_logprobs: [R, P] fp32, under the reference; required if beta is not 0.
        beta: weight of k3.
        correct_k3: multiply k3 by the token's ratio, so that its gradient is that of the divergence (DeepSeek-V3.2,
            https://arxiv.org/abs/2512.02556). TRL 1.16 does this by default; the GRPO paper does not.
        epsilon_low, epsilon_high: clipping range of the ratio below and above 1; DAPO's "clip-higher" uses 0.2 and
            0.28, GSPO uses 3e-4 and 4e-4.
        n_sequences: sequences in all forward passes of the optimizer step; None takes R of this batch.
        n_tokens: tokens in the masks of all forward passes of the optimizer step; None takes those of this batch.
        max_completion_length: required for loss type dr_grpo.
        importance_weights: [R, P] fp32, see `rollouts.importance.importance_weights`.

    Returns:
        The loss, a scalar; and, detached, the ratios [R, P] and the unweighted k3 [R, P] (None without ref_logprobs),
        which are 1 and 0 outside the mask.

    Raises:
        ValueError: shapes differ, an argument required by the loss type or by beta is missing, or the loss type is
            unknown.
    """
    if not logprobs.shape == old_logprobs.shape == mask.shape or logprobs.shape[:1] != advantages.shape:
        shapes = [list(tensor.shape) for tensor in (logprobs, old_logprobs, mask, advantages)]
        raise ValueError(f"logprobs, old_logprobs, mask and advantages have shapes {shapes}, expected [R, P] and [R]")
    if beta != 0.0 and ref_logprobs is None:
        raise ValueError(f"beta is {beta}, which needs ref_logprobs")
    lengths = mask.sum(dim=1, keepdim=True).clamp(min=1)
    log_ratio = torch.where(mask, logprobs - old_logprobs, 0.0)
    token_ratio = ratio = log_ratio.exp()
    if loss_type == "gspo":
        ratio = (log_ratio.sum(dim=1, keepdim=True) / lengths).exp()
    advantage = advantages[:, None]
    per_token = -torch.minimum(ratio * advantage, ratio.clamp(1 - epsilon_low, 1 + epsilon_high) * advantage)
    if importance_weights is not None:
        per_token = per_token * importance_weights
    k3 = None
    if ref_logprobs is not None:
        difference = torch.where(mask, ref_logprobs - logprobs, 0.0)
        k3 = difference.exp() - difference - 1
        per_token = per_token + beta * (k3 * token_ratio if correct_k3 else k3)
    per_token = torch.where(mask, per_token, 0.0)
    n_rows = len(per_token)
    n_sequences = n_rows if n_sequences is None else n_sequences
    if loss_type in ("grpo", "gspo"):
        loss = (per_token.sum(dim=1, keepdim=True) / lengths).sum() / n_sequences
    elif loss_type == "bnpo":
        loss = per_token.sum() / mask.sum().clamp(min=1) * (n_rows / n_sequences)
    elif loss_type == "dapo":
        loss = per_token.sum() / (mask.sum().clamp(min=1) if n_tokens is None else n_tokens)
    elif loss_type == "dr_grpo":
        if max_completion_length is None:
            raise ValueError("loss_type 'dr_grpo' needs max_completion_length")
        loss = per_token.sum() / (n_sequences * max_completion_length)
    else:
        raise ValueError(f"loss_type is {loss_type!r}, expected grpo, bnpo, dapo, dr_grpo or gspo")
    ratio = torch.where(mask, ratio.detach(), 1.0)
    return loss, ratio, None if k3 is None else k3.detach()


# The loop


@dataclass(kw_only=True)
class GroupOptions(RolloutOptions):
    """Options of `update_on_rollout`: of loops that compare the completions of a prompt."""

    n_generations: int = option(8, "completions per prompt", at_least=2)
    loss_type: LossType = option("dapo", "how the loss is averaged over tokens; gspo: one ratio per sequence")
    beta: float = option(
        0.0, "weight of the k3 divergence from the reference in the loss; 0 needs no reference", at_least=0
    )
    correct_k3: bool = option(False, "multiply k3 by the ratio, which makes its gradient that of the divergence")
    epsilon: float = option(
        0.2, "how far a ratio may go below 1 before it is clipped; gspo's paper has 3e-4", above=0, below=1
    )
    epsilon_high: float | None = option(
        None, "how far above 1; none is epsilon, 0.28 is DAPO's clip-higher; gspo's paper has 4e-4", above=0
    )
    mask_truncated_completions: bool = option(
        False, "exclude completions truncated at max_completion_length from the loss, as DAPO does"
    )
    completions_per_row: int = option(
        1,
        "training: put up to so many completions of a prompt into one row after it, separated in attention, so that "
        "the prompt is computed once for them; share_prompts does so while completions are sampled",
        at_least=1,
    )


@dataclass(kw_only=True)
class GRPOConfig(LoggedOptions, GroupOptions):
    """Train a causal language model on rewarded completions by GRPO, dense, under a mask, or with adapters."""

    max_completion_length: int = option(512, "longest completion in tokens")
    scale_rewards: Literal["auto", "group", "batch", "none"] = option(
        "auto", "divide advantages by the rewards' standard deviation; auto is none for dr_grpo, group for the others"
    )
    eval_temperature: float = option(
        0.0, "sampling temperature of evaluation; 0 takes the most likely tokens", at_least=0
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.ref_name is not None and self.beta == 0:
            raise ConfigError(f"a reference ({self.ref_name}) is used with beta only: set --beta above 0")

    @property
    def scale(self) -> Scale:
        """The standard deviation that advantages are divided by; "auto" depends on the loss type."""
        if self.scale_rewards == "auto":
            return "none" if self.loss_type == "dr_grpo" else "group"
        return self.scale_rewards


def check_rows(run: TrainingRun, reference: Reference | None) -> None:
    """Refuse a policy or a reference that cannot compute several completions in a row, if the options ask for it.

    Raises:
        ConfigError: see `check_shared_prompts`.
    """
    config = run.config
    assert isinstance(config, GroupOptions)
    if config.completions_per_row == 1:
        return
    longest = max(len(example.ids) for example in run.data)
    longest += config.completions_per_row * (config.max_completion_length + 1)
    check_shared_prompts(run.model, longest, "completions_per_row")
    if reference is not None and config.ref_name is not None:
        with reference.weights():
            check_shared_prompts(reference.model, longest, "completions_per_row")


def update_on_rollout(
    run: TrainingRun,
    sampled: Rollout,
    advantages: Tensor,
    *,
    ref_logprobs: Tensor | None = None,
) -> dict[str, Tensor | None]:
    """Make `num_iterations` passes over a rollout, each of `n_minibatches` optimizer steps.

    Rows are processed in order, `batch_size` per forward pass, so that the completions of a group are in the same step
    if the step is large enough. If the rollout's log-probabilities were computed `batch_size` rows at a time
    (`rows_per_pass`), the ratios are exactly 1 until the first optimizer step.

    Args:
        run: its config is a `GroupOptions`. With `mask_truncated_completions`, completions without EOS are excluded
            from the loss; they still count as sequences.
        advantages: [R] fp32.
        ref_logprobs: [R, P] under the reference, see `rollout_logprobs`; required if beta is not 0.

    Returns:
        loss, the mean over the optimizer steps; and over all trained tokens: the mean ratio and its largest distance
        from 1 (ratio_mean, ratio_error), the shares whose gradient was clipped to 0 with a ratio below and above 1
        (clip_low, clip_high), and the mean of k3 (kl; None without a reference). With an importance sampling
        correction also those of `rollout_weights`.
    """
    config = run.config
    assert isinstance(config, GroupOptions)
    epsilon, epsilon_high = config.epsilon, config.epsilon_high or config.epsilon
    rows_per_step = config.batch_size * config.gradient_accumulation_steps
    counts = sampled.batch.completion_mask.sum(dim=1)
    if config.mask_truncated_completions:
        counts = torch.where(sampled.ended, counts, 0)
    weights, corrected = rollout_weights(config, sampled)
    loss_sum, ratio_error, sums = (torch.zeros(n, dtype=torch.float32, device=run.device) for n in (1, 1, 4))
    for _ in range(config.num_iterations):
        for first in range(0, len(sampled), rows_per_step):
            end = min(first + rows_per_step, len(sampled))
            n_tokens = counts[first:end].sum().clamp(min=1)
            for rows, is_last in run.training_passes(end, start=first):
                part = sampled.select(rows)
                mask = part.mask & part.ended[:, None] if config.mask_truncated_completions else part.mask
                with run.time("forward_backward"):
                    loss, ratio, k3 = grpo_loss(
                        part.token_logprobs(run.model, config.temperature),
                        part.logprobs,
                        advantages[rows],
                        mask,
                        ref_logprobs=None if ref_logprobs is None else sampled.cut(ref_logprobs, rows),
                        beta=config.beta,
                        correct_k3=config.correct_k3,
                        epsilon_low=epsilon,
                        epsilon_high=epsilon_high,
                        loss_type=config.loss_type,
                        n_sequences=end - first,
                        n_tokens=n_tokens,
                        max_completion_length=config.max_completion_length,
                        importance_weights=None if weights is None else sampled.cut(weights, rows),
                    )
                    run.backward(loss, is_last)
                loss_sum += loss.detach()
                ratio_error = torch.cat([ratio_error, (ratio - 1).abs().flatten()]).amax(dim=0, keepdim=True)
                advantage = advantages[rows, None]
                low, high = (ratio < 1 - epsilon) & (advantage < 0), (ratio > 1 + epsilon_high) & (advantage > 0)
                kl = ratio.new_zeros(()) if k3 is None else k3.sum()
                sums += torch.stack([torch.where(mask, ratio, 0.0).sum(), low.sum(), high.sum(), kl])
            run.update()
    run.ranks.sum(loss_sum)
    run.ranks.sum(sums)
    run.ranks.max(ratio_error)
    ratio_mean, clip_low, clip_high, kl = sums / (config.num_iterations * counts.sum()).clamp(min=1)
    return {
        "loss": loss_sum / (config.num_iterations * -(-len(sampled) // rows_per_step)),
        "ratio_mean": ratio_mean,
        "ratio_error": ratio_error,
        "clip_low": clip_low,
        "clip_high": clip_high,
        "kl": None if ref_logprobs is None else kl,
        **corrected,
    }


def reward_metrics(scores: Scores) -> dict[str, float | Tensor | None]:
    """The mean reward, and that of each function; None for a function that applied to no completion."""
    by_function = scores.means()
    return {"reward": scores.total.nanmean()} | {
        f"rewards/{name}": by_function.get(name) for name in scores.by_function
    }


def evaluate(run: TrainingRun, engine: Engine, rewards: Rewards, config: GRPOConfig) -> dict[str, Any]:
    """Sample one completion of each evaluation prompt: mean rewards, lengths, and the truncated share."""
    data = run.eval_data or []
    sequences: list[TokenSequence] = []
    ended = []
    for examples in chunks(data, config.completions_per_step):
        part = sample(
            engine,
            [example.ids for example in examples],
            n_generations=1,
            sampling=sampling_of(config, config.eval_temperature),
            pad_id=run.pad_id,
            device=run.device,
            ranks=run.ranks,
        )
        sequences += part.sequences
        ended.append(part.ended)
    _, scores = score_completions(run, rewards, sequences, data)
    return reward_metrics(scores) | completion_metrics(sequences, torch.cat(ended))


def train(config: GRPOConfig) -> dict[str, Any]:
    """Run GRPO and return its summary; outputs and errors as in `dpo.train`."""
    rewards = load_rewards(config.reward_functions, config.reward_weights)  # fails before the run writes files
    run = TrainingRun(config, "grpo", "prompt")
    reference = run.reference() if config.beta > 0 else None
    check_rows(run, reference)
    engine = configured_engine(config, run.model, run.tokenizer)
    with closing(engine), run:
        for step in run.steps(lambda: evaluate(run, engine, rewards, config)):
            prompts = run.examples_of(step)
            examples = [example for example in prompts for _ in range(config.n_generations)]
            sampled = sample_rollout(run, engine, prompts, config.n_generations, config.completions_per_row)
            agreement = engine_agreement(config, sampled)
            with run.time("reward"):
                texts, scores = score_completions(run, rewards, sampled.sequences, examples)
            ref_logprobs = reference_logprobs(run, reference, sampled)
            advantages = group_advantages(scores.total, config.n_generations, scale=config.scale)
            statistics = update_on_rollout(run, sampled, advantages.to(run.device), ref_logprobs=ref_logprobs)
            if run.samples_due(step):
                by_function = {f"rewards/{name}": values for name, values in scores.by_function.items()}
                columns = {"reward": scores.total, **by_function, "advantage": advantages}
                run.log_samples(step, sample_rows([example.text for example in examples], texts, columns))
            groups = scores.total.view(-1, config.n_generations)
            run.log(
                step,
                n_tokens=sampled.batch.n_tokens,
                **statistics,
                **agreement,
                **reward_metrics(scores),
                reward_std=scores.total[~scores.total.isnan()].std(correction=0),
                zero_std_groups=is_flat(groups).float().mean(),
                # Mean of -logprob over the sampled tokens; with top_p or top_k this does not estimate the entropy.
                entropy=-sampled.logprobs.sum() / sampled.batch.n_trained,
                **completion_metrics(sampled.sequences, sampled.ended),
            )
        return run.finish()
