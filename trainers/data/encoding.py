"""Encoding of prompts and completions as token ids, truncation, and collation into right-padded batches.

The rules follow TRL, so that losses can be compared:

- Messages go through the tokenizer's chat template, once, which also writes the special tokens; no second BOS is added.
  A tokenizer without a template gets the messages' contents joined by newlines, as plain text.
- Plain text is tokenized verbatim with the tokenizer's own special tokens, and EOS ends the completion. Neither is
  added if the text already has it.
- The prompt ends where the tokens of "prompt" and of "prompt + completion" differ, so that a token merged across the
  border counts as completion.
- A sequence longer than `max_length` keeps its start (`keep_start`; the completion loses its end) or its end
  (`keep_end`; the prompt loses its start). If no completion token is left, the example is dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import torch

from sparse_opt.errors import DataError
from sparse_opt.files import one_line
from sparse_opt.integrations.trl.records import Example, Text, demonstration_reader, preference_reader

from .rows import DataReport, counter, load_rows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ..policy.branch_attention import BranchLayout

TruncationMode = Literal["keep_start", "keep_end"]


@dataclass(frozen=True)
class TokenSequence:
    """Token ids of a prompt and its completion; the completion starts at `prompt_length`."""

    ids: list[int]
    prompt_length: int

    @property
    def n_trained(self) -> int:
        """Number of completion tokens that have a preceding token to be predicted from."""
        return len(self.ids) - max(self.prompt_length, 1)

    def truncated(self, max_length: int, mode: TruncationMode) -> TokenSequence:
        """This sequence truncated to at most `max_length` tokens."""
        excess = len(self.ids) - max_length
        if excess <= 0:
            return self
        if mode == "keep_start":
            return replace(self, ids=self.ids[:max_length])
        return TokenSequence(self.ids[excess:], max(self.prompt_length - excess, 0))


@dataclass
class ExampleReport(DataReport):
    """Counts of a dataset's used and dropped rows with completions."""

    n_dropped_empty: int = counter("{} dropped for an empty completion")
    n_dropped_too_long: int = counter("{} dropped because max_length leaves no completion token")
    n_moved_borders: int = counter("in {} the prompt's last tokens change when the completion follows")


def load_examples(
    kind: Literal["preference", "demonstration"],
    dataset: str,
    split: str,
    tokenizer: PreTrainedTokenizerBase,
    subset_size: int | None = None,
    seed: int = 0,
    *,
    max_length: int,
    truncation_mode: TruncationMode = "keep_start",
) -> tuple[list[list[TokenSequence]], ExampleReport]:
    """A dataset's examples as sequences: [chosen, rejected] for preferences, [completion] for demonstrations.

    Args:
        dataset, split, subset_size, seed: see `load_rows`.
        max_length, truncation_mode: see the module's rules.

    Raises:
        DataError: see `load_rows` and the row readers.
    """
    report = ExampleReport()
    reader = preference_reader if kind == "preference" else demonstration_reader

    def encoder(columns: Iterable[str], name: str) -> Callable[[dict[str, Any]], list[TokenSequence] | None]:
        read = reader(columns, name)

        def encode_row(row: dict[str, Any]) -> list[TokenSequence] | None:
            example = read(row)
            if any(_is_empty(completion) for completion in example.completions):
                report.n_dropped_empty += 1
                return None
            sequences, moved = encode(tokenizer, example)
            sequences = [sequence.truncated(max_length, truncation_mode) for sequence in sequences]
            if any(sequence.n_trained < 1 for sequence in sequences):
                report.n_dropped_too_long += 1
                return None
            report.n_moved_borders += moved
            return sequences

        return encode_row

    return load_rows(dataset, split, subset_size, seed, encoder, report), report


def encode(tokenizer: PreTrainedTokenizerBase, example: Example) -> tuple[list[TokenSequence], bool]:
    """Each completion after the prompt, and whether the border moved into the prompt (see the module's rules)."""
    prompt, completions = example.prompt, example.completions
    if isinstance(prompt, list) and tokenizer.chat_template is None:
        prompt, completions = joined_text(prompt) + "\n", tuple(joined_text(completion) for completion in completions)
    if isinstance(prompt, str):
        prompt_ids = text_ids(tokenizer, prompt)
        all_ids = [
            _closed(tokenizer, text_ids(tokenizer, prompt + joined_text(completion))) for completion in completions
        ]
    else:
        prompt_ids = chat_ids(tokenizer, prompt, add_generation_prompt=True)
        all_ids = [chat_ids(tokenizer, [*prompt, *completion]) for completion in completions]
    prompt_length = min(common_prefix_length(prompt_ids, ids) for ids in all_ids)
    return [TokenSequence(ids, prompt_length) for ids in all_ids], prompt_length < len(prompt_ids)


