"""RLT data: questions with solutions and explanations, and the templates of the teacher's and the student's inputs.

A teacher (https://arxiv.org/abs/2506.08388) is given a question with its solution and writes an explanation, up to an
end tag; a student is given the question, the explanation and then the solution. The default tags are those of
https://github.com/SakanaAI/RLT. The columns of a dataset determine how its rows are read:

| columns | |
|---|---|
| question or problem or prompt; solution or answer | text; if several are present, the first in this list is used |
| optional: explanation or reasoning_trace or reasoning | text |
| conversations | bespokelabs/Bespoke-Stratos-17k: {from, value}; assistant texts have the form of `student_answer` |
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from typing import Any

from sparse_opt.config import option
from sparse_opt.errors import ConfigError, DataError

from .rows import DataReport, load_rows

QUESTION_COLUMNS = ("question", "problem", "prompt")
SOLUTION_COLUMNS = ("solution", "answer")
EXPLANATION_COLUMNS = ("explanation", "reasoning_trace", "reasoning")
FIELD = re.compile(r"\{(question|solution|explanation)\}")


@dataclass(kw_only=True)
class Templates:
    """Texts with {question}, {solution} and {explanation} in them; an empty system text is omitted."""

    teacher_system: str = option(
        "You are given a question and write its solution first, between <|begin_of_solution|> and "
        "<|end_of_solution|>. Then you explain, between <|begin_of_explanation|> and <|end_of_explanation|>, how one "
        "comes to this solution: step by step, with the steps apart by empty lines, so that a reader who has only the "
        "question could follow and find the solution.",
        "system text of the teacher",
    )
    teacher_user: str = option("{question}", "the teacher's question")
    teacher_start: str = option(
        "<|begin_of_solution|>\n\n{solution}\n\n<|end_of_solution|>\n\n<|begin_of_explanation|>\n\n",
        "given beginning of the teacher's answer; the explanation follows",
    )
    explanation_end: str = option("<|end_of_explanation|>", "the tag that ends the teacher's explanation")
    student_system: str = option(
        "You think about a question first, step by step, between <|begin_of_thought|> and <|end_of_thought|>, and then "
        "write its solution between <|begin_of_solution|> and <|end_of_solution|>.",
        "system text of the student",
    )
    student_user: str = option("{question}", "the student's question")
    student_answer: str = option(
        "<|begin_of_thought|>\n\n{explanation}<|end_of_thought|>\n\n<|begin_of_solution|>\n\n{solution}\n\n"
        "<|end_of_solution|>",
        "the student's answer",
    )

    def check_templates(self) -> None:
        """Raise ConfigError if a template is not valid text, lacks a field, or has a field of another template."""
        for field_ in fields(Templates):
            try:
                getattr(self, field_.name).encode()
            except UnicodeEncodeError as error:
                raise ConfigError(f"option '{field_.name}' cannot be written as UTF-8: {error.reason}") from error
        for names, required, others in (
            (("teacher_system", "teacher_user", "teacher_start"), ("question", "solution"), ("explanation",)),
            (("student_system", "student_user"), ("question",), ("explanation", "solution")),
            (("student_answer",), ("explanation", "solution"), ("question",)),
            (("explanation_end",), (), ("question", "solution", "explanation")),
        ):
            found = [field for name in names for field in FIELD.findall(getattr(self, name))]
            label = ", ".join(f"'{name}'" for name in names)
            for field in required:
                if field not in found:
                    raise ConfigError(f"the templates {label} have no {{{field}}}")
            for field in others:
                if field in found:
                    raise ConfigError(f"the templates {label} have {{{field}}}, a field of other templates")
        if FIELD.findall(self.student_answer) != ["explanation", "solution"]:
            raise ConfigError("option 'student_answer': expected {explanation} and after it {solution}, each once")
        if not self.explanation_end:
            raise ConfigError("option 'explanation_end' is empty: expected a tag that ends an explanation")


@dataclass(frozen=True)
class SolvedQuestion:
    """A question with its solution, and an explanation if one is known."""

    question: str
    solution: str
    explanation: str | None = None


def filled(template: str, solved: SolvedQuestion) -> str:
    """The template with the texts of the solved question; braces inside them stay as they are."""
    return FIELD.sub(lambda field: str(getattr(solved, field[1])), template)


def load_solved_questions(
    dataset: str, split: str, templates: Templates, *, subset_size: int | None = None, seed: int = 0
) -> list[SolvedQuestion]:
    """A dataset's rows as solved questions. Raises DataError, see `load_rows` and `solved_question_reader`."""
    encoder = functools.partial(solved_question_reader, templates=templates)
    return load_rows(dataset, split, subset_size, seed, encoder, DataReport())


def solved_question_reader(
    columns: Iterable[str], name: str, templates: Templates
) -> Callable[[dict[str, Any]], SolvedQuestion]:
    """The function that reads a row of these columns; `name` is the dataset's, for messages.

    Raises:
        DataError: the columns have no known form.
    """
    found = set(columns)
    question, solution, explanation = (
        next((column for column in names if column in found), None)
        for names in (QUESTION_COLUMNS, SOLUTION_COLUMNS, EXPLANATION_COLUMNS)
    )
    if question is not None and solution is not None:

        def read(row: dict[str, Any]) -> SolvedQuestion:
            return SolvedQuestion(
                _text(row, question), _text(row, solution), None if explanation is None else _text(row, explanation)
            )

        return read
    if "conversations" in found:
        answer = _answer_pattern(templates.student_answer)
        return lambda row: _read_conversation(row["conversations"], answer)
    raise DataError(
        f"dataset {name}: found columns ({', '.join(sorted(found))}); expected one of ({', '.join(QUESTION_COLUMNS)}) "
        f"with one of ({', '.join(SOLUTION_COLUMNS)}), or (conversations)"
    )


def _text(row: dict[str, Any], column: str) -> str:
    value = row[column]
    if not isinstance(value, str) or not value.strip():
        raise DataError(f"column '{column}' is {str(value)[:80]!r}: expected text that is not empty")
    return value


def _answer_pattern(student_answer: str) -> re.Pattern[str]:
    """The template as a pattern of answers, in which any white space matches any other."""
    pieces = []
    for piece in re.split(r"(\{explanation\}|\{solution\}|\s+)", student_answer):
        if piece in ("{explanation}", "{solution}"):
            pieces.append(f"(?P<{piece[1:-1]}>.*?)")
        else:
            pieces.append(r"\s*" if piece.isspace() else re.escape(piece))
    return re.compile("".join(pieces) + r"\s*", re.DOTALL)


def _read_conversation(conversation: Any, answer: re.Pattern[str]) -> SolvedQuestion:
    texts = {turn.get("from"): turn.get("value") for turn in conversation} if isinstance(conversation, list) else {}
    if not isinstance(texts.get("user"), str) or not isinstance(texts.get("assistant"), str):
        raise DataError("column 'conversations': expected a list of {from, value} with user and assistant")
    match = answer.fullmatch(texts["assistant"])
    if match is None:
        raise DataError(
            f"the assistant's text is {texts['assistant'][:80]!r}...: expected the form of template student_answer"
        )
    return SolvedQuestion(texts["user"], match["solution"].strip(), match["explanation"])
