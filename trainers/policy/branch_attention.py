"""Attention in rows of several sequences with a shared prompt, by flash attention on pieces of the rows.

A row's pieces are its shared tokens and each sequence's own tokens. A piece attends to the shared tokens before it, and
causally to itself; that is causal attention of its queries to the keys of both, aligned at their ends. So nothing is
computed between sequences, and queries and outputs stay where they are; only keys and values of the shared tokens are
copied, once for each sequence. A mask over the whole row (`logprobs.branch_mask`) excludes flash attention, and all
pairs of its tokens are computed.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

# The bottom-right causal window is torch 2.11's; heads that share keys need no argument before torch 2.12.
_OPTIONS: Mapping[str, Any] = {}
with contextlib.suppress(ImportError):  # torch without it: `supports` is False
    from torch.nn.attention.varlen import varlen_attn

    _OPTIONS = inspect.signature(varlen_attn).parameters
_LENGTHS = 128  # lengths are rounded up to a multiple: compiled layers are compiled again for another one


class BranchLayout(NamedTuple):
    """The pieces of B rows of T tokens, as positions in the B T tokens of all rows; all tensors on one device."""

    query_ends: Tensor  # [pieces + 1] int32: 0, then where each piece ends
    keys: Tensor  # [n_keys] int64: the tokens to which the pieces attend, piece by piece: shared ones, then its own
    key_ends: Tensor  # [pieces + 1] int32: 0, then where the keys of each piece end
    copies: Tensor  # [B T, c] int64: where `keys` has each token; -1 if it has it less than c times
    most_queries: int  # at least the number of tokens of the longest piece
    most_keys: int

    @classmethod
    def of(cls, rows: list[tuple[int, list[int]]], n_tokens: int) -> BranchLayout:
        """The layout of rows of `n_tokens`, on the CPU.

        Args:
            rows: of each row, the number of shared tokens, and where each sequence's own tokens end; the last one's
                end with the row.
        """
        query_ends, key_ends, keys = [0], [0], []
        most_copies = max((1 + len(ends) if shared else 1 for shared, ends in rows), default=1)
        copies = torch.full((len(rows) * n_tokens, most_copies), -1, dtype=torch.int64, device="cpu")
        for row, (shared, ends) in enumerate(rows):
            first = row * n_tokens
            starts = [0, shared, *ends[:-1]] if shared else [0, *ends[:-1]]
            for number, (start, end) in enumerate(zip(starts, [shared, *ends] if shared else ends, strict=True)):
                own = torch.arange(first + start, first + end, device="cpu")
                before = torch.arange(first, first + (shared if start else 0), device="cpu")
                at = torch.arange(key_ends[-1], key_ends[-1] + len(before) + len(own), device="cpu")
                keys += [before, own]
                if len(before):
                    copies[before, number] = at[: len(before)]
                copies[own, 0] = at[len(before) :]
                query_ends.append(first + end)
                key_ends.append(key_ends[-1] + len(at))
        longest = [max((b - a for a, b in pairwise(ends)), default=1) for ends in (query_ends, key_ends)]
        return cls(
            torch.tensor(query_ends, dtype=torch.int32, device="cpu"),
            torch.cat(keys) if keys else torch.zeros(0, dtype=torch.int64, device="cpu"),
            torch.tensor(key_ends, dtype=torch.int32, device="cpu"),
            copies,
            *(length + -length % _LENGTHS for length in longest),
        )

    def map(self, function: Callable[[Tensor], Tensor]) -> BranchLayout:
        """The layout with other tensors, such as those on another device."""
        return self._replace(
            query_ends=function(self.query_ends),
            keys=function(self.keys),
            key_ends=function(self.key_ends),
            copies=function(self.copies),
        )


def supports(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether `branch_attention` can compute with queries of this dtype and device."""
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16) or "window_size" not in _OPTIONS:
        return False
    return torch.backends.cuda.is_flash_attention_available() and torch.cuda.get_device_capability(device) >= (8, 0)


def branch_attention(query: Tensor, key: Tensor, value: Tensor, layout: BranchLayout, scaling: float | None) -> Tensor:
    """The attention's output, [B, T, heads, size], for query [B, heads, T, size].

    Args:
        key, value: [B, heads or a divisor of it, T, size].
    """
    rows, n_heads, n_tokens, size = query.shape
    keys, values = (
        _Copied.apply(part.transpose(1, 2).reshape(rows * n_tokens, -1, size), layout.keys, layout.copies)
        for part in (key, value)
    )
    shared_keys: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in _OPTIONS else {}
    found: Any = varlen_attn(
        query.transpose(1, 2).reshape(rows * n_tokens, n_heads, size),
        keys,
        values,
        layout.query_ends,
        layout.key_ends,
        layout.most_queries,
        layout.most_keys,
        scale=scaling,
        window_size=(-1, 0),
        **shared_keys,
    )
    output: Tensor = found.view(rows, n_tokens, n_heads, size)
    return output


class _Copied(torch.autograd.Function):
    """tokens[keys]; its gradient sums over copies in a fixed order, in fp32, without sorting or atomic additions."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, keys: Tensor, copies: Tensor) -> Tensor:
        ctx.save_for_backward(copies)
        return tokens[keys]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (copies,) = ctx.saved_tensors
        total = grad[copies[:, 0]].float()  # each token is a key of its own piece
        for at in copies[:, 1:].unbind(1):
            total = total + torch.where((at >= 0)[:, None, None], grad[at.clamp(min=0)], 0)
        return total.to(grad.dtype), None, None
