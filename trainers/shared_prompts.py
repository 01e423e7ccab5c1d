"""Rows that compute a prompt once: its tokens, then its completions, which do not see each other.

The sequences of a row share the tokens that are equal in all and not trained, except for the last of them: each branch
of the row begins with a copy of it, so that every trained token is predicted from the column before it, as in separate
rows. With a prompt of P tokens and n completions of C, a row has P - 1 + n (C + 1) tokens instead of n (P + C).
Positions in a branch continue from the shared tokens. If the first tokens of the sequences differ, as after truncation
to their ends, they share nothing, and the row holds all as they are. Up to rounding, results equal those of separate
rows. Prefix Grouper (https://arxiv.org/abs/2506.05433) does the same.

On a GPU, attention in such rows is computed without a mask, in one of two ways:

- `Pieces` attends by flash attention for pieces of a row: the shared tokens, and each sequence's own tokens. A piece
  attends to the shared tokens before it, and causally to itself; that is causal attention of its queries to the keys of
  both, aligned at their ends. Each pair of tokens is computed once. Queries and outputs stay where they are; only keys
  and values of the shared tokens are copied, once for each sequence.
- `SeparateRows` copies queries, keys and values into a row for each sequence, padded at the right, and attends as
  without shared prompts: by torch's causal attention, cuDNN's on recent GPUs, which computes more pairs in the same
  time. It computes the pairs of shared tokens once for each sequence, and those of padding.

`lay_out` chooses between them. A mask over the whole row (`branch_mask`), which other devices and dtypes take, excludes
both kinds of kernels, and all pairs of its tokens are computed.
"""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from sparse_opt.errors import ConfigError

from .batches import TokenBatch, TokenSequence, common_prefix_length
from .models import attends_without_masks, causal_lm

# The bottom-right causal window is torch 2.11's; heads that share keys need no argument before torch 2.12.
_OPTIONS: Mapping[str, Any] = {}
with contextlib.suppress(ImportError):  # torch without it: `supports` is False for pieces
    from torch.nn.attention.varlen import varlen_attn

    _OPTIONS = inspect.signature(varlen_attn).parameters
# Lengths are rounded up to a multiple: compiled layers are compiled again for another one, and cuDNN plans again.
_PIECE_MULTIPLE = 128
_ROW_MULTIPLE = 64
# Rows have a multiple of this many tokens: attention kernels on GPUs copy masks with other rows in each layer.
_ALIGNMENT = 8
# Separate rows may have this many times the pairs of pieces. An estimate from the times in docs/dev/notebook.md ("A DPO
# step in a CUDA graph"): cuDNN computes 2.3 times as many pairs per second, and copies take a part of that.
_MAX_PAIRS_RATIO = 1.75


# Rows


def n_shared_tokens(group: Sequence[TokenSequence]) -> int:
    """Number of leading tokens that a row computes once for all sequences of a group."""
    n_untrained = min(sequence.prompt_length for sequence in group)
    first, *others = (sequence.ids[:n_untrained] for sequence in group)
    n_common = min(
        (n_untrained if other == first else common_prefix_length(first, other) for other in others), default=n_untrained
    )
    return max(n_common - 1, 0)


def n_row_tokens(group: Sequence[TokenSequence]) -> int:
    """Number of tokens of a group's row, without padding."""
    return sum(len(sequence.ids) for sequence in group) - (len(group) - 1) * n_shared_tokens(group)


def branch_offsets(group: Sequence[TokenSequence]) -> list[int]:
    """For each sequence of a group, the column of its own tokens in the row, minus their position in the sequence."""
    shared = n_shared_tokens(group)
    lengths = [len(sequence.ids) - shared for sequence in group[:-1]]
    return [sum(lengths[:number]) for number in range(len(group))]