def chat_ids(tokenizer: PreTrainedTokenizerBase, messages: Any, add_generation_prompt: bool = False) -> list[int]:
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


def text_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    # Text from a chat template already contains its BOS.
    has_bos = tokenizer.bos_token is not None and text.startswith(tokenizer.bos_token)
    return list(tokenizer(text, add_special_tokens=not has_bos)["input_ids"])


def _closed(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> list[int]:
    if tokenizer.eos_token_id is None:
        raise DataError("the tokenizer has no EOS token to end a plain-text completion with")
    return ids if ids and ids[-1] == tokenizer.eos_token_id else [*ids, tokenizer.eos_token_id]


def joined_text(text: Text) -> str:
    return text if isinstance(text, str) else "\n".join(message["content"] for message in text)


def _is_empty(text: Text) -> bool:
    return not joined_text(text).strip()


def common_prefix_length(a: Sequence[int], b: Sequence[int]) -> int:
    """Number of leading elements that are equal in both."""
    length = 0
    while length < min(len(a), len(b)) and a[length] == b[length]:
        length += 1
    return length


@dataclass(frozen=True)
class TokenBatch:
    """Right-padded sequences. Padding is identified by position, never by its id, which may be the id of EOS."""

    input_ids: torch.Tensor  # [B, T] int64
    attention_mask: torch.Tensor  # [B, T] int64: 1 on tokens, 0 on padding
    completion_mask: torch.Tensor  # [B, T] bool: trained tokens (with a token before them)
    first_trained: int  # at most the smallest position in completion_mask in any row
    n_tokens: int  # tokens without padding
    n_trained: int  # tokens in completion_mask
    position_ids: torch.Tensor | None = None  # [B, T] int64 in packed rows: from 0 in each sequence (see `packing`)
    # [B, T] int64 in rows of several sequences with a shared prompt (see `shared_prompts`): 0 in shared tokens, 1 in
    # the first sequence's own, 2 in the second's, and so on.
    branches: torch.Tensor | None = None
    branch_layout: BranchLayout | None = None  # of the same rows

    @classmethod
    def placeholder(cls, device: torch.device) -> TokenBatch:
        """One sequence of two tokens of id 0, the second of them trained."""
        ids = torch.zeros(1, 2, dtype=torch.int64, device=device)
        return cls(ids, ids + 1, torch.arange(2, device=device).bool()[None], first_trained=1, n_tokens=2, n_trained=1)

    def to(self, device: torch.device) -> TokenBatch:
        """The batch on another device; the copy to a GPU is asynchronous."""
        if device.type == "cpu":
            return self
        return self._with(lambda tensor: tensor.pin_memory().to(device, non_blocking=True))

    def pin_memory(self) -> TokenBatch:
        """The batch in page-locked memory; torch's DataLoader calls it."""
        return self._with(torch.Tensor.pin_memory)

    def sequence_sums(self, values: torch.Tensor) -> torch.Tensor:
        """Sums over each sequence's tokens: [B]; of rows with two branches [2B], all first sequences, then the second.

        Args:
            values: [B, T - first_trained], 0 where `completion_mask` is false.
        """
        if self.branches is None:
            return values.sum(dim=1)
        branches = self.branches[:, self.first_trained :]
        return torch.cat([torch.where(branches == number, values, 0).sum(dim=1) for number in (1, 2)])

    def n_trained_of_sequences(self) -> torch.Tensor:
        """Number of trained tokens of each sequence, in the order of `sequence_sums`: int64."""
        return self.sequence_sums(self.completion_mask[:, self.first_trained :].long())

    def _with(self, function: Callable[[torch.Tensor], torch.Tensor]) -> TokenBatch:
        return replace(
            self,
            input_ids=function(self.input_ids),
            attention_mask=function(self.attention_mask),
            completion_mask=function(self.completion_mask),
            position_ids=None if self.position_ids is None else function(self.position_ids),
            branches=None if self.branches is None else function(self.branches),
            branch_layout=None if self.branch_layout is None else self.branch_layout.map(function),
        )


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
