"""Packing of short sequences into rows of `max_length` tokens, which reduces padding.

A packed row must train like its separate sequences: positions restart with each sequence, and no token attends to
another sequence. transformers implements both with position ids: without an attention mask,
`masking_utils.create_causal_mask` treats every step of the position ids other than +1 as the border of a sequence and
makes a block mask. Not every model takes position ids or makes its masks there, so `check_packing` tests the model
before training.
"""

from __future__ import annotations

import bisect
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from sparse_opt.errors import ConfigError

from ..policy.models import causal_lm
from .encoding import ExampleReport, TokenBatch, TokenSequence
from .loaders import LoadData
from .rows import counter


def pack(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Best-fit decreasing: rows of indices into `lengths`, the sum of a row's lengths at most `capacity`.

    Sequences are placed longest first, each into the oldest row among those with the least sufficient space, or into a
    new row. The rows are those of TRL's packing strategy `bfd`, in the same order.

    Raises:
        ValueError: a length above `capacity` or below 1.
    """
    rows: list[list[int]] = []
    rows_with: defaultdict[int, deque[int]] = defaultdict(deque)  # space left -> rows, the oldest first
    spaces: list[int] = []  # the keys of rows_with that have rows, ascending
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        length = lengths[index]
        if not 1 <= length <= capacity:
            raise ValueError(f"sequence {index} has {length} tokens: expected 1 to {capacity}")
        place = bisect.bisect_left(spaces, length)
        if place < len(spaces):
            space = spaces[place]
            row = rows_with[space].popleft()
            if not rows_with[space]:
                del spaces[place]
        else:
            space, row = capacity, len(rows)
            rows.append([])
        rows[row].append(index)
        space -= length
        if space:
            if not rows_with[space]:
                bisect.insort(spaces, space)
            rows_with[space].append(row)
    return rows


@dataclass
class PackingReport(ExampleReport):
    """Counts of a dataset's used and dropped rows, and the number of packed rows."""

    n_packed_rows: int = counter("packed into {} rows")


def packing_loader(load: LoadData, max_length: int) -> LoadData:
    """A loader of demonstrations whose examples are packed rows: lists of the sequences in a row."""

    def load_packed(
        dataset: str, split: str, tokenizer: Any, subset_size: int | None, seed: int
    ) -> tuple[list[list[TokenSequence]], PackingReport]:
        examples, report = load(dataset, split, tokenizer, subset_size, seed)
        sequences: list[TokenSequence] = [sequence for (sequence,) in examples]
        rows = pack([len(sequence.ids) for sequence in sequences], max_length)
        packed = PackingReport(**asdict(report), n_packed_rows=len(rows))
        return [[sequences[index] for index in row] for row in rows], packed

    return load_packed


def packed_rows(sequences: Sequence[TokenSequence]) -> list[list[TokenSequence]]:
    """Pack these sequences into rows that are at most as long as the longest of them."""
    lengths = [len(sequence.ids) for sequence in sequences]
    return [[sequences[index] for index in row] for row in pack(lengths, max(lengths, default=1))]


def collate_packed(rows: Sequence[Sequence[TokenSequence]], pad_id: int) -> TokenBatch:
    """Rows of concatenated sequences as one batch on the CPU, padded to the longest row.

    The first token of a sequence is not trained, because the token before it belongs to another sequence. Padding forms
    one more sequence.
    """
    length = max((sum(len(sequence.ids) for sequence in row) for row in rows), default=1)
    input_ids = torch.full((len(rows), length), pad_id, dtype=torch.int64, device="cpu")
    attention_mask = torch.zeros(len(rows), length, dtype=torch.int64, device="cpu")
    completion_mask = torch.zeros(len(rows), length, dtype=torch.bool, device="cpu")
    position_ids = torch.zeros(len(rows), length, dtype=torch.int64, device="cpu")
    first_trained = length
    for i, row in enumerate(rows):
        end = 0
        for sequence in row:
            start, end = end, end + len(sequence.ids)
            trained = start + max(sequence.prompt_length, 1)
            input_ids[i, start:end] = torch.tensor(sequence.ids, dtype=torch.int64, device="cpu")
            attention_mask[i, start:end] = 1
            completion_mask[i, trained:end] = True
            position_ids[i, start:end] = torch.arange(end - start, device="cpu")
            first_trained = min(first_trained, trained)
        position_ids[i, end:] = torch.arange(length - end, device="cpu")
    return TokenBatch(
        input_ids,
        attention_mask,
        completion_mask,
        first_trained=first_trained,
        n_tokens=sum(len(sequence.ids) for row in rows for sequence in row),
        n_trained=sum(sequence.n_trained for row in rows for sequence in row),
        position_ids=position_ids,
    )


# Relative to the norm of the logits. Rounding in a forward pass of another shape causes errors of some units of the
# dtype's precision (2^-24, 2^-9) per layer; a wrong position or an additional token changes logits by their own size.
SAME_LOGITS = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 1e-1}


@torch.no_grad()
def check_packing(model: Any) -> None:
    """Refuse a model that processes a packed sequence differently from the sequence alone; tested on random tokens.

    The logits of a sequence that follows another one in its row must not depend on that other one, to the bit, and must
    equal the logits of the sequence alone, within rounding.

    Raises:
        ConfigError: the model fails the test; the message names the model and the difference.
    """
    name = type(causal_lm(model)).__name__
    device = next(model.parameters()).device
    generator = torch.Generator(device="cpu").manual_seed(0)
    vocabulary = model.config.get_text_config().vocab_size
    words = torch.randint(vocabulary, (2, 3, 8), generator=generator, device="cpu").to(device)
    first, other, second = words.unbind(1)  # [2, 8] each; two rows, because some attention packs a single one only
    positions = torch.arange(8, device=device).repeat(2, 2)
    try:
        after_first, after_other = (
            _logits(model, torch.cat([before, second], dim=1), positions)[:, 8:] for before in (first, other)
        )
        alone = _logits(model, second, positions[:, :8])
    except TypeError as error:
        if "position_ids" not in str(error):
            raise
        raise ConfigError(f"option 'packing': {name} takes no position ids; train it without") from error
    if not torch.equal(after_first, after_other):
        raise ConfigError(f"option 'packing': in {name} a packed sequence depends on the one before; train it without")
    error_norm = ((after_first - alone).norm() / alone.norm()).item()
    allowed = SAME_LOGITS[next(model.parameters()).dtype]
    if not error_norm <= allowed:
        raise ConfigError(
            f"option 'packing': {name} gives a packed sequence other logits than alone (by {error_norm:.2g} of their "
            f"norm, expected at most {allowed:.2g}); train it without"
        )


def _logits(model: Any, input_ids: Tensor, position_ids: Tensor) -> Tensor:
    logits: Tensor = causal_lm(model)(
        input_ids=input_ids, attention_mask=None, position_ids=position_ids, use_cache=False
    ).logits
    return logits.float()
