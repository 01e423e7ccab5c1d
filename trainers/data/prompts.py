"""Encoding of prompts for a model to complete, with the columns of their rows for the reward functions.

The rules are those of `encoding`, for a prompt without completion: messages go through the tokenizer's chat template,
once, up to the start of the assistant's answer; without a template, their contents are used, each followed by a
newline. Plain text is tokenized verbatim. No second BOS and no EOS is added.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from sparse_opt.integrations.trl.records import Message, Text, prompt_reader

from .encoding import chat_ids, joined_text, text_ids
from .rows import DataReport, counter, load_rows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Names of the built-in arguments of reward functions, which columns must not repeat.
_NOT_COLUMNS = ("prompt", "prompts", "completion", "completions", "completion_ids")


@dataclass(frozen=True)
class PromptExample:
    """A prompt with the other columns of its row."""

    ids: list[int]
    text: str  # the text that the model reads: for messages, the output of the chat template
    columns: dict[str, Any]
    messages: list[Message] | None = None

    @property
    def prompt(self) -> Text:
        """The prompt in the form of the data, which reward functions receive: messages or text."""
        return self.text if self.messages is None else self.messages


@dataclass
class PromptReport(DataReport):
    """Counts of a dataset's used and dropped prompts."""

    noun: ClassVar[str] = "prompts"
    n_dropped_empty: int = counter("{} dropped as empty")
    n_dropped_too_long: int = counter("{} dropped because they are longer than max_prompt_length")


def load_prompts(
    dataset: str,
    split: str,
    tokenizer: PreTrainedTokenizerBase,
    subset_size: int | None = None,
    seed: int = 0,
    *,
    max_prompt_length: int,
) -> tuple[list[PromptExample], PromptReport]:
    """A dataset's prompts, without those that are empty or longer than `max_prompt_length` tokens.

    Args:
        dataset, split, subset_size, seed: see `load_rows`; `records` lists the columns that hold prompts.

    Raises:
        DataError: see `load_rows` and `prompt_reader`.
    """
    report = PromptReport()

    def encoder(columns: Iterable[str], name: str) -> Callable[[dict[str, Any]], PromptExample | None]:
        read = prompt_reader(columns, name)

        def encode_row(row: dict[str, Any]) -> PromptExample | None:
            prompt = read(row)
            if not joined_text(prompt).strip():
                report.n_dropped_empty += 1
                return None
            example = encode_prompt(tokenizer, prompt, row)
            if len(example.ids) > max_prompt_length:
                report.n_dropped_too_long += 1
                return None
            return example

        return encode_row

    return load_rows(dataset, split, subset_size, seed, encoder, report), report


def encode_prompt(
    tokenizer: PreTrainedTokenizerBase, prompt: Text, columns: dict[str, Any] | None = None
) -> PromptExample:
    """Encode a prompt as the input from which the model continues (see the module's rules).

    Args:
        columns: columns of the prompt's row. Those that reward functions receive otherwise, such as `prompt`, are
            dropped.

    Raises:
        DataError: the chat template refuses the messages.
    """
    messages = None if isinstance(prompt, str) else prompt
    if messages is not None and tokenizer.chat_template is not None:
        ids = chat_ids(tokenizer, messages, add_generation_prompt=True)
        text = str(tokenizer.decode(ids))
    else:
        text = joined_text(prompt) if isinstance(prompt, str) else joined_text(prompt) + "\n"
        ids = text_ids(tokenizer, text)
        # With a tokenizer that appends EOS to every text, the model would continue after EOS.
        eos = tokenizer.eos_token
        if eos is not None and len(ids) > 1 and ids[-1] == tokenizer.eos_token_id and not text.endswith(str(eos)):
            ids.pop()
    return PromptExample(ids, text, {k: v for k, v in (columns or {}).items() if k not in _NOT_COLUMNS}, messages)
