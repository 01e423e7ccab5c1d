"""The attention mask of rows that branch: shared tokens, followed by several sequences that do not see each other.

It is passed to the model as a 4D mask, which transformers uses as given with the attention implementations of
`IMPLEMENTATIONS`; that of others is made from the lengths alone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..models import SKIPPABLE_ATTENTION

IMPLEMENTATIONS = ("sdpa", "eager", SKIPPABLE_ATTENTION)


def branch_mask(branches: Tensor, dtype: torch.dtype) -> Tensor:
    """The additive mask of causal attention within each branch: [B, 1, T, T], 0 where a token (row) sees another one.

    A token sees itself and the previous tokens of the shared ones and of its own branch. Elsewhere the mask is the
    lowest value of the dtype.

    The mask is additive because torch's attention turns a boolean one into this in every layer, and keeps each of them
    for the backward pass; all layers share this one. It has 2 bytes per pair of tokens in bf16.

    Args:
        branches: [B, T] integers, 0 in shared tokens, the branch's number in others.
        dtype: that of queries and keys.
    """
    n_tokens = branches.shape[1]
    causal = torch.ones(n_tokens, n_tokens, dtype=torch.bool, device=branches.device).tril_()
    of_key, of_query = branches[:, None, :], branches[:, :, None]
    visible = ((of_key == 0) | (of_key == of_query)) & causal
    mask = torch.zeros(visible.shape, dtype=dtype, device=branches.device)
    return mask.masked_fill_(visible.logical_not_(), torch.finfo(dtype).min)[:, None]


def attention_dtype(model: Any) -> torch.dtype:
    """The dtype of a model's queries and keys in the current context."""
    weight: Tensor = next(model.parameters())
    device = weight.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype
