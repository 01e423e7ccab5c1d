"""Read datasets from the hub or local files, in several formats, as prompts and completions.

The columns determine the format:

| columns | format |
|---|---|
| prompt, chosen, rejected | TRL preference: strings, or lists of messages |
| chosen, rejected | the same with the prompt inside both message lists (their common start) |
| question, chosen, rejected [, system] | Intel/orca_dpo_pairs |
| conversations, chosen, rejected | qihoo360/Light-R1-DPOData: {from, value}; chosen, rejected: one, [one] or text |
| prompt, completion | TRL prompt-completion: strings, or lists of messages |
| messages | TRL conversational, as in open-r1/OpenR1-Math-220k; the last message is the completion |
| problem, solution | the rest of open-r1/OpenR1-Math-220k, and what is made like it |

The first four are preference data; SFT on them trains the chosen completion.

Prompts alone, for what a model is to complete, are in a column prompt (a string, or messages), problem or
question [, system]; problems and questions are what the user says.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from sparse_opt.errors import DataError
from sparse_opt.files import one_line

from .order import permutation

Message = dict[str, str]  # {"role": "user", "content": "..."}
Text = str | list[Message]  # plain text, taken verbatim; or messages, for the chat template

_LOCAL_READERS = {".json": "json", ".jsonl": "json", ".parquet": "parquet"}
_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}


@dataclass(frozen=True)
class Example:
    """A prompt and its completions, all text or all messages: (chosen, rejected), or the one to imitate."""

    prompt: Text
    completions: tuple[Text, ...]


RowReader = Callable[[dict[str, Any]], Example]
PromptReader = Callable[[dict[str, Any]], Text]
ReaderT = TypeVar("ReaderT", RowReader, PromptReader)


def load_records(dataset: str, split: str = "train") -> Any:
    """The rows of a local .json, .jsonl or .parquet file, or of a hub dataset's split, as a `datasets.Dataset`.

    Raises:
        DataError: no such file or dataset, a file that cannot be read, or no rows.
    """
    import datasets

    path = Path(dataset).expanduser()
    reader = _LOCAL_READERS.get(path.suffix)
    if reader is None and path.is_file():
        raise DataError(f"dataset {path}: unknown file type '{path.suffix}', expected {', '.join(_LOCAL_READERS)}")
    if reader is not None and not path.is_file():
        raise DataError(f"dataset {path}: no such file")
    if reader is not None and path.stat().st_size == 0:
        raise DataError(f"dataset {path}: the file is empty")
    if not dataset.strip():
        raise DataError("dataset: its name is empty")
    try:
        if reader == "json":
            _require_json_text(path)
        with _only_raising(datasets):
            if reader is not None:
                records = datasets.load_dataset(reader, data_files=str(path), split="train")
            else:
                records = datasets.load_dataset(dataset, split=split)
    except DataError:
        raise
    # The readers of `datasets` check little, so that a wrong file ends in an error of nearly any type.
    except (
        OSError, ValueError, RuntimeError, TypeError, LookupError, AttributeError, ArithmeticError, StopIteration,
        datasets.exceptions.DatasetsError,
    ) as error:  # fmt: skip
        cause = error.__cause__ or error
        raise DataError(f"dataset {dataset}: cannot be read: {one_line(cause)}") from error
    if len(records) == 0:
        raise DataError(f"dataset {dataset}: no rows")
    return records


def read_record(records: Any, row: int) -> dict[str, Any]:
    """A row of `load_records` by its columns. Raises DataError where its bytes are no text."""
    try:
        record: dict[str, Any] = records[row]
    except (ValueError, RecursionError) as error:  # Arrow files may say of any bytes that they are text
        raise DataError(f"cannot be read: {one_line(error)}") from error
    return record


def _require_json_text(path: Path) -> None:
    """Refuse what the readers of `datasets` accept or crash on: other encodings, NULs, and what begins as no JSON rows.

    Costs one pass over the file, at 0.4 GB/s.
    """
    first = ""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            where = f"dataset {path}, line {number}"
            try:
                text = line.decode()
            except UnicodeDecodeError as error:
                raise DataError(
                    f"{where}: not UTF-8: byte 0x{line[error.start]:02x} at column {error.start + 1}"
                ) from error
            if "\0" in text:
                raise DataError(f"{where}: has a NUL byte, expected JSON")
            first = first or text.removeprefix("\ufeff").lstrip()[:1]
            if first not in ("", "{", "["):
                raise DataError(f"{where}: begins with {first!r}, expected JSON rows")


def chosen_rows(records: Any, name: str, subset_size: int | None, seed: int) -> Sequence[int]:
    """The numbers of `subset_size` rows drawn with `seed`; of all rows, in order, where it is None.

    All rows it is too, with a UserWarning, where the dataset, called `name`, has fewer.
    """
    if subset_size is not None and subset_size < len(records):
        return permutation(len(records), seed, 0)[:subset_size]
    if subset_size is not None and subset_size > len(records):
        warnings.warn(f"dataset {name}: has {len(records)} rows, not subset_size {subset_size}", stacklevel=3)
    return range(len(records))


@contextmanager
def _only_raising(datasets: Any) -> Iterator[None]:
    """`datasets` logs an error before it raises it; here the raised one is enough."""
    before = datasets.logging.get_verbosity()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    try:
        yield
    finally:
        datasets.logging.set_verbosity(before)


def preference_reader(columns: Iterable[str], name: str) -> RowReader:
    """The function that reads a row of these columns as a prompt with (chosen, rejected).

    `name` is the dataset's, for messages. A row that does not fit makes the function raise a DataError.

    Raises:
        DataError: the columns are of no preference format.
    """
    return _reader(columns, name, _PREFERENCE_FORMATS)


def demonstration_reader(columns: Iterable[str], name: str) -> RowReader:
    """As `preference_reader`, for a prompt with one completion; a preference format gives its chosen one."""
    read = _reader(columns, name, _DEMONSTRATION_FORMATS + _PREFERENCE_FORMATS)

    def read_first(row: dict[str, Any]) -> Example:
        example = read(row)
        return Example(example.prompt, example.completions[:1])

    return read_first


def prompt_reader(columns: Iterable[str], name: str) -> PromptReader:
    """The function that reads a row of these columns as a prompt to complete; errors as in `preference_reader`."""
    return _reader(columns, name, _PROMPT_FORMATS)


def _reader(columns: Iterable[str], name: str, formats: list[tuple[set[str], ReaderT]]) -> ReaderT:
    found = set(columns)
    for needed, read in formats:
        if needed <= found:
            return read
    alternatives = " or ".join(f"({_listed(needed)})" for needed, _ in formats)
    raise DataError(f"dataset {name}: found columns ({_listed(found)}); expected {alternatives}")


def _read_trl_pair(row: dict[str, Any]) -> Example:
    prompt, chosen, rejected = row["prompt"], row["chosen"], row["rejected"]
    if all(isinstance(value, str) for value in (prompt, chosen, rejected)):
        return Example(prompt, (chosen, rejected))
    if isinstance(prompt, str) and isinstance(chosen, list) and len(chosen) > 1:
        return _read_implicit_pair(row)  # the conversations repeat the prompt, as in ultrafeedback_binarized
    return _conversation(_messages(prompt, "user"), chosen, rejected)


def _read_implicit_pair(row: dict[str, Any]) -> Example:
    chosen, rejected = row["chosen"], row["rejected"]
    if isinstance(chosen, str) or isinstance(rejected, str):
        raise DataError("column 'prompt' is missing; only lists of messages may hold the prompt in chosen and rejected")
    chosen, rejected = _messages(chosen, "assistant"), _messages(rejected, "assistant")
    shared = 0
    # The last message is always the completion, also where both conversations are the same throughout.
    while shared < min(len(chosen), len(rejected)) - 1 and chosen[shared] == rejected[shared]:
        shared += 1
    if shared == 0:
        raise DataError("chosen and rejected share no first message to be the prompt")
    return Example(chosen[:shared], (chosen[shared:], rejected[shared:]))


def _read_orca_pair(row: dict[str, Any]) -> Example:
    return _conversation(_read_question(row), row["chosen"], row["rejected"])


def _read_light_r1_pair(row: dict[str, Any]) -> Example:
    return _conversation(_messages(row["conversations"], "user"), row["chosen"], row["rejected"])


def _read_prompt_completion(row: dict[str, Any]) -> Example:
    prompt, completion = row["prompt"], row["completion"]
    if isinstance(prompt, str) and isinstance(completion, str):
        return Example(prompt, (completion,))
    return _conversation(_messages(prompt, "user"), completion)


def _read_messages(row: dict[str, Any]) -> Example:
    messages = _messages(row["messages"], "user")
    if len(messages) < 2 or messages[-1]["role"] != "assistant":
        roles = [message["role"] for message in messages]
        raise DataError(f"messages have the roles {roles}; expected a prompt, and the assistant's answer last")
    return Example(messages[:-1], (messages[-1:],))


def _read_problem_solution(row: dict[str, Any]) -> Example:
    return _conversation(_read_problem(row), row["solution"])


def _read_prompt(row: dict[str, Any]) -> Text:
    prompt = row["prompt"]
    return prompt if isinstance(prompt, str) else _asking(_messages(prompt, "user"))


def _read_problem(row: dict[str, Any]) -> list[Message]:
    return _asking(_messages(row["problem"], "user"))


def _read_question(row: dict[str, Any]) -> list[Message]:
    question = _asking(_messages(row["question"], "user"))
    return [*_messages(row["system"], "system"), *question] if row.get("system") else question


def _asking(messages: list[Message]) -> list[Message]:
    if messages[-1]["role"] == "assistant":
        raise DataError("the prompt's last message is the assistant's; expected a message of the user")
    return messages


def _conversation(prompt: list[Message], *completions: Any) -> Example:
    return Example(prompt, tuple(_messages(completion, "assistant") for completion in completions))


def _messages(value: Any, role: str) -> list[Message]:
    """A string (said by `role`), one message, or a list of messages, as {role, content} messages."""
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    if isinstance(value, dict):
        value = [value]
    if not isinstance(value, list) or not value:
        raise DataError(f"found {_shortened(value)}; expected a string, a message or a list of messages")
    return [_message(message) for message in value]


def _message(message: Any) -> Message:
    if isinstance(message, dict):
        speaker = message.get("role", message.get("from"))
        content = message.get("content", message.get("value"))
        if isinstance(speaker, str) and speaker in _ROLES and isinstance(content, str):
            return {"role": _ROLES[speaker], "content": content}
    expected = f"expected role and content, or from and value; roles are {_listed(_ROLES)}"
    raise DataError(f"found the message {_shortened(message)}; {expected}")


def _shortened(value: Any) -> str:
    text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= 120 else text[:117] + "..."


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))


_PREFERENCE_FORMATS: list[tuple[set[str], RowReader]] = [
    ({"prompt", "chosen", "rejected"}, _read_trl_pair),
    ({"question", "chosen", "rejected"}, _read_orca_pair),
    ({"conversations", "chosen", "rejected"}, _read_light_r1_pair),
    ({"chosen", "rejected"}, _read_implicit_pair),
]
_DEMONSTRATION_FORMATS: list[tuple[set[str], RowReader]] = [
    ({"prompt", "completion"}, _read_prompt_completion),
    ({"messages"}, _read_messages),
    ({"problem", "solution"}, _read_problem_solution),
]
_PROMPT_FORMATS: list[tuple[set[str], PromptReader]] = [
    ({"prompt"}, _read_prompt),
    ({"problem"}, _read_problem),
    ({"question"}, _read_question),
]
