"""Log-probabilities of completions with several of one prompt in a row, so that the prompt is computed once for them.

As in Prefix Grouper (https://arxiv.org/abs/2506.05433), up to rounding the result and its gradient are those of
completions in rows of their own. A row of n completions has P - 1 + n (C + 1) tokens in place of n (P + C).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from ..data.encoding import TokenBatch, TokenSequence
from ..data.order import chunks
from ..data.shared_prompts import branch_offsets, collate_shared_prompts
from ..policy.logprobs import token_logprobs


def grouped_logprobs(
    model: Any, batch: TokenBatch, sequences: Sequence[TokenSequence], per_row: int, temperature: float
) -> Tensor:
    """`token_logprobs(model, batch, temperature)`, computed with up to `per_row` consecutive completions in a row.

    Args:
        batch: [R, T], the `sequences` in rows of their own.
    """
    groups = [
        list(part)
        for _, of_prompt in groupby(sequences, key=lambda sequence: sequence.ids[: sequence.prompt_length])
        for part in chunks(list(of_prompt), per_row)
    ]
    device = batch.input_ids.device
    rows = collate_shared_prompts(groups, pad_id=0).to(device)  # no token sees the padding
    values = token_logprobs(model, rows, temperature)  # [rows, W]

    # The position in `values` of each sequence's position 0, also where that is before the row's first column.
    offsets = [
        row * values.shape[1] + offset - rows.first_trained
        for row, group in enumerate(groups)
        for offset in branch_offsets(group)
    ]
    first, trained = batch.first_trained, batch.completion_mask[:, batch.first_trained :]
    positions = torch.arange(first, first + trained.shape[1], device=device)
    places = torch.tensor(offsets, dtype=torch.int64, device="cpu").to(device)[:, None] + positions
    return torch.where(trained, values.flatten()[torch.where(trained, places, 0)], 0.0)
