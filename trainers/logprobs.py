"""Log-probabilities of completions under a causal language model."""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable

from .encoding import TokenBatch

# fp32 logits alive at once: 2^24 elements are 64 MiB, where 4 sequences of 1024 tokens over 128k words have 2 GiB.
_CHUNK_ELEMENTS = 1 << 24


def completion_logprobs(model: nn.Module, batch: TokenBatch) -> torch.Tensor:
    """Sum of the log-probabilities of each sequence's trained tokens: [B] fp32.

    Logits are made from the first position that predicts a trained token on, and log-softmax is fp32 whatever the
    model's dtype. No temperature is applied.
    """
    n_positions = batch.input_ids.shape[1] - batch.first_trained + 1  # the last one predicts nothing
    takes_positions = "logits_to_keep" in inspect.signature(model.forward).parameters
    logits = model(
        input_ids=batch.input_ids,
        attention_mask=batch.attention_mask,
        use_cache=False,
        **({"logits_to_keep": n_positions} if takes_positions else {}),
    ).logits[:, -n_positions:]  # [B, P, V]
    # Position t predicts token t + 1.
    labels = F.pad(batch.input_ids[:, batch.first_trained :], (0, 1))
    trained = F.pad(batch.completion_mask[:, batch.first_trained :], (0, 1))
    logprobs = selected_logprobs(logits, labels)
    return torch.where(trained, logprobs, 0.0).sum(dim=1)


def selected_logprobs(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """log_softmax(logits)[..., labels] in fp32: [...] for logits [..., V] and int64 labels [...].

    Equals `torch.log_softmax(logits.float(), -1).gather(-1, labels)` and its gradient, without ever holding the fp32
    logits or probabilities of more than a chunk of rows.
    """
    flat: torch.Tensor = _SelectedLogprobs.apply(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1))
    return flat.view(labels.shape)


class _SelectedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        log_norm = logits.new_empty(len(logits), dtype=torch.float32)
        selected = torch.empty_like(log_norm)
        for rows in _chunks(logits):
            chunk = logits[rows].float()
            torch.logsumexp(chunk, dim=1, out=log_norm[rows])
            selected[rows] = chunk.gather(1, labels[rows, None])[:, 0] - log_norm[rows]
        ctx.save_for_backward(logits, labels, log_norm)
        return selected

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_selected: torch.Tensor) -> tuple[torch.Tensor, None]:
        # d selected / d logits = onehot(label) - softmax(logits)
        logits, labels, log_norm = ctx.saved_tensors
        grad_logits = torch.empty_like(logits)
        for rows in _chunks(logits):
            weight = grad_selected[rows, None]
            chunk = (logits[rows].float() - log_norm[rows, None]).exp_().mul_(-weight)
            grad_logits[rows] = chunk.scatter_add_(1, labels[rows, None], weight)
        return grad_logits, None


def _chunks(logits: torch.Tensor) -> list[slice]:
    n_rows, vocabulary = logits.shape
    size = max(1, _CHUNK_ELEMENTS // vocabulary)
    return [slice(start, start + size) for start in range(0, n_rows, size)]
