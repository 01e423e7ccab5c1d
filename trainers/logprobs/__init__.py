"""Log-probabilities of completions under a causal language model.

The logits of one pair of 512 tokens over 128k words are 0.26 GB in bf16, and a step would hold several copies of them,
in fp32 and as gradients. If a model's logits are exactly the product of its output layer, they are computed from the
hidden states one slice of the vocabulary at a time, and are never held as a whole, forward or backward
(`linear_logprobs`). The logits of other models are used as returned (`selected_logprobs`). `output_layer.py` detects
which case applies. If the model's layers are compiled, so is the work on a slice's logits (`fused.py`).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparse_opt.optim.gradients.tile_backward import route_of

from .. import shared_prompts
from ..batches import TokenBatch
from ..models import attends_without_masks, has_compiled_layers, skip_padding_masks
from .chunked import linear_logprobs, selected_logprobs
from .output_layer import WeightGrad, hidden_states, plain_head


def completion_logprobs(model: nn.Module, batch: TokenBatch) -> Tensor:
    """Sum of the log-probabilities of each sequence's trained tokens, as `TokenBatch.sequence_sums` orders them: fp32.

    [B], or [2B] if a row has two branches.
    """
    return batch.sequence_sums(token_logprobs(model, batch))


def token_logprobs(model: nn.Module, batch: TokenBatch, temperature: float = 1.0) -> Tensor:
    """Log-probabilities of the tokens from position `first_trained` on: [B, T - first_trained] fp32.

    0 at tokens that are not trained. The logits, of the model's dtype, are divided by `temperature`; log-softmax is
    computed in fp32. A `TokenBatch` is right-padded, so a model of `make_masks_skippable` attends without a mask.
    """
    labels = batch.input_ids[:, batch.first_trained :]
    n_positions = labels.shape[1] + 1  # position t predicts token t + 1; the last one predicts nothing
    takes_positions = _takes(getattr(model.forward, "__func__", model.forward), "logits_to_keep")
    inputs: dict[str, Any] = {
        "input_ids": batch.input_ids,
        "attention_mask": batch.attention_mask,
        "use_cache": False,
        **({"logits_to_keep": n_positions} if takes_positions else {}),
    }
    if batch.branches is not None:
        inputs["position_ids"] = batch.position_ids
        dtype = next(model.parameters()).dtype
        layout, device = batch.branch_layout, batch.input_ids.device
        if layout is not None and attends_without_masks(model) and shared_prompts.supports(layout, dtype, device):
            # transformers takes a mask of 4 dimensions as it is; the layout's attention does not use it.
            inputs |= {"attention_mask": batch.branches.new_empty(1, 1, 1, 1), "branch_layout": layout}
        else:
            inputs["attention_mask"] = shared_prompts.branch_mask(batch.branches, dtype)
    head = plain_head(model)
    fused = has_compiled_layers(model)
    weight_grad = None if head is None else WeightGrad.of(head.weight, route_of(head))
    hidden = None if head is None else hidden_states(model, head, inputs)
    if head is None or hidden is None:
        with skip_padding_masks():
            logits = model(**inputs).logits[:, -n_positions:]  # [B, P, V]
        # Labels are padded instead of cutting the logits, which would copy them.
        logprobs = selected_logprobs(logits, F.pad(labels, (0, 1)), temperature)[:, :-1]
    else:
        rows = hidden[:, -n_positions:-1]
        logprobs = linear_logprobs(rows, head.weight, labels, temperature, weight_grad=weight_grad, fused=fused)
    return torch.where(batch.completion_mask[:, batch.first_trained :], logprobs, 0.0)


@functools.lru_cache(maxsize=64)
def _takes(function: Callable[..., Any], argument: str) -> bool:
    """Whether a function has the named argument; cached, because inspecting signatures is slow."""
    return argument in inspect.signature(function).parameters
