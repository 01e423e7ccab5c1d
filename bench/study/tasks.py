"""Questions of reasoning-gym with answers that its scorers verify, as files for the training loops.

    python -m sparse_opt.bench.study.tasks --output_dir products --task products

writes train.jsonl, tune.jsonl and test.jsonl: prompt (chat messages), answer, and entry, which the reward function
`sparse_opt.bench.study.tasks.score` passes to the package's scorer:

    sparse-opt train grpo --model_name_or_path smollm2/fp32 --dataset_name products/train.jsonl \\
        --reward_funcs sparse_opt.bench.study.tasks.score --max_completion_length 16

No question is in two of the files, or twice in one: tune.jsonl is for choosing options such as the learning rate, and
test.jsonl for the result alone. With the same seed and n_test, test.jsonl is the same whatever the other numbers are.

docs/study.md has the accuracy that the model starts from.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from sparse_opt.config import option, require_number_ranges, run_module
from sparse_opt.errors import ConfigError
from sparse_opt.files import new_folder
from sparse_opt.integrations.trl.records import Text
from sparse_opt.trainers.rewards.functions import completion_text
from sparse_opt.trainers.run.outputs import check_new_folder, writing

from .model import require_package

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
_NUMBER_ONLY = "Answer with the number only."


@dataclass(frozen=True)
class Task:
    """A generator of reasoning-gym with its difficulty, and how the model is asked.

    Args:
        dataset: name of the generator.
        answer: what the scorer gets of a completion: its last number, or its first line without a full stop.
        config: options of the generator.
        system: the system message, which asks for a short answer.
        words: an entry's question and answer in other words; None takes the generator's own.
        example: a question with its answer that comes before each question, so that answers are short.
    """

    dataset: str
    answer: Literal["number", "line"]
    config: dict[str, Any] = field(default_factory=dict)
    system: str = _NUMBER_ONLY
    words: Callable[[dict[str, Any]], tuple[str, str]] | None = None
    example: tuple[str, str] | None = None

    def asked(self, entry: dict[str, Any]) -> tuple[list[dict[str, str]], str]:
        """The prompt of an entry, and its answer."""
        question, answer = (entry["question"], str(entry["answer"])) if self.words is None else self.words(entry)
        said = [("system", self.system)]
        if self.example is not None:
            said += [("user", self.example[0]), ("assistant", self.example[1])]
        said.append(("user", question.strip()))
        return [{"role": role, "content": text} for role, text in said], answer


def _sum(entry: dict[str, Any]) -> tuple[str, str]:
    # The model is right more often if it repeats the sum.
    expression = entry["metadata"]["expression"]
    return f"What is {expression}?", f"{expression.replace(' ', '')}={entry['answer']}"


def _which(entry: dict[str, Any]) -> tuple[str, str]:
    # The scorer accepts an error below 0.01, so that numbers rounded to two decimals have the answer among them.
    metadata = entry["metadata"]
    numbers = ", ".join(f"{number:.2f}" for number in metadata["candidates"])
    return f"Which is the {metadata['size']}: {numbers}?", f"{metadata['solution']:.2f}"


TASKS = {
    "sums": Task(
        "chain_sum",
        "number",
        {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2},
        system="Answer shortly.",
        words=_sum,
        example=("What is 35 + 17?", "35+17=52"),
    ),
    "largest": Task(
        "number_format",
        "number",
        {"min_num_candidates": 3, "max_num_candidates": 4, "min_n": 20, "max_n": 80, "max_delta": 19},
        words=_which,
        example=("Which is the largest: 41.50, 87.25, 60.75?", "87.25"),
    ),
    "products": Task("products", "number", {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}),
    "letter_counting": Task("letter_counting", "number", {"min_words": 5, "max_words": 10}),
}


@dataclass(kw_only=True)
class TaskConfig:
    """Write train.jsonl, tune.jsonl and test.jsonl: questions of reasoning-gym, none of them in two files."""

    output_dir: Path = option(Path("questions"), "new or empty folder")
    task: str = option("products", f"one of {', '.join(TASKS)}")
    n_train: int = option(2000, "questions to train on", at_least=1)
    n_tune: int = option(200, "questions to choose options with", at_least=1)
    n_test: int = option(500, "held-out questions", at_least=1)
    seed: int = option(0, "seed of the questions", at_least=0)

    def __post_init__(self) -> None:
        require_number_ranges(self)
        require_task(self.task)


def make_questions(folder: Path, task: str, *, n_train: int, n_tune: int, n_test: int, seed: int = 0) -> Path:
    """Write the three files to a new folder (see the module) and return it.

    Raises:
        ConfigError: reasoning-gym is not installed, there is no such task, it has not as many different questions, or
            the folder cannot be created or is not empty.
    """
    require_task(task)
    check_new_folder(folder, "output_dir")
    questions = different_questions(task, seed)
    rows = {}
    for name, n in (("test", n_test), ("tune", n_tune), ("train", n_train)):
        rows[name] = [row for _, row in zip(range(n), questions, strict=False)]
        if len(rows[name]) < n:
            raise ConfigError(
                f"task {task} has {sum(map(len, rows.values()))} different questions: expected n_test {n_test} + "
                f"n_tune {n_tune} + n_train {n_train}"
            )
    with writing(folder), new_folder(folder) as aside:
        for name, found in rows.items():
            text = "".join(json.dumps(row) + "\n" for row in found)
            (aside / f"{name}.jsonl").write_text(text, encoding="utf-8")
    return folder


def require_task(task: str) -> None:
    """Raise ConfigError if there is no such task, or reasoning-gym is not installed."""
    if task not in TASKS:
        raise ConfigError(f"option 'task' is '{task}': expected one of {', '.join(TASKS)}")
    require_package("reasoning_gym", "makes and scores the questions")


def different_questions(task: str, seed: int) -> Iterator[dict[str, Any]]:
    """Rows of the three files, no question twice; ends when 1000 questions in a row were there before."""
    import reasoning_gym

    chosen = TASKS[task]
    # A question's own seed is seed + its index: generators with neighbouring seeds would have most of them in common.
    dataset = reasoning_gym.create_dataset(chosen.dataset, seed=seed * 10**6, size=10**6, **chosen.config)
    seen: set[str] = set()
    n_repeated = 0
    for entry in dataset:
        messages, answer = chosen.asked(entry)
        question = messages[-1]["content"]
        n_repeated = n_repeated + 1 if question in seen else 0
        if n_repeated == 1000:
            return
        if question not in seen:
            seen.add(question)
            yield {
                "prompt": messages,
                "answer": answer,
                # As JSON: metadata differs from question to question, and the columns of a dataset have one type.
                "entry": json.dumps({"task": task, **entry}, default=str),
            }


def score(completions: Sequence[Text], entry: Sequence[str], **kwargs: Any) -> list[float | None]:
    """A reward function: 1.0 if the scorer of reasoning-gym finds the answer in the completion right, else 0.0.

    Partial scores are 0.0: some scorers give them to an answer that contains the right one, as 125 contains 25.
    """
    import reasoning_gym

    scores: list[float | None] = []
    for completion, text in zip(completions, entry, strict=True):
        question = json.loads(text)
        task = TASKS[question["task"]]
        answer = answer_of(completion_text(completion), task.answer)
        scorer = reasoning_gym.get_score_answer_fn(task.dataset)
        scores.append(float(answer is not None and scorer(answer, question) >= 1))
    return scores


def answer_of(completion: str, kind: Literal["number", "line"]) -> str | None:
    """The answer in a completion: its last number, or its first line without a full stop; None if there is none."""
    if kind == "number":
        numbers = _NUMBER.findall(completion)
        return numbers[-1].rstrip(",") if numbers else None
    return completion.strip().partition("\n")[0].strip().rstrip(".") or None


def _make(config: TaskConfig) -> Path:
    sizes = {"n_train": config.n_train, "n_tune": config.n_tune, "n_test": config.n_test}
    return make_questions(config.output_dir, config.task, **sizes, seed=config.seed)


def main(argv: Sequence[str] | None = None) -> int:
    """Write the folder. Returns 0, 1 if the work failed, or 2 if the call was wrong or a package is missing."""
    return run_module(TaskConfig, _make, argv, prog="python -m sparse_opt.bench.study.tasks")


if __name__ == "__main__":
    sys.exit(main())
