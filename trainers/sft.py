"""Supervised fine-tuning on completions, dense, sparse or with adapters.

The loss is the negative log-likelihood of the completion tokens, including EOS, averaged over all completion tokens of
the step; prompt tokens have no loss. Preference data trains the chosen completion. With `packing` a row of a batch
holds several sequences (see `data/packing.py`); the loss is unchanged.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sparse_opt.config import option
from sparse_opt.errors import ConfigError

from .data.encoding import TokenBatch, TokenSequence, collate_examples
from .data.loaders import data_loader
from .data.packing import check_packing, collate_packed, packed_rows, packing_loader
from .options import GraphOptions
from .policy.logprobs import completion_logprobs
from .run.reporting.samples import sample_completions
from .run.training_run import TrainingRun


@dataclass(kw_only=True)
class SFTConfig(GraphOptions):
    """Train a causal language model on prompts and completions, dense, under a mask or with adapters."""

    learning_rate: float = option(2e-5, "peak learning rate")
    packing: bool = option(
        False, "pack sequences into rows of max_length, separated in attention; batch_size then counts rows"
    )
    padding_free: bool = option(
        False,
        "pack the sequences of each forward pass into rows as long as its longest; batch_size still counts sequences, "
        "and the steps are those without packing",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.packing and self.padding_free:
            raise ConfigError("options 'packing' and 'padding_free' are true: give one")
        self.require_no_padding("packing")
        self.require_no_padding("padding_free")


def sft_loss(logprobs: Tensor, n_trained: int | Tensor) -> Tensor:
    """Negative log-likelihood per token: scalar, from summed log-probabilities [B] and the number of trained tokens.

    With the token count of the whole step, the losses of its micro-batches add up to the mean of the step.
    """
    return -logprobs.sum() / n_trained


def n_trained_tokens(examples: Sequence[list[TokenSequence]]) -> int:
    """Number of trained tokens."""
    return sum(sequence.n_trained for example in examples for sequence in example)


def _batch(
    examples: Sequence[list[TokenSequence]], *, pad_id: int, multiple: int, packing: bool, padding_free: bool
) -> TokenBatch:
    """The batch of a forward pass on the CPU; with packing an example is a packed row."""
    if padding_free:
        examples = packed_rows([sequence for (sequence,) in examples])
    elif not packing:
        return collate_examples(examples, pad_id, multiple)
    return collate_packed(examples, pad_id)


def train(config: SFTConfig, algorithm: str = "sft") -> dict[str, Any]:
    """Run SFT and return its summary; outputs and errors as in `dpo.train`.

    Args:
        algorithm: the name used in folders, trackers and the summary; loops that call this one pass their own.
    """
    load = data_loader("demonstration", config)
    run = TrainingRun(config, algorithm, packing_loader(load, config.max_length) if config.packing else load)
    if config.packing or config.padding_free:
        check_packing(run.model)
    collate = partial(
        _batch,
        pad_id=run.pad_id,
        multiple=config.length_multiple,
        packing=config.packing,
        padding_free=config.padding_free,
    )
    with run:

        def evaluate() -> dict[str, Tensor]:
            assert run.eval_data is not None
            logprobs = torch.zeros((), dtype=torch.float32, device=run.device)
            for rows in run.passes(len(run.eval_data)):
                logprobs += completion_logprobs(run.model, collate(run.eval_data[rows]).to(run.device)).sum()
            return {"loss": sft_loss(run.ranks.sum(logprobs), n_trained_tokens(run.eval_data))}

        def take_step(batches: Iterable[TokenBatch], tensors: Sequence[Tensor]) -> Tensor:
            (n_trained,) = tensors
            sums = torch.zeros(2, dtype=torch.float32, device=run.device)  # the loss, and the size of all batches
            with run.time("forward_backward"):
                passes = zip(run.training_passes(config.examples_per_step), batches, strict=True)
                for (_, is_last), batch in passes:
                    loss = sft_loss(completion_logprobs(run.model, batch), n_trained)
                    run.backward(loss, is_last)
                    sums[0] += loss.detach()
                    sums[1] += batch.input_ids.numel()
            run.update()
            return sums

        training_step = run.whole_step(take_step)
        for step in run.steps(evaluate):
            examples = run.examples_of(step)
            n_tokens = sum(len(sequence.ids) for example in examples for sequence in example)
            n_trained = torch.tensor(n_trained_tokens(examples), dtype=torch.float32, device=run.device)
            loss, n_padded = run.ranks.sum(training_step(run.batches(step, collate), [n_trained]))

            if run.samples_due(step):
                run.log_samples(step, sample_completions(run, [row[0] for row in examples]))
            run.log(
                step,
                n_tokens=n_tokens,
                loss=loss,
                padding=1 - n_tokens / n_padded,
            )
        return run.finish()
