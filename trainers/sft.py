"""Supervised fine-tuning on completions, in one file.

    python -m sparse_opt.trainers.sft --model M --data rows.jsonl --mask masks/M.safetensors --output_dir runs/sft

The loss is the negative log-likelihood of the completion tokens, including EOS, averaged over all completion tokens of
the step; prompt tokens have no loss. Preference data trains the chosen completion.

This file is to be read and measured. Train with `sparse-opt train sft`, which is TRL under a mask: it has what is left
out here, such as several GPUs, packing, checkpoints, learning-rate schedules and evaluation. bf16 weights have no fp32
master copies here: with --dtype bf16, updates below half a unit in the last place are lost.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
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

# Options


@dataclass
class SFTConfig:
    """SFT on one device, of all weights, under a mask, or with LoRA."""

    model: str  # hub name or local folder
    data: str  # prompts with completions: a .jsonl, .json or .parquet file, or a hub name
    output_dir: Path  # new folder, for metrics.jsonl and the trained model
    split: str = "train"  # of a hub dataset
    max_length: int = 1024  # tokens of a prompt with its completion; longer completions lose their end

    n_steps: int = 100
    batch_size: int = 8  # sequences of a forward pass
    accumulation: int = 1  # forward passes of a step
    learning_rate: float = 2e-5

    mask: str | None = None  # mask file: train its elements; of a pattern of tiles, compute only their gradients
    density: float | None = None  # train a random mask of this density
    pattern: str = "element"  # of the random mask: element, run16, run32, tile64 or tile128
    lora_rank: int | None = None  # train adapters of this rank

    compile: bool = False  # torch.compile the layers
    cuda_graphs: bool = False  # replay whole steps as CUDA graphs; with a mask
    pad_to_multiple_of: int = 1  # tokens; with cuda_graphs, each length of the batches has a graph of its own
    gradient_checkpointing: bool = False
    dtype: Literal["bf16", "fp32"] = "bf16"
    device: str = "auto"  # auto, cpu, cuda or cuda:N
    seed: int = 0  # of the order of the data, the random mask and LoRA's initial values


# Loss


def sft_loss(logprobs: Tensor, n_trained: int | Tensor) -> Tensor:
    """Negative log-likelihood per token: scalar, from summed log-probabilities [B] and the number of trained tokens.

    With the token count of the whole step, the losses of its forward passes add up to the mean of the step.
    """
    return -logprobs.sum() / n_trained


# Step


def sft_step(
    trained: Trained, batches: Sequence[TokenBatch], n_trained: Tensor, section: Section = untimed
) -> dict[str, Tensor]:
    """One optimizer step on the mean loss of all trained tokens, without a synchronization.

    Args:
        n_trained: scalar on the device, the number of trained tokens in all batches.

    Returns:
        Scalars: loss and grad_norm.
    """
    losses = []
    for batch in batches:
        with section("forward"):
            loss = sft_loss(completion_logprobs(trained.policy, batch), n_trained)
        with section("backward"):
            loss.backward()
        losses.append(loss.detach())
    return {"loss": sum(losses[1:], losses[0]), "grad_norm": trained.update(section)}


# The run


def train(config: SFTConfig) -> None:
    """Run SFT; see the module."""
    device = resolve_device(config.device)
    metrics = Metrics(config.output_dir, config.n_steps)

    # Model
    tokenizer = load_tokenizer_from(config.model)
    pad_id = 0 if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    model = load_model(config.model, device, config.dtype, gradient_checkpointing=config.gradient_checkpointing)
    trained = train_model(model, config, reference=False)

    # Data
    rows = load_examples("demonstration", config.data, config.split, tokenizer, max_length=config.max_length)
    require_known_tokens(model, tokenizer, (sequence.ids for row in rows for sequence in row))
    n_rows = config.batch_size * config.accumulation  # of a step

    # Steps
    timer = StepTimer(device)
    if config.cuda_graphs:
        require_graphs(trained.policy, trained.optimizer, device)
        graphs = GraphedSteps(lambda batches, counts: sft_step(trained, batches, counts[0]), trained.optimizer)
    for step in range(1, config.n_steps + 1):
        chosen = [rows[index] for index in shuffled(len(rows), config.seed, (step - 1) * n_rows, n_rows)]
        batches = [
            collate_examples(part, pad_id, config.pad_to_multiple_of).to(device)
            for part in chunks(chosen, config.batch_size)
        ]
        n_trained = torch.tensor(sum(batch.n_trained for batch in batches), dtype=torch.float32, device=device)
        if config.cuda_graphs:
            with timer.section("step"):
                found = graphs(batches, [n_trained])
        else:
            found = sft_step(trained, batches, n_trained, timer.section)

        # Metrics
        metrics.write(step, {**found, "n_tokens": sum(batch.n_tokens for batch in batches)}, timer.read())
    save_model(trained.saved, tokenizer, config.output_dir / "model")


def main(argv: Sequence[str] | None = None) -> int:
    """Run SFT with the options of a command line."""
    return run_module(SFTConfig, train, argv, "sft")


if __name__ == "__main__":
    sys.exit(main())
