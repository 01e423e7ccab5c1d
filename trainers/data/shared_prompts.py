"""Rows that compute the prompt of a pair once: its tokens, then both completions, which do not see each other.

The two sequences of a pair share the tokens that are equal in both and not trained, except for the last of them: each
branch of the row begins with a copy of it, so that every trained token is predicted from the column before it, as in
separate rows. With a prompt of P tokens and completions of C and R tokens, a row has P + C + R + 1 tokens instead of
2 P + C + R. Positions in a branch continue from the shared tokens. If the first tokens of the two sequences differ, as
after truncation to their ends, they share nothing, and the row holds both as they are.

The result equals that of separate rows, up to rounding, in models whose layers attend to all tokens of a mask and
read positions from position ids. `check_shared_prompts` refuses the others.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sparse_opt.errors import ConfigError
from sparse_opt.files import one_line

from ..policy.branch_mask import IMPLEMENTATIONS, attention_dtype, branch_mask
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


def n_shared_tokens(first: TokenSequence, second: TokenSequence) -> int:
    """Number of leading tokens that a row computes once for both sequences."""
    n_untrained = min(first.prompt_length, second.prompt_length)
    a, b = first.ids[:n_untrained], second.ids[:n_untrained]
    n_common = n_untrained if a == b else common_prefix_length(a, b)
    return max(n_common - 1, 0)


def n_row_tokens(pair: Sequence[TokenSequence]) -> int:
    """Number of tokens of a pair's row, without padding."""
    first, second = pair
    return len(first.ids) + len(second.ids) - n_shared_tokens(first, second)


def collate_shared_prompts(pairs: Sequence[Sequence[TokenSequence]], pad_id: int) -> TokenBatch:
    """One row for each pair on the CPU: the shared tokens, the rest of the first sequence, that of the second, padding.

    `n_tokens` counts the shared tokens once.
    """
    lengths = [n_row_tokens(pair) for pair in pairs]
    length = max(lengths, default=1)
    length += -length % _ALIGNMENT
    input_ids = torch.full((len(pairs), length), pad_id, dtype=torch.int64, device="cpu")
    attention_mask, position_ids, branches = (torch.zeros_like(input_ids) for _ in range(3))
    completion_mask = torch.zeros_like(input_ids, dtype=torch.bool)
    for row, ((first, second), end) in enumerate(zip(pairs, lengths, strict=True)):
        middle = len(first.ids)
        shared = middle + len(second.ids) - end
        ids = [*first.ids, *second.ids[shared:]]
        input_ids[row, :end] = torch.tensor(ids, dtype=torch.int64, device="cpu")
        attention_mask[row, :end] = 1
        position_ids[row, :middle] = torch.arange(middle, device="cpu")
        position_ids[row, middle:end] = torch.arange(shared, len(second.ids), device="cpu")
        branches[row, shared:middle] = 1
        branches[row, middle:] = 2  # with the padding, which no token sees
        completion_mask[row, max(first.prompt_length, 1) : middle] = True
        completion_mask[row, middle + max(second.prompt_length, 1) - shared : end] = True
    return TokenBatch(
        input_ids,
        attention_mask,
        completion_mask,
        first_trained=min((max(first.prompt_length, 1) for first, _ in pairs), default=1),
        n_tokens=sum(lengths),
        n_trained=sum(sequence.n_trained for pair in pairs for sequence in pair),
        position_ids=position_ids,
        branches=branches,
    )


def check_shared_prompts(model: Any, longest_row: int) -> None:
    """Refuse a model that computes a row of two branches differently from two rows.

    Its configuration shows most of these models. The others fail a test on random tokens: within rounding, the logits
    of the second branch must not depend on the first, and those of both must equal the logits of separate rows.

    Args:
        longest_row: maximum number of tokens in a row.

    Raises:
        ConfigError: the model is refused; the message names the model and the cause.
    """
    cause = _unsupported(causal_lm(model), longest_row)
    if not cause:
        with torch.no_grad(), running_eagerly(model):
            cause = _difference(model)
    if cause:
        name = type(causal_lm(model)).__name__
        raise ConfigError(f"option 'share_prompts': {name} {cause}; set it to false")


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


def _difference(model: Any) -> str:
    """How the logits of a branching row differ from those of separate rows; empty if they are the same."""
    device = next(model.parameters()).device
    generator = torch.Generator(device="cpu").manual_seed(0)
    vocabulary = model.config.get_text_config().vocab_size
    prompt, first, other, second = torch.randint(vocabulary, (4, 8), generator=generator, device="cpu").tolist()
    sequences = [TokenSequence(prompt + completion, len(prompt)) for completion in (first, other, second)]
    after_first, after_other = (
        _logits(model, collate_shared_prompts([(before, sequences[2])], pad_id=0).to(device))[0]
        for before in (sequences[0], sequences[1])
    )
    alone = _logits(model, collate([sequences[0], sequences[2]], pad_id=0).to(device))
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


def _logits(model: Any, batch: TokenBatch) -> Tensor:
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
    except (TypeError, ValueError, RuntimeError) as error:  # models differ in how they fail on a mask of 4 dimensions
        raise ConfigError(
            f"option 'share_prompts': {type(call).__name__} fails with a 4D mask and position ids; set it to false "
            f"({type(error).__name__}: {one_line(error)})"
        ) from error
    return logits.float()
