"""Supervised fine-tuning on completions, dense or sparse.

The loss is the negative log-likelihood of the completion's tokens (EOS among them), averaged over all completion tokens
of the step; prompts are read, never trained. Preference data trains the chosen completion.

Left out: packing, evaluation and resuming.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from .config import option
from .logprobs import completion_logprobs
from .loop import TrainingRun
from .options import TrainingOptions


@dataclass(kw_only=True)
class SFTConfig(TrainingOptions):
    """Train a causal language model on prompts and completions, dense or under a mask."""

    learning_rate: float = option(2e-5, "peak learning rate")


def sft_loss(logprobs: torch.Tensor, n_trained: int) -> torch.Tensor:
    """Negative log-likelihood per token: scalar, from summed log-probabilities [B] and the tokens to average over.

    Given the token count of the whole step, the losses of its micro-batches add up to the step's mean.
    """
    return -logprobs.sum() / n_trained


def train(config: SFTConfig) -> dict[str, Any]:
    """Run SFT and return its summary; outputs and errors as in `dpo.train`."""
    with TrainingRun(config, "sft", "demonstration") as run:
        for step in run.steps():
            batches = run.batches(step)
            n_trained = sum(batch.n_trained for batch in batches)

            losses = []
            with run.time("forward_backward"):
                for batch in batches:
                    loss = sft_loss(completion_logprobs(run.model, batch), n_trained)
                    loss.backward()
                    losses.append(loss.detach())

            with run.time("optimizer"):
                run.optimizer.step()
                run.optimizer.zero_grad()

            run.log(step, n_tokens=sum(batch.n_tokens for batch in batches), loss=torch.stack(losses).sum())
        return run.finish()
