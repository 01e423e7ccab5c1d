"""Training data: rows of a dataset, encoded as token ids, in a seeded order, and collated into right-padded batches.

The rules of encoding follow TRL, so that losses can be compared:

- Messages go through the tokenizer's chat template, once, which also writes the special tokens; no second BOS is added.
  A tokenizer without a template gets the messages' contents joined by newlines, as plain text.
- Plain text is tokenized verbatim with the tokenizer's own special tokens, and EOS ends the completion. Neither is
  added if the text already has it.
- The prompt ends where the tokens of "prompt" and of "prompt + completion" differ, so that a token merged across the
  border counts as completion.
- A sequence longer than `max_length` keeps its start: the completion loses its end. If no completion token is left, the
  example is dropped.
"""

from __future__ import annotations

import functools
import json
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
from torch import Tensor

from sparse_opt.errors import DataError
from sparse_opt.files import one_line
from sparse_opt.integrations.trl.records import (
    Example,
    Text,
    demonstration_reader,
    preference_reader,
    prompt_reader,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ItemT = TypeVar("ItemT")


# Rows


def load_rows(dataset: str, split: str = "train") -> list[dict[str, Any]]:
    """The rows of a file, a folder or a hub dataset's split; see `integrations.trl.data.read_rows`, also for errors.

    Lines of JSON are read without the package `datasets`.
    """
    path = Path(dataset).expanduser()
    if path.suffix == ".jsonl" and path.is_file():
        try:
            return [dict(json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        except (OSError, ValueError, TypeError) as error:
            raise DataError(f"dataset {path}: cannot be read: {one_line(error)}") from error
    from sparse_opt.integrations.trl.data import read_rows

    source = SimpleNamespace(
        dataset_name=dataset, dataset_config=None, dataset_train_split=split, dataset_streaming=False
    )
    return list(read_rows(source))


def _examples(
    encode_row: Callable[[dict[str, Any]], ItemT | None],
    rows: Iterable[tuple[int, dict[str, Any]]],
    dataset: str,
    reason: str,
) -> list[ItemT]:
    """The encoded rows; a UserWarning counts those that are dropped, which `encode_row` returns as None."""
    found = []
    for number, row in rows:
        try:
            found.append(encode_row(row))
        except DataError as error:
            raise DataError(f"dataset {dataset}, row {number}: {error}") from error
    examples = [example for example in found if example is not None]
    dropped = f"{len(found) - len(examples)} of {len(found)} rows dropped as {reason}"
    if not examples:
        raise DataError(f"dataset {dataset}: no examples left; {dropped}")
    if len(examples) < len(found):
        warnings.warn(f"dataset {dataset}: {dropped}", stacklevel=3)
    return examples


# Encoding


@dataclass(frozen=True)
class TokenSequence:
    """Token ids of a prompt and its completion; the completion starts at `prompt_length`."""

    ids: list[int]
    prompt_length: int

    @property
    def n_trained(self) -> int:
        """Number of completion tokens that have a preceding token to be predicted from."""
        return len(self.ids) - max(self.prompt_length, 1)


@dataclass(frozen=True)
class Prompt:
    """A prompt with its row, whose columns reward functions receive."""

    ids: list[int]
    text: Text  # in the form of the data: messages or text
    row: dict[str, Any]


def load_examples(
    kind: Literal["preference", "demonstration"],
    dataset: str,
    split: str,
    tokenizer: PreTrainedTokenizerBase,
    subset_size: int | None = None,
    seed: int = 0,
    *,
    max_length: int,
) -> list[list[TokenSequence]]:
    """A dataset's examples as sequences: [chosen, rejected] for preferences, [completion] for demonstrations.

    Args:
        dataset, split: see `load_rows`; `integrations.trl.records` lists the columns.
        subset_size: number of rows, drawn with `seed`; None takes all rows in order. If there are fewer, all are taken,
            with a UserWarning.
        max_length: see the module's rules. Examples with an empty completion are dropped, too.

    Raises:
        DataError: see `load_rows`; or a row does not fit its format, or every row is dropped.
    """
    rows = load_rows(dataset, split)
    read = (preference_reader if kind == "preference" else demonstration_reader)(rows[0], dataset)

    def encode_row(row: dict[str, Any]) -> list[TokenSequence] | None:
        example = read(row)
        if not all(joined_text(completion).strip() for completion in example.completions):
            return None
        sequences = [replace(sequence, ids=sequence.ids[:max_length]) for sequence in encode(tokenizer, example)]
        return sequences if all(sequence.n_trained > 0 for sequence in sequences) else None

    chosen: Sequence[int] = range(len(rows))
    if subset_size is not None and subset_size < len(rows):
        chosen = permutation(len(rows), seed, 0)[:subset_size]
    elif subset_size is not None and subset_size > len(rows):
        warnings.warn(f"dataset {dataset}: has {len(rows)} rows, not subset_size {subset_size}", stacklevel=2)
    reason = f"empty, or without a completion token within max_length {max_length}"
    return _examples(encode_row, ((number, rows[number]) for number in chosen), dataset, reason)


def load_prompts(dataset: str, split: str, tokenizer: PreTrainedTokenizerBase, *, max_length: int) -> list[Prompt]:
    """A dataset's prompts, without those that are empty or longer than `max_length`; see `load_examples`."""
    rows = load_rows(dataset, split)
    read = prompt_reader(rows[0], dataset)

    def encode_row(row: dict[str, Any]) -> Prompt | None:
        text = read(row)
        ids = encode_prompt(tokenizer, text)
        return Prompt(ids, text, row) if joined_text(text).strip() and len(ids) <= max_length else None

    return _examples(encode_row, enumerate(rows), dataset, f"empty, or longer than {max_length} tokens")


def encode(tokenizer: PreTrainedTokenizerBase, example: Example) -> list[TokenSequence]:
    """Each completion after the prompt (see the module's rules)."""
    prompt, completions = example.prompt, example.completions
    if isinstance(prompt, list) and tokenizer.chat_template is None:
        prompt, completions = joined_text(prompt) + "\n", tuple(joined_text(completion) for completion in completions)
    if isinstance(prompt, str):
        prompt_ids = _text_ids(tokenizer, prompt)
        all_ids = [
            _closed(tokenizer, _text_ids(tokenizer, prompt + joined_text(completion))) for completion in completions
        ]
    else:
        prompt_ids = _chat_ids(tokenizer, prompt, add_generation_prompt=True)
        all_ids = [_chat_ids(tokenizer, [*prompt, *completion]) for completion in completions]
    prompt_length = min(common_prefix_length(prompt_ids, ids) for ids in all_ids)
    return [TokenSequence(ids, prompt_length) for ids in all_ids]


def encode_prompt(tokenizer: PreTrainedTokenizerBase, prompt: Text) -> list[int]:
    """A prompt as the input from which the model continues: messages with the start of the assistant's answer.

    Raises:
        DataError: the chat template refuses the messages.
    """
    if not isinstance(prompt, str) and tokenizer.chat_template is not None:
        return _chat_ids(tokenizer, prompt, add_generation_prompt=True)
    text = prompt if isinstance(prompt, str) else joined_text(prompt) + "\n"
    ids = _text_ids(tokenizer, text)
    # With a tokenizer that appends EOS to every text, the model would continue after EOS.
    eos = tokenizer.eos_token
    if eos is not None and len(ids) > 1 and ids[-1] == tokenizer.eos_token_id and not text.endswith(str(eos)):
        ids.pop()
    return ids


def _chat_ids(tokenizer: PreTrainedTokenizerBase, messages: Any, add_generation_prompt: bool = False) -> list[int]:
    with applying_chat_template():
        encoded = tokenizer.apply_chat_template(
            messages, tokenize=True, return_dict=True, add_generation_prompt=add_generation_prompt
        )
    return list(encoded["input_ids"])


@contextmanager
def applying_chat_template() -> Iterator[None]:
    """A context that turns any error of a tokenizer's chat template, which is a program, into a DataError."""
    from jinja2 import TemplateError

    try:
        yield
    except (TemplateError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError) as error:
        raise DataError(f"the tokenizer's chat template refuses the messages: {one_line(error)}") from error


def require_known_tokens(model: Any, tokenizer: PreTrainedTokenizerBase, sequences: Iterable[Sequence[int]]) -> None:
    """Raise DataError if a sequence has a token without an embedding in the model.

    On a GPU such a token would abort the process without naming the token.
    """
    known = model.get_input_embeddings().weight.shape[0]
    if len(tokenizer) <= known:
        return
    for ids in sequences:
        if ids and max(ids) >= known:
            token = max(ids)
            raise DataError(
                f"the data has token {token} ({tokenizer.decode([token])!r}), and the model has embeddings for {known} "
                f"of the tokenizer's {len(tokenizer)} tokens"
            )


def _text_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    # Text from a chat template already contains its BOS.
    has_bos = tokenizer.bos_token is not None and text.startswith(tokenizer.bos_token)
    return list(tokenizer(text, add_special_tokens=not has_bos)["input_ids"])


def _closed(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> list[int]:
    if tokenizer.eos_token_id is None:
        raise DataError("the tokenizer has no EOS token to end a plain-text completion with")
    return ids if ids and ids[-1] == tokenizer.eos_token_id else [*ids, tokenizer.eos_token_id]


def joined_text(text: Text) -> str:
    return text if isinstance(text, str) else "\n".join(message["content"] for message in text)


def common_prefix_length(a: Sequence[int], b: Sequence[int]) -> int:
    """Number of leading elements that are equal in both."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


# Batches


@dataclass(frozen=True)
class TokenBatch:
    """Right-padded sequences. Padding is identified by position, never by its id, which may be the id of EOS."""

    input_ids: Tensor  # [B, T] int64
    attention_mask: Tensor  # [B, T] int64: 1 on tokens, 0 on padding
    completion_mask: Tensor  # [B, T] bool: trained tokens (with a token before them)
    first_trained: int  # at most the smallest position in completion_mask in any row
    n_tokens: int  # tokens without padding
    n_trained: int  # tokens in completion_mask
    # Of rows of several sequences with a shared prompt, see `shared_prompts`:
    position_ids: Tensor | None = None  # [B, T] int64: from 0 in each sequence
    branches: Tensor | None = None  # [B, T] int64: 0 in shared tokens, 1 in the first sequence's own, 2 in the second's
    branch_layout: Any = None  # of `shared_prompts`

    def to(self, device: torch.device) -> TokenBatch:
        """The batch on another device; the copy to a GPU is asynchronous."""
        if device.type == "cpu":
            return self

        def copied(tensor: Tensor) -> Tensor:
            return tensor.pin_memory().to(device, non_blocking=True)

        return replace(
            self,
            input_ids=copied(self.input_ids),
            attention_mask=copied(self.attention_mask),
            completion_mask=copied(self.completion_mask),
            position_ids=None if self.position_ids is None else copied(self.position_ids),
            branches=None if self.branches is None else copied(self.branches),
            branch_layout=None if self.branch_layout is None else self.branch_layout.map(copied),
        )

    def sequence_sums(self, values: Tensor) -> Tensor:
        """Sums over each sequence's tokens: [B]; of rows with two branches [2B], all first sequences, then the second.

        Args:
            values: [B, T - first_trained], 0 where `completion_mask` is false.
        """
        if self.branches is None:
            return values.sum(dim=1)
        branches = self.branches[:, self.first_trained :]
        return torch.cat([torch.where(branches == number, values, 0).sum(dim=1) for number in (1, 2)])


def collate_examples(examples: Sequence[Sequence[TokenSequence]], pad_id: int, multiple: int = 1) -> TokenBatch:
    """One batch on the CPU: the first sequence of each example (the chosen one), then the second of each."""
    return collate([sequence for column in zip(*examples, strict=True) for sequence in column], pad_id, multiple)


def collate(sequences: Sequence[TokenSequence], pad_id: int, multiple: int = 1) -> TokenBatch:
    """Sequences as one batch on the CPU, padded to the longest of them; without sequences, [0, 1].

    The length is rounded up to a multiple, and `first_trained` down, so that fewer different shapes occur.
    """
    longest = max((len(sequence.ids) for sequence in sequences), default=1)
    length = -(-longest // multiple) * multiple
    first_trained = min((max(sequence.prompt_length, 1) for sequence in sequences), default=1)
    input_ids = torch.full((len(sequences), length), pad_id, dtype=torch.int64, device="cpu")
    attention_mask = torch.zeros(len(sequences), length, dtype=torch.int64, device="cpu")
    completion_mask = torch.zeros(len(sequences), length, dtype=torch.bool, device="cpu")
    for row, sequence in enumerate(sequences):
        end = len(sequence.ids)
        input_ids[row, :end] = torch.tensor(sequence.ids, dtype=torch.int64, device="cpu")
        attention_mask[row, :end] = 1
        completion_mask[row, max(sequence.prompt_length, 1) : end] = True
    return TokenBatch(
        input_ids,
        attention_mask,
        completion_mask,
        first_trained=max(first_trained // multiple * multiple, 1),
        n_tokens=sum(len(sequence.ids) for sequence in sequences),
        n_trained=sum(sequence.n_trained for sequence in sequences),
    )


# Order


def shuffled(n: int, seed: int, start: int, count: int) -> list[int]:
    """Positions start .. start + count - 1 of an endless, seeded order of `n` examples; each epoch has its own.

    A position's example depends on the seed and the position alone, so a run can start anywhere.
    """
    positions = (divmod(position, n) for position in range(start, start + count))
    return [permutation(n, seed, epoch)[offset] for epoch, offset in positions]


@functools.lru_cache(maxsize=2)
def permutation(n: int, seed: int, epoch: int) -> list[int]:
    """A permutation of range(n) that depends on `seed` and `epoch` alone."""
    # An odd multiplier separates (seed, epoch) pairs: neighbouring seeds share no permutations.
    generator = torch.Generator(device="cpu").manual_seed((seed * 0x9E3779B97F4A7C15 + epoch) % 2**63)
    return torch.randperm(n, generator=generator, device="cpu").tolist()


def chunks(items: Sequence[ItemT], size: int) -> list[Sequence[ItemT]]:
    """Consecutive parts of `size` items; the last may be smaller."""
    return [items[start : start + size] for start in range(0, len(items), size)]
