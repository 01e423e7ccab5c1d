"""Read the rows of datasets, in several formats, as prompts and completions.

The columns determine the format:

| columns | format |
|---|---|
| prompt, chosen, rejected | TRL preference: strings, or lists of messages |
| chosen, rejected | the same with the prompt inside both message lists (their common start) |
| question, chosen, rejected [, system] | Intel/orca_dpo_pairs |
| conversations, chosen, rejected | qihoo360/Light-R1-DPOData: {from, value}; chosen, rejected: one, [one] or text |
| prompt, completion | TRL prompt-completion: strings, or lists of messages |
| messages | TRL conversational, as in open-r1/OpenR1-Math-220k; the last message is the completion |
| problem, solution | the other rows of open-r1/OpenR1-Math-220k, and datasets of this form |

The first four are preference data; SFT on them trains the chosen completion.

Prompts for a model to complete are in a column prompt (a string, or messages), problem or question [, system]; problems
and questions are messages of the user.

Questions with solutions, all text, are in columns question or problem or prompt, solution or answer [, explanation or
reasoning_trace or reasoning], or in conversations, as in bespokelabs/Bespoke-Stratos-17k.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

from ...errors import DataError

Message = dict[str, str]  # {"role": "user", "content": "..."}
Text = str | list[Message]  # plain text, taken verbatim; or messages, for the chat template

_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}


@dataclass(frozen=True)
class Example:
    """A prompt and its completions, all text or all messages: (chosen, rejected), or the one to imitate."""

    prompt: Text
    completions: tuple[Text, ...]


RowReader = Callable[[dict[str, Any]], Example]
PromptReader = Callable[[dict[str, Any]], Text]
ReaderT = TypeVar("ReaderT", RowReader, PromptReader)


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


def solution_reader(columns: Iterable[str], name: str, answer: str) -> Callable[[dict[str, Any]], dict[str, str]]:
    """The function that reads a row as question, solution and, if the dataset has it, explanation; errors as above.

    Args:
        answer: form of the assistant's texts in conversations, with {explanation} and {solution}; any white space of it
            matches any other.
    """
    found = set(columns)
    chosen = {kind: next((column for column in names if column in found), "") for kind, names in _SOLVED.items()}
    if chosen["question"] and chosen["solution"]:
        return lambda row: {kind: _own_text(row[column], column) for kind, column in chosen.items() if column}
    if "conversations" not in found:
        either = f"({', '.join(_SOLVED['question'])}) with one of ({', '.join(_SOLVED['solution'])})"
        raise DataError(f"dataset {name}: found columns ({_listed(found)}); expected one of {either}, or conversations")
    pattern = ""
    for piece in re.split(r"(\{explanation\}|\{solution\}|\s+)", answer):
        text = f"(?P<{piece[1:-1]}>.*?)" if piece in ("{explanation}", "{solution}") else re.escape(piece)
        pattern += r"\s*" if piece.isspace() else text

    def read(row: dict[str, Any]) -> dict[str, str]:
        texts = {message["role"]: message["content"] for message in _messages(row["conversations"], "user")}
        match = re.fullmatch(pattern + r"\s*", texts.get("assistant", ""), re.DOTALL)
        if match is None:
            raise DataError(
                f"found the answer {shortened(texts.get('assistant'))}; expected the form {shortened(answer)}"
            )
        return {"question": _own_text(texts.get("user"), "conversations"), **match.groupdict()}

    return read


def _own_text(value: Any, column: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise DataError(f"column '{column}' has {shortened(value)}; expected text")
    return value


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
    # The last message is always the completion, even if both conversations are identical.
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
    """A string (a message of `role`), one message, or a list of messages, as {role, content} messages."""
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    if isinstance(value, dict):
        value = [value]
    if not isinstance(value, list) or not value:
        raise DataError(f"found {shortened(value)}; expected a string, a message or a list of messages")
    return [_message(message) for message in value]


def _message(message: Any) -> Message:
    if isinstance(message, dict):
        speaker = message.get("role", message.get("from"))
        content = message.get("content", message.get("value"))
        if isinstance(speaker, str) and speaker in _ROLES and isinstance(content, str):
            return {"role": _ROLES[speaker], "content": content}
    expected = f"expected role and content, or from and value; roles are {_listed(_ROLES)}"
    raise DataError(f"found the message {shortened(message)}; {expected}")


def shortened(value: Any) -> str:
    """The value as JSON, cut to 80 characters, for a message."""
    text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= 80 else text[:77] + "..."


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))


_SOLVED = {
    "question": ("question", "problem", "prompt"),
    "solution": ("solution", "answer"),
    "explanation": ("explanation", "reasoning_trace", "reasoning"),
}
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


def as_trl_rows(rows: Any, name: str, algorithm: str) -> Any:
    """The dataset with the columns that TRL trains, if its columns are of another format in the table above.

    Columns that the algorithm's reward functions may read are kept.

    Raises:
        DataError: a row does not fit its format.
    """
    columns = set(rows.column_names or next(iter(rows)))  # a stream may not know its columns
    of_trl = {"prompt", "messages", "text"} if algorithm == "sft" else {"prompt"}
    if columns & of_trl or not columns & {"question", "conversations", "problem"}:
        return rows
    if algorithm == "grpo":
        read_prompt = prompt_reader(columns, name)
        return rows.map(lambda row: {"prompt": read_prompt(row)})
    names = ("chosen", "rejected") if algorithm == "dpo" else ("completion",)
    read = (preference_reader if algorithm == "dpo" else demonstration_reader)(columns, name)

    def converted(row: dict[str, Any]) -> dict[str, Text]:
        example = read(row)
        return {"prompt": example.prompt, **dict(zip(names, example.completions, strict=True))}

    return rows.map(converted, remove_columns=sorted(columns))
