"""Rows that compute a prompt once: its tokens, then its completions, which do not see each other.

The sequences of a row share the tokens that are equal in all and not trained, except for the last of them: each branch
of the row begins with a copy of it, so that every trained token is predicted from the column before it, as in separate
rows. With a prompt of P tokens and n completions of C, a row has P - 1 + n (C + 1) tokens instead of n (P + C).
Positions in a branch continue from the shared tokens. If the first tokens of the sequences differ, as after truncation
to their ends, they share nothing, and the row holds all as they are.

The result equals that of separate rows, up to rounding, in models whose layers attend to all tokens of a mask and
read positions from position ids. `check_shared_prompts` refuses the others.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sparse_opt.errors import ConfigError
from sparse_opt.files import one_line

from ..policy.branch_attention import BranchRow, SeparateRows, lay_out
from ..policy.logprobs.branch_mask import IMPLEMENTATIONS, attention_dtype, branch_mask
from ..policy.models import causal_lm, running_eagerly
from .encoding import TokenBatch, TokenSequence, collate, common_prefix_length
from .packing import SAME_LOGITS

# Rows have a multiple of this many tokens: attention kernels on GPUs copy masks with other rows in each layer.
_ALIGNMENT = 8
# Attributes of transformers' configurations that limit how far back a layer attends, in tokens.
_WINDOWS = (
    *("sliding_window", "sliding_window_size", "window_size", "attention_window", "attention_window_size"),
    *("attention_chunk_size", "local_attention", "local_attention_window_len", "keep_window_size"),
)
_WINDOWED_LAYERS = {"sliding_attention", "chunked_attention"}


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


def check_shared_prompts(model: Any, longest_row: int, option: str = "share_prompts") -> None:
    """Refuse a model that computes a row of several branches differently from as many rows.

    Its configuration shows most of these models. The others fail a test on random tokens: within rounding, the logits
    of the second branch must not depend on the first, and those of both must equal the logits of separate rows.

    Args:
        longest_row: maximum number of tokens in a row.
        option: the option that asks for such rows, in messages.

    Raises:
        ConfigError: the model is refused; the message names the model and the cause.
    """
    cause = _unsupported(causal_lm(model), longest_row)
    if not cause:
        with torch.no_grad(), running_eagerly(model):
            cause = _difference(model, option)
    if cause:
        name = type(causal_lm(model)).__name__
        raise ConfigError(f"option '{option}': {name} {cause}; leave it out")


def _unsupported(model: Any, longest_row: int) -> str:
    """The part of the model's configuration that excludes shared prompts; empty if there is none."""
    config = model.config.get_text_config()
    implementation = config._attn_implementation
    if implementation not in IMPLEMENTATIONS:
        return f"runs with attention '{implementation}', which takes no 4D mask (sdpa and eager do)"
    if "position_ids" not in inspect.signature(model.forward).parameters or getattr(config, "alibi", False):
        return "takes no position ids"
    kinds = set(getattr(config, "layer_types", None) or ())
    if other := sorted(kinds - _WINDOWED_LAYERS - {"full_attention"}):
        return f"has layers of {other[0]}, which read all previous tokens of a row"
    if kinds == {"full_attention"}:
        return ""
    for name in _WINDOWS if getattr(config, "use_sliding_window", True) else ():
        window = getattr(config, name, None)
        if isinstance(window, int) and window < longest_row:
            return f"attends to a window of {window} tokens ({name}), and a row has up to {longest_row}"
    return ""


def _difference(model: Any, option: str) -> str:
    """How the logits of a branching row differ from those of separate rows; empty if they are the same."""
    device = next(model.parameters()).device
    generator = torch.Generator(device="cpu").manual_seed(0)
    vocabulary = model.config.get_text_config().vocab_size
    prompt, first, other, second = torch.randint(vocabulary, (4, 8), generator=generator, device="cpu").tolist()
    sequences = [TokenSequence(prompt + completion, len(prompt)) for completion in (first, other, second)]
    after_first, after_other = (
        _logits(model, collate_shared_prompts([(before, sequences[2])], pad_id=0).to(device), option)[0]
        for before in (sequences[0], sequences[1])
    )
    alone = _logits(model, collate([sequences[0], sequences[2]], pad_id=0).to(device), option)
    allowed = SAME_LOGITS[attention_dtype(model)]
    starts_at, n_each = len(prompt) - 1, len(first) + 1  # a branch begins with the prompt's last token
    ends = starts_at + n_each
    # The shapes are the same, but in a mixture of experts the numbers of tokens of an expert are not.
    if not _distance(after_other[ends : ends + n_each], after_first[ends : ends + n_each]) <= allowed / 10:
        return "lets a completion depend on the other one in its row"
    error = _distance(after_first[starts_at : ends + n_each], alone[:, starts_at:].flatten(0, 1))
    if not error <= allowed:
        return (
            f"gives a completion other logits than in a row of its own (by {error:.2g} of their norm, expected at most "
            f"{allowed:.2g})"
        )
    return ""


def _distance(found: Tensor, expected: Tensor) -> float:
    return ((found - expected).norm() / expected.norm()).item()


def _logits(model: Any, batch: TokenBatch, option: str) -> Tensor:
    """Logits of all tokens: [B, T, V] fp32.

    Raises:
        ConfigError: the model fails on the inputs of a branching row.
    """
    inputs: dict[str, Tensor | None] = {"attention_mask": batch.attention_mask}
    if batch.branches is not None:
        mask = branch_mask(batch.branches, attention_dtype(model))
        inputs = {"attention_mask": mask, "position_ids": batch.position_ids}
    call = causal_lm(model)
    try:
        logits: Tensor = call(input_ids=batch.input_ids, **inputs, use_cache=False).logits
    except torch.OutOfMemoryError:
        raise
    except (TypeError, ValueError, RuntimeError) as error:  # models differ in how they fail on a mask of 4 dimensions
        raise ConfigError(
            f"option '{option}': {type(call).__name__} fails with a 4D mask and position ids; leave it out "
            f"({type(error).__name__}: {one_line(error)})"
        ) from error
    return logits.float()
