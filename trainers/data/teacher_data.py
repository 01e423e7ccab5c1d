"""Encode the inputs of an RLT teacher and its student, and write demonstrations for the teacher's initial SFT.

A tokenizer with a chat template gets the system and user texts of `solved_questions.Templates` as messages and the
rest as the beginning of the assistant's turn; one without gets the texts one after another, verbatim.

    python -m sparse_opt.trainers.data.teacher_data --dataset rows.jsonl --tokenizer MODEL --templates rlt.yaml \\
        --output teacher.jsonl

writes rows (prompt, completion): the prompt that the run rlt.yaml gives to its teacher, and a known explanation with
the end tag. `solved_questions` lists the columns that the dataset may have.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparse_opt.config import option, require_number_ranges, run_module
from sparse_opt.errors import ConfigError, DataError
from sparse_opt.option_parser import read_yaml

from ..policy.pretrained import load_tokenizer_from
from ..run.outputs import write_text, writing
from .encoding import applying_chat_template, text_ids
from .rows import DataReport, counter, load_rows
from .solved_questions import (
    EXPLANATION_COLUMNS,
    FIELD,
    SolvedQuestion,
    Templates,
    filled,
    load_solved_questions,
    solved_question_reader,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class StudentSequence:
    """A student's input up to the last token of the solution; later tokens do not affect its log-probabilities."""

    ids: list[int]
    explanation: slice  # positions in ids
    solution: slice


@dataclass(frozen=True)
class TeacherExample:
    """The tokens of a solved question: the teacher's prompt, and the student's input around the explanation."""

    solved: SolvedQuestion
    ids: list[int]
    text: str
    student_start: list[int]
    student_middle: list[int]
    solution: list[int]

    def student_sequence(self, explanation: Sequence[int]) -> StudentSequence:
        """The student's sequence with the teacher's own tokens, so that both models score the same tokens."""
        start = len(self.student_start)
        end = start + len(explanation)
        solution = end + len(self.student_middle)
        ids = [*self.student_start, *explanation, *self.student_middle, *self.solution]
        return StudentSequence(ids, slice(start, end), slice(solution, solution + len(self.solution)))


@dataclass
class LessonReport(DataReport):
    """Counts of a dataset's used and dropped questions."""

    n_dropped_too_long: int = counter("{} dropped for a prompt longer than max_prompt_length")


def load_teacher_examples(
    dataset: str,
    split: str,
    tokenizer: PreTrainedTokenizerBase,
    templates: Templates,
    *,
    student_tokenizer: PreTrainedTokenizerBase | None = None,
    max_prompt_length: int,
    subset_size: int | None = None,
    seed: int = 0,
) -> tuple[list[TeacherExample], LessonReport]:
    """A dataset's solved questions as tokens, without those whose teacher's prompt is longer than `max_prompt_length`.

    Raises:
        DataError: see `load_rows`, `solved_question_reader` and `encode_solved_question`.
    """
    report = LessonReport()

    def encoder(columns: Iterable[str], name: str) -> Callable[[dict[str, Any]], TeacherExample | None]:
        read = solved_question_reader(columns, name, templates)

        def encode_row(row: dict[str, Any]) -> TeacherExample | None:
            example = encode_solved_question(tokenizer, read(row), templates, student_tokenizer)
            if len(example.ids) > max_prompt_length:
                report.n_dropped_too_long += 1
                return None
            return example

        return encode_row

    return load_rows(dataset, split, subset_size, seed, encoder, report), report


def encode_solved_question(
    tokenizer: PreTrainedTokenizerBase,
    solved: SolvedQuestion,
    templates: Templates,
    student_tokenizer: PreTrainedTokenizerBase | None = None,
) -> TeacherExample:
    """The token ids of a solved question; the student's are by its own tokenizer, which may have another template.

    Raises:
        DataError: a piece has no tokens, or pieces that are tokenized separately decode to another text.
    """
    student_tokenizer = student_tokenizer or tokenizer
    text = teacher_prompt(tokenizer, solved, templates)
    before, middle, _ = FIELD.split(templates.student_answer)[::2]
    start_text = _opening(student_tokenizer, templates.student_system, templates.student_user, solved) + before
    pieces = [text_ids(student_tokenizer, start_text), *_later_ids(student_tokenizer, [middle, solved.solution])]
    ids = text_ids(tokenizer, text)
    for name, piece in (("teacher's prompt", ids), ("student's prompt", pieces[0]), ("solution", pieces[2])):
        if not piece:
            raise DataError(f"the {name} has no tokens")
    joined = student_tokenizer.decode([id for piece in pieces for id in piece])
    whole = student_tokenizer.decode(text_ids(student_tokenizer, start_text + middle + solved.solution))
    if joined != whole:
        raise DataError(
            f"the tokenizer decodes {_around_difference(joined, whole)!r} from separately tokenized pieces; expected "
            f"{_around_difference(whole, joined)!r}, as from the whole text"
        )
    return TeacherExample(solved, ids, text, *pieces)


def teacher_prompt(tokenizer: PreTrainedTokenizerBase, solved: SolvedQuestion, templates: Templates) -> str:
    """The text that the teacher continues with its explanation."""
    opening = _opening(tokenizer, templates.teacher_system, templates.teacher_user, solved)
    return opening + filled(templates.teacher_start, solved)


