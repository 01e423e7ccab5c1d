"""Group Relative Policy Optimization (https://arxiv.org/abs/2402.03300) and its variants: DAPO, Dr. GRPO, GSPO.

    python -m sparse_opt.trainers.grpo --model M --data prompts.jsonl --mask masks/M.safetensors --output_dir runs/grpo

Each prompt gets a group of completions, sampled from the policy; the advantage of a completion is its reward relative
to its group. One rollout can be used for several optimizer steps; ratios are relative to the policy that sampled it.

This file is to be read and measured (`sparse-opt bench baseline grpo` times `rollout` and `grpo_step`). Train with
`sparse-opt train grpo`, which is TRL under a mask: it has what is left out here, such as several GPUs, vLLM, several
rewards, checkpoints, schedules and evaluation. bf16 weights have no fp32 master copies: small updates are lost.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from sparse_opt.files import save_model
from sparse_opt.integrations.trl.rewards import RewardFunction, load_rewards
from sparse_opt.tensors import resolve_device

from .batches import Prompt, load_prompts, require_known_tokens, shuffled
from .console import Metrics, StepTimer, run_module
from .models import load_model
from .modes import Section, Trained, train_model, untimed
from .pretrained import load_tokenizer_from
from .sampling import Rollout, Sampling, rollout, stop_ids
from .shared_prompts import check_shared_prompts

LossType = Literal["grpo", "bnpo", "dapo", "dr_grpo", "gspo"]
Scale = Literal["group", "batch", "none"]
_STD_FLOOR = 1e-4  # limits the advantages in a group of nearly equal rewards; TRL's value


# Options


@dataclass
class GRPOConfig:
    """GRPO on one device, of all weights, under a mask, or with LoRA."""

    model: str  # hub name or local folder
    data: str  # prompts: a .jsonl, .json or .parquet file, or a hub name
    output_dir: Path  # new folder, for metrics.jsonl and the trained model
    split: str = "train"  # of a hub dataset
    max_prompt_length: int = 512  # tokens; longer prompts are dropped
    reward: str = "exact_match"  # compares with the column answer; or module.function, called as TRL calls it

    n_steps: int = 100  # rollouts
    batch_size: int = 8  # prompts of a rollout
    n_generations: int = 8  # completions of a prompt
    max_completion_length: int = 256  # tokens
    temperature: float = 1.0
    num_iterations: int = 1  # optimizer steps on each rollout
    rows_per_pass: int | None = None  # completions of a forward pass; none is all of a rollout
    learning_rate: float = 1e-6
    loss_type: LossType = "dapo"  # how the loss is averaged over tokens; gspo: one ratio per sequence
    scale_rewards: Scale = "group"  # divide advantages by the standard deviation of the group, the batch, or nothing
    beta: float = 0.0  # weight of the divergence from the initial weights; 0 needs no reference
    epsilon: float = 0.2  # how far a ratio may go below 1 before it is clipped
    epsilon_high: float = 0.2  # how far above 1; DAPO has 0.28

    mask: str | None = None  # mask file: train its elements; of a pattern of tiles, compute only their gradients
    density: float | None = None  # train a random mask of this density
    pattern: str = "element"  # of the random mask: element, run16, run32, tile64 or tile128
    lora_rank: int | None = None  # train adapters of this rank

    share_prompts: bool = False  # compute each prompt once for its completions, in sampling and in training
    compile: bool = False  # torch.compile the layers
    gradient_checkpointing: bool = False
    dtype: Literal["bf16", "fp32"] = "bf16"
    device: str = "auto"  # auto, cpu, cuda or cuda:N
    seed: int = 0  # of the order of the data, sampling, the random mask and LoRA's initial values


# From rewards to the loss


def group_advantages(rewards: Tensor, n_generations: int, *, scale: Scale = "group") -> Tensor:
    """(reward - its group's mean) / (std + 1e-4): [G * n_generations] fp32.

    Exactly 0 in a group whose rewards are all the same, because Adam would turn a rounding error into a full step. A
    completion without a reward (NaN) has the advantage 0 and is excluded from mean and standard deviation, as in TRL.

    Args:
        rewards: [G * n_generations]; the n_generations, at least 2, of a group are contiguous.
        scale: divide by the sample standard deviation of the group, or of all rewards (https://arxiv.org/abs/2508.08221),
            or do not divide, as in Dr. GRPO (https://arxiv.org/abs/2503.20783).

    Raises:
        ValueError: fewer than two completions per group, or the number of rewards is not a multiple of n_generations.
    """
    if n_generations < 2 or rewards.dim() != 1 or rewards.numel() % n_generations:
        shape = list(rewards.shape)
        raise ValueError(f"rewards have shape {shape}, n_generations is {n_generations}: expected groups of at least 2")
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
    missing = groups.isnan()
    lowest = groups.masked_fill(missing, torch.inf).amin(dim=1, keepdim=True)
    is_flat = groups.masked_fill(missing, -torch.inf).amax(dim=1, keepdim=True) <= lowest
    return torch.where(missing | is_flat, 0.0, advantages).view(-1)


def grpo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    ref_logprobs: Tensor | None = None,
    beta: float = 0.0,
    epsilon_low: float = 0.2,
    epsilon_high: float = 0.2,
    loss_type: LossType = "dapo",
    n_sequences: int | None = None,
    n_tokens: int | Tensor | None = None,
    max_completion_length: int | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The clipped policy loss with the k3 estimate of the KL divergence from a reference: equations 3 and 4.

    Per token -min(ratio * A, clip(ratio, 1 - epsilon_low, 1 + epsilon_high) * A) + beta * k3, with
    ratio = exp(logprob - old) and k3 = exp(ref - logprob) - (ref - logprob) - 1. The loss type determines the average:

    | loss_type | |
    |---|---|
    | grpo | mean over sequences of the means over their tokens |
    | bnpo | mean over the tokens of this forward pass, then over the passes of the optimizer step |
    | dapo | mean over the tokens of the optimizer step (https://arxiv.org/abs/2503.14476) |
    | dr_grpo | sum over sequences times `max_completion_length` (https://arxiv.org/abs/2503.20783) |
    | gspo | grpo with one ratio per sequence, exp(mean of logprob - old) (https://arxiv.org/abs/2507.18071) |

    With `n_sequences` and `n_tokens` of the whole optimizer step, the losses of its forward passes add up to the loss
    of the step; bnpo alone depends on the split. Names are TRL's, where gspo is importance_sampling_level sequence.

    Args:
        logprobs, old_logprobs: [R, P] fp32, of the tokens under the policy, and under the one that sampled them.
        advantages: [R] fp32, one per completion.
        mask: [R, P] bool, the tokens that count. Values outside the mask must be finite and have no effect.
        ref_logprobs: [R, P] fp32, under the reference; required if beta is not 0.
        n_sequences, n_tokens: in all forward passes of the optimizer step; None takes those of this one.
        max_completion_length: required for loss type dr_grpo.

    Returns:
        The loss, a scalar; and, detached, the ratios [R, P] and the unweighted k3 [R, P] (None without ref_logprobs),
        which are 1 and 0 outside the mask.

    Raises:
        ValueError: shapes differ, an argument is missing, or the loss type is unknown.
    """
    if not logprobs.shape == old_logprobs.shape == mask.shape or logprobs.shape[:1] != advantages.shape:
        shapes = [list(tensor.shape) for tensor in (logprobs, old_logprobs, mask, advantages)]
        raise ValueError(f"logprobs, old_logprobs, mask and advantages have shapes {shapes}, expected [R, P] and [R]")
    if beta != 0.0 and ref_logprobs is None:
        raise ValueError(f"beta is {beta}, which needs ref_logprobs")
    lengths = mask.sum(dim=1, keepdim=True).clamp(min=1)
    log_ratio = torch.where(mask, logprobs - old_logprobs, 0.0)
    ratio = log_ratio.exp()
    if loss_type == "gspo":
        ratio = (log_ratio.sum(dim=1, keepdim=True) / lengths).exp()
    advantage = advantages[:, None]
    per_token = -torch.minimum(ratio * advantage, ratio.clamp(1 - epsilon_low, 1 + epsilon_high) * advantage)
    k3 = None
    if ref_logprobs is not None:
        difference = torch.where(mask, ref_logprobs - logprobs, 0.0)
        k3 = difference.exp() - difference - 1
        per_token = per_token + beta * k3
    per_token = torch.where(mask, per_token, 0.0)
    n_sequences = n_sequences or len(mask)
    if loss_type in ("grpo", "gspo"):
        loss = (per_token.sum(dim=1, keepdim=True) / lengths).sum() / n_sequences
    elif loss_type == "bnpo":
        loss = per_token.sum() / mask.sum().clamp(min=1) * (len(mask) / n_sequences)
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


# Rewards


def rewards_of(reward: RewardFunction, tokenizer: Any, prompts: Sequence[Prompt], sampled: Rollout) -> Tensor:
    """The reward of each completion, [R] fp32 on the CPU; NaN where the function returns None."""
    repeated = [prompt for prompt in prompts for _ in range(len(sampled) // len(prompts))]
    decoded = tokenizer.batch_decode(sampled.completions, skip_special_tokens=True)
    completions = [
        text if isinstance(prompt.text, str) else [{"role": "assistant", "content": text}]
        for prompt, text in zip(repeated, decoded, strict=True)
    ]
    columns = {name: [prompt.row[name] for prompt in repeated] for name in repeated[0].row if name != "prompt"}
    texts = [prompt.text for prompt in repeated]
    found = reward(prompts=texts, completions=completions, completion_ids=sampled.completions, **columns)
    return torch.tensor([torch.nan if r is None else r for r in found], dtype=torch.float32, device="cpu")


# Step


def reference_logprobs(trained: Trained, sampled: Rollout, temperature: float, rows_per_pass: int | None) -> Tensor:
    """Log-probabilities of a rollout's sampled tokens under the initial weights: [R, P] fp32, 0 elsewhere."""
    with torch.no_grad(), trained.reference_weights():
        return sampled.token_logprobs(trained.reference, temperature, rows_per_pass)


def grpo_step(
    trained: Trained,
    sampled: Rollout,
    advantages: Tensor,
    ref_logprobs: Tensor | None = None,
    section: Section = untimed,
    *,
    temperature: float = 1.0,
    rows_per_pass: int | None = None,
    **loss_options: Any,
) -> dict[str, Tensor]:
    """One optimizer step on a rollout, without a synchronization.

    Args:
        advantages, ref_logprobs: see `group_advantages` and `reference_logprobs`; the latter if beta is not 0.
        rows_per_pass: completions of a forward pass; None is all.
        loss_options: of `grpo_loss`, such as beta.

    Returns:
        Scalars: loss, grad_norm, ratio_error (the largest |ratio - 1|), and with a reference the largest k3.
    """
    n_tokens = sampled.mask.sum().clamp(min=1)
    losses, errors, k3s = [], [], []
    for rows, part in sampled.minibatches(rows_per_pass or len(sampled)):
        with section("forward"):
            loss, ratio, k3 = grpo_loss(
                part.token_logprobs(trained.policy, temperature),
                part.logprobs,
                advantages[rows],
                part.mask,
                ref_logprobs=None if ref_logprobs is None else sampled.cut(ref_logprobs, rows),
                n_sequences=len(sampled),
                n_tokens=n_tokens,
                **loss_options,
            )
        with section("backward"):
            loss.backward()
        losses.append(loss.detach())
        errors.append((ratio - 1).abs().max())
        k3s += [] if k3 is None else [k3.max()]
    norm = trained.update(section)
    found = {"loss": sum(losses[1:], losses[0]), "grad_norm": norm, "ratio_error": torch.stack(errors).max()}
    return found | ({"k3": torch.stack(k3s).max()} if k3s else {})


# The run


def train(config: GRPOConfig) -> None:
    """Run GRPO; see the module."""
    device = resolve_device(config.device)
    (reward,) = load_rewards([config.reward])
    metrics = Metrics(config.output_dir, config.n_steps)

    # Model
    tokenizer = load_tokenizer_from(config.model)
    model = load_model(config.model, device, config.dtype, gradient_checkpointing=config.gradient_checkpointing)
    eos_ids = stop_ids(model, tokenizer)
    pad_id = eos_ids[0] if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    if config.share_prompts:
        check_shared_prompts(model)
    trained = train_model(model, config, reference=config.beta > 0)

    # Data
    data = load_prompts(config.data, config.split, tokenizer, max_length=config.max_prompt_length)
    require_known_tokens(model, tokenizer, (prompt.ids for prompt in data))

    # Steps
    timer, sampling = StepTimer(device), Sampling(config.max_completion_length, config.temperature)
    torch.manual_seed(config.seed)
    for step in range(1, config.n_steps + 1):
        first = (step - 1) * config.batch_size
        prompts = [data[index] for index in shuffled(len(data), config.seed, first, config.batch_size)]
        with timer.section("rollout"):
            sampled = rollout(
                trained.policy,
                [prompt.ids for prompt in prompts],
                sampling,
                n_generations=config.n_generations,
                pad_id=pad_id,
                eos_ids=eos_ids,
                rows_per_pass=config.rows_per_pass,
                share_prompts=config.share_prompts,
                completions_per_row=config.n_generations if config.share_prompts else 1,
            )
        with timer.section("reward"):
            rewards = rewards_of(reward, tokenizer, prompts, sampled)
        advantages = group_advantages(rewards, config.n_generations, scale=config.scale_rewards).to(device)
        ref_logprobs = None
        if config.beta > 0:
            with timer.section("reference"):
                ref_logprobs = reference_logprobs(trained, sampled, sampling.logprob_temperature, config.rows_per_pass)
        for _ in range(config.num_iterations):
            found = grpo_step(
                trained,
                sampled,
                advantages,
                ref_logprobs,
                timer.section,
                temperature=sampling.logprob_temperature,
                rows_per_pass=config.rows_per_pass,
                beta=config.beta,
                epsilon_low=config.epsilon,
                epsilon_high=config.epsilon_high,
                loss_type=config.loss_type,
                max_completion_length=config.max_completion_length,
            )

        # Metrics
        of_rollout = {"reward": rewards.nanmean(), "length": sampled.mask.sum() / len(sampled)}
        metrics.write(step, found | of_rollout, timer.read())
    save_model(trained.saved, tokenizer, config.output_dir / "model")


def main(argv: Sequence[str] | None = None) -> int:
    """Run GRPO with the options of a command line."""
    return run_module(GRPOConfig, train, argv, "grpo")


if __name__ == "__main__":
    sys.exit(main())
