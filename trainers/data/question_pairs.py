"""Prompts and demonstrations from JSON arrays of [question, answer] or [question, answer, reasoning].

    python -m sparse_opt.trainers.data.question_pairs --input train.json --style chat --output prompts.jsonl
    python -m sparse_opt.trainers.data.question_pairs --input valid.json --output valid.jsonl
    python -m sparse_opt.trainers.data.question_pairs --input kept.jsonl --output rft.jsonl

| style | prompt |
|---|---|
| plain | the question and a space, for a model that continues it |
| chat | messages: `system`, then the shots, solved examples of [question, solution], then the question |

A row keeps question and answer as columns. With a reasoning, or with `answer_as_completion`, it has a completion. Rows
of `rft datagen` (kept.jsonl) become demonstrations of the plain question: a model learns to reason without the shots.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from sparse_opt.config import option, run_module
from sparse_opt.errors import ConfigError, DataError
from sparse_opt.files import one_line
from sparse_opt.integrations.trl.records import Message, Text

from ..run.outputs import write_text, writing

SYSTEM = "You convert units. Work in short steps, and give the result as a number in <answer> and </answer>."
SHOTS = (
    ("How many minutes are 4 hours?", "1 hour is 60 minutes. 4 * 60 = <answer>240</answer>"),
    ("Express 2500 g in kg.", "1 kg is 1000 g. 2500 / 1000 = <answer>2.5</answer>"),
)


@dataclass(kw_only=True)
class QuestionPairsConfig:
    """Write questions with answers as prompts or demonstrations."""

    input: Path = option(help=".json array of [question, answer] or [question, answer, reasoning]; or kept.jsonl")
    output: Path = option(help="new .jsonl file")
    style: Literal["plain", "chat"] = option("plain", "form of the prompts")
    system: str = option(SYSTEM, "style chat: the system message")
    shots: Path | None = option(None, "style chat: .json array of [question, solution]; none is two unit conversions")
    answer_as_completion: bool = option(False, "the completion is <answer>ANSWER</answer>, without reasoning")


def write_rows(config: QuestionPairsConfig) -> int:
    """Write the rows, and return their number.

    Raises:
        ConfigError: the output exists.
        DataError: the input cannot be read or has other rows.
        SparseOptError: the output cannot be written.
    """
    if config.output.exists():
        raise ConfigError(f"option 'output': {config.output} exists; choose another or remove it")
    shots = SHOTS if config.shots is None else [(q, str(a)) for q, a, _ in _pairs(config.shots)]
    rows = []
    for question, answer, completion in _pairs(config.input):
        prompt: Text = f"{question} "
        if config.style == "chat":
            prompt = _messages(config.system, shots, question)
        row: dict[str, Any] = {"prompt": prompt, "question": question}
        if answer is not None:
            row["answer"] = str(answer)
        if config.answer_as_completion:
            completion = f"<answer>{answer}</answer>"
        if completion is not None:
            row["completion"] = completion if isinstance(prompt, str) else [_message("assistant", completion)]
        rows.append(row)
    with writing(config.output):
        config.output.parent.mkdir(parents=True, exist_ok=True)
    write_text(config.output, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return len(rows)


def _messages(system: str, shots: Sequence[tuple[str, str]], question: str) -> list[Message]:
    solved = [part for q, solution in shots for part in (_message("user", q), _message("assistant", solution))]
    return [_message("system", system), *solved, _message("user", question)]


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def _pairs(file: Path) -> Iterator[tuple[str, Any, str | None]]:
    """(question, answer, reasoning) of each row; answer or reasoning are None where a row has none."""
    try:
        text = file.read_text(encoding="utf-8")
        rows = [json.loads(line) for line in text.splitlines()] if file.suffix == ".jsonl" else json.loads(text)
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{file}: cannot be read: {one_line(error)}") from error
    if not isinstance(rows, list) or not rows:
        raise DataError(f"{file}: expected an array of rows")
    for number, row in enumerate(rows):
        try:
            yield _kept(row) if isinstance(row, dict) else _pair(row)
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
            raise DataError(
                f"{file}, row {number}: expected [question, answer], [question, answer, reasoning], or prompt and "
                "completion as in kept.jsonl"
            ) from error


def _pair(row: Any) -> tuple[str, Any, str | None]:
    if not isinstance(row, list):
        raise TypeError
    question, answer, *rest = row
    (reasoning,) = rest or (None,)
    return question.strip(), answer, None if reasoning is None else reasoning.strip()


def _kept(row: dict[str, Any]) -> tuple[str, Any, str | None]:
    prompt, completion = row["prompt"], row["completion"]
    question = prompt if isinstance(prompt, str) else prompt[-1]["content"]
    return question.strip(), row.get("answer"), completion if isinstance(completion, str) else completion[-1]["content"]


def main(argv: Sequence[str] | None = None) -> int:
    """Write the rows of the given options. Returns 0, 1 if the data was wrong, or 2 if the call was wrong."""
    return run_module(
        QuestionPairsConfig,
        lambda config: f"{write_rows(config)} rows in {config.output}",
        argv,
        prog="python -m sparse_opt.trainers.data.question_pairs",
    )


if __name__ == "__main__":
    sys.exit(main())
