"""Direct Preference Optimization (https://arxiv.org/abs/2305.18290) and its relatives, in one file.

    python -m sparse_opt.trainers.dpo --model M --data pairs.jsonl --mask masks/M.safetensors --output_dir runs/dpo

The policy learns to prefer the chosen completion of each pair over the rejected one; beta controls how close it stays
to its initial weights, the reference. Sparse training needs no second model for the reference, because
`SparseAdamW.base_weights` swaps the initial values of the active elements in and out; neither does LoRA, which disables
its adapters. Training of all weights keeps a frozen copy.

This file is to be read and measured (`sparse-opt bench baseline dpo` times `dpo_step`). Train with
`sparse-opt train dpo`, which is TRL under a mask: it has what is left out here, such as several GPUs, checkpoints,
learning-rate schedules, evaluation, other models as reference, and losses that need more than the log-probability sums.
bf16 weights have no fp32 master copies here: with --dtype bf16, updates below half a unit in the last place are lost.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from sparse_opt.files import save_model
from sparse_opt.tensors import resolve_device

from .batches import TokenBatch, chunks, collate_examples, load_examples, require_known_tokens, shuffled
from .console import Metrics, StepTimer, run_module
from .graphs import GraphedSteps, require_graphs
from .logprobs import completion_logprobs
from .models import load_model
from .modes import Section, Trained, train_model, untimed
from .pretrained import load_tokenizer_from
from .shared_prompts import check_shared_prompts, collate_shared_prompts

LossType = Literal["sigmoid", "robust", "hinge", "ipo"]


# Options


@dataclass
class DPOConfig:
    """DPO on one device, of all weights, under a mask, or with LoRA."""

    model: str  # hub name or local folder
    data: str  # preference pairs: a .jsonl, .json or .parquet file, or a hub name
    output_dir: Path  # new folder, for metrics.jsonl and the trained model
    split: str = "train"  # of a hub dataset
    max_length: int = 1024  # tokens of a prompt with its completion; longer completions lose their end

    n_steps: int = 100
    batch_size: int = 4  # pairs of a forward pass
    accumulation: int = 1  # forward passes of a step
    learning_rate: float = 1e-6
    beta: float = 0.1  # strength of the pull towards the reference
    loss_type: LossType = "sigmoid"
    label_smoothing: float = 0.0  # assumed share of pairs with swapped labels, of sigmoid (cDPO) and robust

    mask: str | None = None  # mask file: train its elements; of a pattern of tiles, compute only their gradients
    density: float | None = None  # train a random mask of this density
    pattern: str = "element"  # of the random mask: element, run16, run32, tile64 or tile128
    lora_rank: int | None = None  # train adapters of this rank

    precomputed_reference: bool = False  # run the reference once over all pairs, before the first step
    share_prompts: bool = False  # compute the prompt of a pair once: one row holds it and both completions
    compile: bool = False  # torch.compile the layers
    cuda_graphs: bool = False  # replay whole steps as CUDA graphs; with a mask
    pad_to_multiple_of: int = 1  # tokens; with cuda_graphs, each length of the batches has a graph of its own
    gradient_checkpointing: bool = False
    dtype: Literal["bf16", "fp32"] = "bf16"
    device: str = "auto"  # auto, cpu, cuda or cuda:N
    seed: int = 0  # of the order of the data, the random mask and LoRA's initial values


# Loss


def dpo_loss(
    policy_chosen: Tensor,
    policy_rejected: Tensor,
    ref_chosen: Tensor,
    ref_rejected: Tensor,
    beta: float,
    loss_type: LossType = "sigmoid",
    label_smoothing: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """The loss of each pair, a function of h = (policy_chosen - ref_chosen) - (policy_rejected - ref_rejected).

    h is 0 while the policy equals the reference. With e the label smoothing:

    - sigmoid: -(1 - e) log sigmoid(beta h) - e log sigmoid(-beta h). e = 0 is equation 7 of DPO
      (https://arxiv.org/abs/2305.18290), ln 2 at h = 0; e > 0 is cDPO (https://ericmitchell.ai/cdpo.pdf).
    - robust: (-(1 - e) log sigmoid(beta h) + e log sigmoid(-beta h)) / (1 - 2 e). If labels are wrong with probability
      e, its expectation is the loss under the correct labels (https://arxiv.org/abs/2403.00409, equation 13).
    - hinge: max(0, 1 - beta h), the SLiC loss on policy ratios (https://arxiv.org/abs/2305.10425).
    - ipo: (h - 1 / (2 beta))^2 (https://arxiv.org/abs/2310.12036, equation 17). TRL averages log-probabilities over
      tokens; here they are sums.

    Args:
        policy_chosen, policy_rejected, ref_chosen, ref_rejected: [B] fp32, log-probability sums over the completions.
        beta: strength of the pull towards the reference.
        label_smoothing: e of sigmoid and robust; 0 <= e < 0.5.

    Returns:
        losses [B], and the implicit rewards beta * (policy - ref) of the chosen [B] and of the rejected completions
        [B], both detached.
    """
    chosen_rewards = beta * (policy_chosen - ref_chosen)
    rejected_rewards = beta * (policy_rejected - ref_rejected)
    margins = chosen_rewards - rejected_rewards
    if loss_type == "ipo":
        losses = (margins / beta - 1 / (2 * beta)) ** 2
    elif loss_type == "hinge":
        losses = torch.relu(1 - margins)
    elif label_smoothing == 0.0:
        losses = -F.logsigmoid(margins)
    else:
        right, wrong = -F.logsigmoid(margins), -F.logsigmoid(-margins)  # the loss if the label is right, or wrong
        if loss_type == "robust":
            losses = ((1 - label_smoothing) * right - label_smoothing * wrong) / (1 - 2 * label_smoothing)
        else:
            losses = (1 - label_smoothing) * right + label_smoothing * wrong
    return losses, chosen_rewards.detach(), rejected_rewards.detach()


# Step


def reference_logprobs(trained: Trained, batches: Sequence[TokenBatch]) -> list[Tensor]:
    """Log-probability sums of each batch's completions under the initial weights: [2 x pairs] fp32."""
    with torch.no_grad(), trained.reference_weights():
        return [completion_logprobs(trained.reference, batch) for batch in batches]


def dpo_step(
    trained: Trained,
    batches: Sequence[TokenBatch],
    ref_logprobs: Sequence[Tensor] | None = None,
    section: Section = untimed,
    *,
    beta: float,
    loss_type: LossType = "sigmoid",
    label_smoothing: float = 0.0,
) -> dict[str, Tensor]:
    """One optimizer step on the mean loss of all pairs, without a synchronization.

    Args:
        batches: of each forward pass; the first half of a batch's sequences is chosen, the second half rejected.
        ref_logprobs: `reference_logprobs` of the batches; None computes them here.

    Returns:
        loss and grad_norm, scalars; and the implicit rewards `chosen` and `rejected` of each pair.
    """
    if ref_logprobs is None:
        with section("reference"):
            ref_logprobs = reference_logprobs(trained, batches)
    n_pairs = sum(len(ref) for ref in ref_logprobs) // 2
    losses, rewards = [], []
    for batch, ref in zip(batches, ref_logprobs, strict=True):
        with section("forward"):
            chosen, rejected = completion_logprobs(trained.policy, batch).chunk(2)
            ref_chosen, ref_rejected = ref.chunk(2)
            of_pairs, *found = dpo_loss(chosen, rejected, ref_chosen, ref_rejected, beta, loss_type, label_smoothing)
            loss = of_pairs.sum() / n_pairs
        with section("backward"):
            loss.backward()
        losses.append(loss.detach())
        rewards.append(torch.stack(found))
    norm = trained.update(section)
    chosen_rewards, rejected_rewards = torch.cat(rewards, dim=1)
    return {
        "loss": sum(losses[1:], losses[0]),
        "grad_norm": norm,
        "chosen": chosen_rewards,
        "rejected": rejected_rewards,
    }


# The run


def train(config: DPOConfig) -> None:
    """Run DPO; see the module."""
    device = resolve_device(config.device)
    metrics = Metrics(config.output_dir, config.n_steps)

    # Model
    tokenizer = load_tokenizer_from(config.model)
    pad_id = 0 if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    model = load_model(config.model, device, config.dtype, gradient_checkpointing=config.gradient_checkpointing)
    trained = train_model(model, config, reference=not config.precomputed_reference)

    # Data
    pairs = load_examples("preference", config.data, config.split, tokenizer, max_length=config.max_length)
    require_known_tokens(model, tokenizer, (sequence.ids for pair in pairs for sequence in pair))
    padding: dict[str, Any] = {"pad_id": pad_id, "multiple": config.pad_to_multiple_of}
    collate: Callable[..., TokenBatch] = partial(collate_examples, **padding)
    if config.share_prompts:
        check_shared_prompts(model)
        collate = partial(collate_shared_prompts, separate_rows=config.cuda_graphs, **padding)
    n_pairs = config.batch_size * config.accumulation  # of a step

    # Reference
    known: list[Tensor] = []  # [2] of each pair, if precomputed
    if config.precomputed_reference:
        for part in chunks(pairs, config.batch_size):
            (sums,) = reference_logprobs(trained, [collate(part).to(device)])
            known += sums.view(2, -1).unbind(dim=1)

    # Steps
    timer = StepTimer(device)
    take_step = partial(
        dpo_step,
        trained,
        beta=config.beta,
        loss_type=config.loss_type,
        label_smoothing=config.label_smoothing,
    )
    if config.cuda_graphs:
        require_graphs(trained.policy, trained.optimizer, device)
        graphs = GraphedSteps(lambda batches, refs: take_step(batches, refs or None), trained.optimizer)
    for step in range(1, config.n_steps + 1):
        passes = chunks(shuffled(len(pairs), config.seed, (step - 1) * n_pairs, n_pairs), config.batch_size)
        batches = [collate([pairs[index] for index in indices]).to(device) for indices in passes]
        refs = (
            [torch.stack([known[index] for index in indices], dim=1).flatten() for indices in passes] if known else None
        )
        if config.cuda_graphs:
            with timer.section("step"):
                found = graphs(batches, refs or [])
        else:
            found = take_step(batches, refs, timer.section)

        # Metrics
        chosen, rejected = found.pop("chosen"), found.pop("rejected")
        found |= {"margin": (chosen - rejected).mean(), "accuracy": (chosen > rejected).float().mean()}
        metrics.write(step, found, timer.read())
    save_model(trained.saved, tokenizer, config.output_dir / "model")


def main(argv: Sequence[str] | None = None) -> int:
    """Run DPO with the options of a command line."""
    return run_module(DPOConfig, train, argv, "dpo")


if __name__ == "__main__":
    sys.exit(main())