def teacher_demonstration(
    tokenizer: PreTrainedTokenizerBase, solved: SolvedQuestion, templates: Templates
) -> dict[str, str]:
    """A row (prompt, completion) for SFT: the teacher's prompt; the explanation and the end tag.

    Raises:
        DataError: there is no explanation.
    """
    if solved.explanation is None:
        raise DataError(f"no explanation; expected a column of ({', '.join(EXPLANATION_COLUMNS)})")
    prompt = teacher_prompt(tokenizer, solved, templates)
    return {"prompt": prompt, "completion": solved.explanation + templates.explanation_end}


def split_explanation(
    tokenizer: PreTrainedTokenizerBase, completion: Sequence[int], explanation_end: str, eos_ids: Sequence[int]
) -> tuple[int, bool]:
    """The number of explanation tokens at the start of a completion, and whether the end tag closes the explanation.

    A token that contains the tag's first character belongs to the tag, with all its characters. Without the tag, the
    explanation is the completion without a final EOS.

    Args:
        completion: token ids, including EOS if it was sampled.
        eos_ids: ids that end a completion.
    """

    def has_tag(start: int, end: int) -> bool:
        return explanation_end in tokenizer.decode(completion[start:end])

    n = len(completion)
    if not has_tag(0, n):
        return n - int(n > 0 and completion[-1] in eos_ids), False
    end = _first(1, n, lambda count: has_tag(0, count))
    return _first(1, end, lambda start: not has_tag(start, end)) - 1, True


def _first(low: int, high: int, holds: Callable[[int], bool]) -> int:
    """The smallest value of low..high for which `holds`, which must be monotonic; high if there is none."""
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle + 1, high)
    return low


def _opening(tokenizer: PreTrainedTokenizerBase, system: str, user: str, solved: SolvedQuestion) -> str:
    system, user = filled(system, solved), filled(user, solved)
    if tokenizer.chat_template is None:
        return system + user
    messages = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": user})
    with applying_chat_template():
        return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))


def _later_ids(tokenizer: PreTrainedTokenizerBase, texts: Iterable[str]) -> Iterator[list[int]]:
    for text in texts:
        yield list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _around_difference(text: str, other: str) -> str:
    """The few characters around the first difference of a text from another."""
    same = next((i for i, (a, b) in enumerate(zip(text, other, strict=False)) if a != b), min(len(text), len(other)))
    return text[max(0, same - 20) : same + 20]


# The command


@dataclass(kw_only=True)
class TeacherDataConfig:
    """Write rows (prompt, completion) for the initial SFT of a teacher."""

    dataset: str = option(help="hub name, or local .json, .jsonl or .parquet file, with explanations")
    dataset_split: str = option("train", "split of a hub dataset")
    subset_size: int | None = option(None, "take this many rows, drawn with the seed")
    seed: int = option(0, "seed of the draw")
    tokenizer: str = option(help="hub name or local folder of the model that will be the teacher")
    templates: Path | None = option(None, "YAML file of an rlt run, for its templates; none is the defaults")
    output: Path = option(help="new .jsonl file")

    def __post_init__(self) -> None:
        require_number_ranges(self)


def read_templates(file: Path) -> Templates:
    """The templates among the options of a YAML file.

    Raises:
        ConfigError: the file cannot be read, or a template is not text or lacks a field.
    """
    options = read_yaml(file, "templates file")
    if not isinstance(options, dict):
        raise ConfigError(f"option 'templates': {file} has no options")
    found = {field.name: options[field.name] for field in fields(Templates) if field.name in options}
    for name, value in found.items():
        if not isinstance(value, str):
            raise ConfigError(f"option '{name}' in {file} is {value!r}: expected text")
    templates = Templates(**found)
    templates.check_templates()
    return templates


def write_demonstrations(config: TeacherDataConfig) -> int:
    """Write the rows of the options, and return their number.

    Raises:
        ConfigError: the output exists, or the templates' file cannot be read or lacks a field.
        DataError: the tokenizer or the dataset cannot be read, or a row has no explanation.
        SparseOptError: the output cannot be written.
    """
    if config.output.exists():
        raise ConfigError(f"option 'output': {config.output} exists; choose another or remove it")
    tokenizer = load_tokenizer_from(config.tokenizer)
    templates = Templates() if config.templates is None else read_templates(config.templates)
    questions = load_solved_questions(
        config.dataset, config.dataset_split, templates, subset_size=config.subset_size, seed=config.seed
    )
    rows = [teacher_demonstration(tokenizer, solved, templates) for solved in questions]
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    with writing(config.output):
        config.output.parent.mkdir(parents=True, exist_ok=True)
    write_text(config.output, text)
    return len(rows)


def main(argv: Sequence[str] | None = None) -> int:
    """Write the rows of the given options. Returns 0, 1 if the data was wrong, or 2 if the call was wrong."""
    return run_module(
        TeacherDataConfig,
        lambda config: f"{write_demonstrations(config)} rows in {config.output}",
        argv,
        prog="python -m sparse_opt.trainers.data.teacher_data",
    )


if __name__ == "__main__":
    sys.exit(main())