def collate_shared_prompts(
    groups: Sequence[Sequence[TokenSequence]], pad_id: int, multiple: int = 1, *, separate_rows: bool = False
) -> TokenBatch:
    """One row for each group on the CPU: the shared tokens, the rest of each sequence, and padding.

    `n_tokens` counts the shared tokens once.

    Args:
        multiple: lengths are rounded up to a multiple, and `first_trained` down, so that fewer different shapes occur.
        separate_rows: the layout is `SeparateRows` in any case. `Pieces` have more shapes, and numbers on the host,
            which a CUDA graph would keep.
    """
    lengths = [n_row_tokens(group) for group in groups]
    length = max(lengths, default=1)
    length += -length % math.lcm(multiple, _ALIGNMENT)
    input_ids = torch.full((len(groups), length), pad_id, dtype=torch.int64, device="cpu")
    attention_mask, position_ids, branches = (torch.zeros_like(input_ids) for _ in range(3))
    completion_mask = torch.zeros_like(input_ids, dtype=torch.bool)
    first_trained = min((group[0].prompt_length for group in groups), default=1)
    branch_rows = []
    for row, group in enumerate(groups):
        shared, offsets = n_shared_tokens(group), branch_offsets(group)
        branch_rows.append(BranchRow(shared, [*(offset + shared for offset in offsets[1:]), lengths[row]]))
        for number, (sequence, offset) in enumerate(zip(group, offsets, strict=True)):
            end, begin = offset + len(sequence.ids), 0 if number == 0 else offset + shared
            input_ids[row, begin:end] = torch.tensor(sequence.ids[begin - offset :], dtype=torch.int64, device="cpu")
            attention_mask[row, begin:end] = 1
            position_ids[row, begin:end] = torch.arange(begin - offset, len(sequence.ids), device="cpu")
            branches[row, offset + shared :] = number + 1  # the last with the padding, which no token sees
            completion_mask[row, offset + max(sequence.prompt_length, 1) : end] = True
    return TokenBatch(
        input_ids,
        attention_mask,
        completion_mask,
        first_trained=max(first_trained // multiple * multiple, 1),
        n_tokens=sum(lengths),
        n_trained=sum(sequence.n_trained for group in groups for sequence in group),
        position_ids=position_ids,
        branches=branches,
        branch_layout=SeparateRows.of(branch_rows, length, multiple) if separate_rows else lay_out(branch_rows, length),
    )


def check_shared_prompts(model: Any) -> None:
    """Raise ConfigError unless the model's layers attend to all previous tokens: see `models.make_masks_skippable`."""
    if not attends_without_masks(model):
        config = causal_lm(model).config
        found = f"a model of type {config.model_type} with attention '{config._attn_implementation}'"
        differs = "may not compute a row of several completions like separate rows"
        raise ConfigError(f"option 'share_prompts': {found} {differs}; leave it out")


# Attention without a mask


class BranchRow(NamedTuple):
    """Where the sequences of a row are: shared tokens, then each sequence's own tokens, then padding."""

    n_shared: int
    ends: Sequence[int]  # of each sequence's own tokens, in the order of the row

    def own(self) -> Iterator[tuple[int, int]]:
        """Start and end of each sequence's own tokens."""
        return pairwise([self.n_shared, *self.ends])


class Pieces(NamedTuple):
    """The pieces of B rows of T tokens, as positions in the B T tokens of all rows; all tensors on one device."""

    query_ends: Tensor  # [pieces + 1] int32: 0, then where each piece ends
    keys: Tensor  # [n_keys] int64: the tokens to which the pieces attend, piece by piece: shared ones, then its own
    key_ends: Tensor  # [pieces + 1] int32: 0, then where the keys of each piece end
    copies: Tensor  # [B T, c] int64: where `keys` has each token; -1 if it has it less than c times
    most_queries: int  # at least the number of tokens of the longest piece
    most_keys: int

    @classmethod
    def of(cls, rows: Sequence[BranchRow], n_tokens: int) -> Pieces:
        """The pieces of rows of `n_tokens`, on the CPU. A row's padding belongs to its last piece."""
        query_ends, key_ends, keys = [0], [0], []
        most_copies = max((1 + len(row.ends) if row.n_shared else 1 for row in rows), default=1)
        copies = torch.full((len(rows) * n_tokens, most_copies), -1, dtype=torch.int64, device="cpu")
        for number, row in enumerate(rows):
            first = number * n_tokens
            pieces = [*([(0, row.n_shared)] if row.n_shared else []), *row.own()]
            pieces[-1] = (pieces[-1][0], n_tokens)
            for piece, (start, end) in enumerate(pieces):
                own = _range(first + start, first + end)
                before = _range(first, first + (row.n_shared if start else 0))
                at = _range(key_ends[-1], key_ends[-1] + len(before) + len(own))
                keys += [before, own]
                if len(before):
                    copies[before, piece] = at[: len(before)]
                copies[own, 0] = at[len(before) :]
                query_ends.append(first + end)
                key_ends.append(key_ends[-1] + len(at))
        longest = [max((b - a for a, b in pairwise(ends)), default=1) for ends in (query_ends, key_ends)]
        return cls(
            torch.tensor(query_ends, dtype=torch.int32, device="cpu"),
            torch.cat(keys) if keys else _range(0, 0),
            torch.tensor(key_ends, dtype=torch.int32, device="cpu"),
            copies,
            *(_rounded_up(length, _PIECE_MULTIPLE) for length in longest),
        )

    def map(self, function: Callable[[Tensor], Tensor]) -> Pieces:
        """The layout with other tensors, such as those on another device."""
        return self._replace(
            query_ends=function(self.query_ends),
            keys=function(self.keys),
            key_ends=function(self.key_ends),
            copies=function(self.copies),
        )

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
        """See `BranchLayout`."""
        rows, n_heads, n_tokens, size = query.shape
        shared_keys: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in _OPTIONS else {}
        found: Any = varlen_attn(
            _tokens(query),
            _Gathered.apply(_tokens(key), self.keys, self.copies),
            _Gathered.apply(_tokens(value), self.keys, self.copies),
            self.query_ends,
            self.key_ends,
            self.most_queries,
            self.most_keys,
            scale=scaling,
            window_size=(-1, 0),
            **shared_keys,
        )
        output: Tensor = found.view(rows, n_tokens, n_heads, size)
        return output


class SeparateRows(NamedTuple):
    """A row of L columns for each of the N sequences in B rows of T tokens; all tensors on one device.

    The sequences' own tokens, and the shared ones in the first sequence of each row, take the outputs of their columns.
    The outputs of a row's padding are those of other tokens; their gradients must be zero and are not used. Indices are
    int32, because compiled layers compute with them for each element that they copy.
    """

    columns: Tensor  # [N, L] int32: the token in each column, of the B T; the row's first one in padding
    copies: Tensor  # [B T, c] int32: the columns with each token, of the N L, its output's first; -1 if less than c
    outputs: Tensor  # [N, L] int32: the token that takes the column's output; -1 if none does

    @classmethod
    def of(cls, rows: Sequence[BranchRow], n_tokens: int, multiple: int = 1) -> SeparateRows:
        """The separate rows of rows of `n_tokens`, on the CPU; L is also a multiple of `multiple`.

        With a multiple above 1, rows that share nothing have as many copies as others: so that fewer shapes occur.
        """
        lengths = _lengths(rows)
        n_columns = _rounded_up(max(lengths, default=1), math.lcm(_ROW_MULTIPLE, multiple))
        most_copies = max((len(row.ends) if row.n_shared or multiple > 1 else 1 for row in rows), default=1)
        columns = torch.zeros(len(lengths), n_columns, dtype=torch.int64, device="cpu")
        outputs = torch.full_like(columns, -1)
        copies = torch.full((len(rows) * n_tokens, most_copies), -1, dtype=torch.int64, device="cpu")
        sequence = 0
        for number, row in enumerate(rows):
            first = number * n_tokens
            before = _range(first, first + row.n_shared)
            for branch, (start, end) in enumerate(row.own()):
                own = _range(first + start, first + end)
                at = sequence * n_columns + _range(0, len(before) + len(own))
                columns[sequence] = first
                columns[sequence, : len(at)] = torch.cat([before, own])
                outputs[sequence, len(before) : len(at)] = own
                copies[own, 0] = at[len(before) :]
                if len(before):
                    copies[before, branch] = at[: len(before)]
                if branch == 0:
                    outputs[sequence, : len(before)] = before
                sequence += 1
        return cls(columns.int(), copies.int(), outputs.int())

    def map(self, function: Callable[[Tensor], Tensor]) -> SeparateRows:
        """The layout with other tensors, such as those on another device."""
        return SeparateRows(*(function(part) for part in self))

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
        """See `BranchLayout`."""
        rows, n_heads, n_tokens, size = query.shape
        of_output = self.copies[:, :1]  # the gradients of other copies of a query are zero
        found = F.scaled_dot_product_attention(
            self._separate(query, of_output),
            self._separate(key, self.copies),
            self._separate(value, self.copies),
            is_causal=True,
            scale=scaling,
            enable_gqa=key.shape[1] != n_heads,
        )
        output: Tensor = _Gathered.apply(_tokens(found), of_output[:, 0].clamp(min=0), self.outputs.view(-1, 1))
        return output.view(rows, n_tokens, n_heads, size)

    def _separate(self, part: Tensor, copies: Tensor) -> Tensor:
        """[N, heads, L, size] of [B, heads, T, size]; the gradient is the sum over `copies`."""
        found: Tensor = _Gathered.apply(_tokens(part), self.columns.flatten(), copies)
        return found.view(*self.columns.shape, part.shape[1], part.shape[3]).transpose(1, 2)


# Its `attend` returns the attention's output, [B, T, heads, size], for query [B, heads, T, size] and key and value
# [B, heads or a divisor of it, T, size].
BranchLayout = Pieces | SeparateRows


def lay_out(rows: Sequence[BranchRow], n_tokens: int) -> BranchLayout:
    """The layout of rows of `n_tokens`, on the CPU: separate rows unless they have many more pairs than pieces.

    Pairs are those of a query and a key that it sees. With two completions in each row, and sequences of one length,
    separate rows have at most twice the pairs; more completions and differences in length make the ratio larger.
    """
    lengths = _lengths(rows)
    pairs = sum(row.n_shared**2 for row in rows)
    for row in rows:
        pairs += sum((end - start) * (2 * row.n_shared + end - start) for start, end in row.own())
    padded = len(lengths) * _rounded_up(max(lengths, default=1), _ROW_MULTIPLE) ** 2
    return (SeparateRows if padded <= _MAX_PAIRS_RATIO * pairs else Pieces).of(rows, n_tokens)


def supports(layout: BranchLayout, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether `layout.attend` is possible, and faster than a mask, with queries of this dtype and device.

    On a CPU, separate rows are not: torch's attention takes as long for them as with a mask.
    """
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return False
    if isinstance(layout, Pieces) and "window_size" not in _OPTIONS:
        return False
    return torch.backends.cuda.is_flash_attention_available() and torch.cuda.get_device_capability(device) >= (8, 0)


class _Gathered(torch.autograd.Function):
    """tokens[index]; its gradient is a sum over copies in a fixed order, without sorting or atomic additions.

    `copies` [tokens, c] are positions in `index`; -1 adds nothing. Sums are rounded to bf16 or fp16 once.
    """

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, index: Tensor, copies: Tensor) -> Tensor:
        ctx.save_for_backward(copies)
        return tokens[index]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        def of(at: Tensor) -> Tensor:
            return torch.where((at >= 0)[:, None, None], grad[at.clamp(min=0)], 0)

        (copies,) = ctx.saved_tensors
        first, *others = copies.unbind(1)
        total = of(first)
        if len(others) > 1:  # the sum of two is rounded once in any dtype
            total = total.to(torch.promote_types(grad.dtype, torch.float32))
        for at in others:
            total = total + of(at)
        return total.to(grad.dtype), None, None


def _lengths(rows: Sequence[BranchRow]) -> list[int]:
    """The number of tokens of each sequence, shared ones included."""
    return [row.n_shared + end - start for row in rows for start, end in row.own()]


def _tokens(part: Tensor) -> Tensor:
    """[B T, heads, size] of [B, heads, T, size]."""
    return part.transpose(1, 2).reshape(-1, part.shape[1], part.shape[3])


def _range(start: int, end: int) -> Tensor:
    return torch.arange(start, end, device="cpu")


def _rounded_up(length: int, multiple: int) -> int:
    return length + -length % multiple


# Attention with a mask


def branch_mask(branches: Tensor, dtype: torch.dtype) -> Tensor:
    """The additive mask of causal attention within each branch: [B, 1, T, T], 0 where a token (row) sees another one.

    A token sees itself and the previous tokens of the shared ones and of its own branch. Elsewhere the mask is the
    lowest value of the dtype. It is additive because torch's attention turns a boolean one into this in every layer,
    and keeps each of them for the backward pass; all layers share this one.

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
