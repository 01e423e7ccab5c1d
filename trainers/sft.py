"""Supervised fine-tuning on completions, dense, sparse or with adapters.

The loss is the negative log-likelihood of the completion tokens, including EOS, averaged over all completion tokens of
the step; prompt tokens have no loss. Preference data trains the chosen completion. With `packing` a row of a batch
holds several sequences (see `data/packing.py`); the loss is unchanged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sparse_opt.config import option

from .data.encoding import TokenBatch, TokenSequence
from .data.loaders import data_loader
from .data.order import chunks
from .data.packing import check_packing, collate_packed, packing_loader
from .options import TrainingOptions
from .policy.logprobs import completion_logprobs
from .run.samples import sample_completions
from .run.training_run import TrainingRun


@dataclass(kw_only=True)
class SFTConfig(TrainingOptions):
    """Train a causal language model on prompts and completions, dense, under a mask or with adapters."""

    learning_rate: float = option(2e-5, "peak learning rate")
    packing: bool = option(
        False, "pack sequences into rows of max_length, separated in attention; batch_size then counts rows"
    )


def sft_loss(logprobs: Tensor, n_trained: int) -> Tensor:
    """Negative log-likelihood per token: scalar, from summed log-probabilities [B] and the number of trained tokens.

    With the token count of the whole step, the losses of its micro-batches add up to the mean of the step.
    """
    return -logprobs.sum() / n_trained


def train(config: SFTConfig, algorithm: str = "sft") -> dict[str, Any]:
    """Run SFT and return its summary; outputs and errors as in `dpo.train`.

    Args:
        algorithm: the name used in folders, trackers and the summary; loops that call this one pass their own.
    """
    load = data_loader("demonstration", config)
    run = TrainingRun(config, algorithm, packing_loader(load, config.max_length) if config.packing else load)
    if config.packing:
        check_packing(run.model)
    with run:

        def batches_of(examples: Sequence[list[TokenSequence]]) -> list[TokenBatch]:
            if config.packing:
                return [collate_packed(rows, run.pad_id).to(run.device) for rows in chunks(examples, config.batch_size)]
            return [run.collate(part) for part in chunks(examples, config.batch_size)]

        def evaluate() -> dict[str, Tensor]:
            assert run.eval_data is not None
            batches = batches_of(run.eval_data)
            sums = [completion_logprobs(run.model, batch) for batch in batches]
            return {"loss": sft_loss(torch.cat(sums), sum(batch.n_trained for batch in batches))}

        for step in run.steps(evaluate):
            examples = run.examples_of(step)
            batches = batches_of(examples)
            n_trained = sum(batch.n_trained for batch in batches)
            n_tokens = sum(batch.n_tokens for batch in batches)

            losses = []
            with run.time("forward_backward"):
                for batch in batches:
                    loss = sft_loss(completion_logprobs(run.model, batch), n_trained)
                    loss.backward()
                    losses.append(loss.detach())
            run.update()

            if run.samples_due(step):
                run.log_samples(step, sample_completions(run, [row[0] for row in examples]))
            run.log(
                step,
                n_tokens=n_tokens,
                loss=torch.stack(losses).sum(),
                padding=1 - n_tokens / sum(batch.input_ids.numel() for batch in batches),
            )
        return run.finish()
