"""`check_tokenized`: compares the tokens that TRL trains with what the rows say."""

from __future__ import annotations

import copy
import json
import random
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from datasets import Dataset
from trl import DPOTrainer, GRPOTrainer, SFTTrainer
from trl.data_utils import is_conversational

from ...errors import ConfigError
from .data import CONVERSATIONS, TEXT_COLUMNS
from .records import shortened

N_CHECKED = 256  # rows that are compared, drawn with seed 0
# Fields of a message that chat templates render; others, such as an id or a date, are not expected in the tokens.
_RENDERED = ("content", "reasoning_content", "reasoning", "thinking", "tool_calls")
_NOT_RENDERED = ("id", "type", "index")  # inside of a content part or a tool call
_TOKENIZED = ("input_ids", "labels", "prompt_ids", "chosen_ids", "rejected_ids")


def check_tokenized(trainer: Any, rows: Any = None) -> None:
    """Raise a ConfigError if the tokens that TRL's SFT, DPO or GRPO trainer trains are not what the rows say.

    Every text of a completion (contents, reasoning, and names and arguments of tool calls of the assistant) must be in
    the decoded labels, and every other message of the prompt and the name of every tool in the decoded row. Whitespace
    is not compared. The trainer tokenizes the rows once more for this, without truncation and packing. If there are
    more than 256 rows, 256 drawn with seed 0 are compared, or the first 256 of a stream.

    Args:
        trainer: an SFTTrainer, DPOTrainer or GRPOTrainer; others are not checked, nor are rows with images.
        rows: what the trainer was given as `train_dataset`; needed if it packs rows.
    """
    rows = trainer.train_dataset if rows is None else rows
    if not isinstance(trainer, (SFTTrainer, DPOTrainer, GRPOTrainer)) or getattr(trainer, "_is_vision_dataset", False):
        return
    if isinstance(rows, Dataset):
        numbers: Sequence[int] = range(len(rows))
        if len(rows) > N_CHECKED:
            numbers = sorted(random.Random(0).sample(numbers, N_CHECKED))
        sample, total = rows.select(numbers), f"{len(numbers)} of {len(rows)}"
    else:
        sample = Dataset.from_list(list(rows.take(N_CHECKED)), features=rows.features)
        numbers, total = range(len(sample)), f"the first {len(sample)}"
    sample = sample.remove_columns([name for name in _TOKENIZED if name in sample.column_names])
    if not {*TEXT_COLUMNS, *CONVERSATIONS, getattr(trainer.args, "dataset_text_field", "")} & {*sample.column_names}:
        warnings.warn("packed or tokenized rows are not compared with their text; pass `rows`", stacklevel=2)
        return
    wrong = []
    for number, row in zip(numbers, _tokenized(trainer, sample), strict=True):
        if (problem := next(_differences(trainer, row), None)) is not None:
            wrong.append(f"row {number + 1}: {problem}")
    if wrong:
        raise ConfigError(
            f"{len(wrong)} of the rows are not trained as written ({total} compared); {wrong[0]}. "
            "Use a chat template that renders it, or remove it from the rows"
        )


def _tokenized(trainer: Any, sample: Dataset) -> Iterable[dict[str, Any]]:
    """The rows as the trainer prepares them, in their order and at full length."""
    args = copy.copy(trainer.args)
    args.max_length, args.dataset_num_proc, args.shuffle_dataset = None, None, False
    if isinstance(trainer, SFTTrainer):
        return trainer._prepare_dataset(sample, trainer.processing_class, args, False, None, "compared")
    if isinstance(trainer, DPOTrainer):
        return trainer._prepare_dataset(sample, trainer.processing_class, args, "compared")
    return sample


def _differences(trainer: Any, row: dict[str, Any]) -> Iterator[str]:
    """What the row says and its tokens do not, in words."""
    tokenizer = trainer.processing_class
    if isinstance(trainer, SFTTrainer):
        column = next((c for c in ("completion", "messages") if c in row), trainer.args.dataset_text_field)
        labels = [token for token in row["labels"] if token != -100]
        sequences = {column: (tokenizer.decode(row["input_ids"]), tokenizer.decode(labels))}
    elif isinstance(trainer, DPOTrainer):
        ids = {column: row[f"{column}_ids"] for column in ("chosen", "rejected")}
        sequences = {c: (tokenizer.decode(row["prompt_ids"] + ids[c]), tokenizer.decode(ids[c])) for c in ids}
    elif is_conversational(row):
        rendered = tokenizer.apply_chat_template(
            row["prompt"],
            tools=trainer.tools or None,
            chat_template=trainer.chat_template,
            add_generation_prompt=True,
            tokenize=False,
            **trainer.chat_template_kwargs,
        )
        sequences = {"prompt": (rendered, rendered)}
    else:
        return
    tools = row.get("tools") or []
    for column, decoded in sequences.items():
        full, trained = map(_squeezed, decoded)
        for tool in json.loads(tools) if isinstance(tools, str) else tools:
            name = (tool.get("function") or tool).get("name", "")
            if _squeezed(name) not in full:
                yield f"the tool {shortened(name)} is not in its tokens"
        answer, position = row[column], 0
        if isinstance(answer, str):
            turns = [({"role": "assistant", "content": answer}, True)]
        else:  # in a prompt, templates leave out the reasoning of the assistant's turns
            turns = [(message, False) for message in row.get("prompt", ()) if message["role"] != "assistant"]
            if column != "prompt":
                turns += [(message, message["role"] == "assistant") for message in answer]
        for message, is_trained in turns:
            start = 0 if message["role"] == "system" else position  # templates may move it to a later turn
            for field in _RENDERED:
                for text in _leaves(message.get(field)):
                    end = _end(tokenizer, text, full, trained if is_trained else full, start)
                    if end is None:
                        where = f"the labels of {column!r}" if is_trained else "its tokens"
                        yield f"{field} {shortened(text)} of the {message['role']} is not in {where}"
                    elif message["role"] == "user":  # between them, templates may change the order
                        position = max(position, end)


def _leaves(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from () if key in _NOT_RENDERED else _leaves(item)
    elif isinstance(value, Sequence):
        for item in value:
            yield from _leaves(item)
    elif value is not None and not isinstance(value, bool):
        yield json.dumps(value)


def _end(tokenizer: Any, text: str, full: str, trained: str, start: int) -> int | None:
    """Where the text ends in `full`, from `start` on, if it also ends in `trained`, the part of `full` with labels.

    It may begin before the labels, because a template may write its first words, as `<think>`, into the prompt.
    """
    for form in _forms(tokenizer, text):
        begin, last = full.find(form, start), full.rfind(form)
        ends_in_tail = full.endswith(trained) and last + len(form) > len(full) - len(trained)
        if begin >= 0 and (form in trained or ends_in_tail):
            return begin + len(form)
    return None


def _forms(tokenizer: Any, text: str) -> Iterator[str]:
    yield _squeezed(text)
    yield _squeezed(json.dumps(text, ensure_ascii=False)[1:-1])  # in a tool call that is rendered as JSON
    yield _squeezed(tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]))  # in its normal form


def _squeezed(text: str) -> str:
    return "".join(text.split())
