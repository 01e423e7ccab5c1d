"""SmolLM2 and its questions; stand-ins for packages that need not be installed."""

import importlib.machinery
import importlib.util
import json
import random
import sys
from types import ModuleType

import pytest

from sparse_opt.errors import ConfigError
from sparse_opt.integrations.trl.rewards import load_rewards
from studies.smollm2 import questions


@pytest.fixture
def few_sums(monkeypatch):
    """A stand-in for reasoning-gym: 100 different sums, each item seeded by the dataset's seed and its index."""
    package = ModuleType("reasoning_gym")
    package.__spec__ = importlib.machinery.ModuleSpec("reasoning_gym", None)

    def entry(seed):
        generator = random.Random(seed)
        a, b = generator.randrange(10), generator.randrange(10)
        return {"answer": str(a + b), "metadata": {"expression": f"{a} + {b}"}}

    # Half a point for an answer that contains the right one, as some of the package's scorers give.
    package.get_score_answer_fn = lambda name: (
        lambda answer, entry: 1.0 if answer == entry["answer"] else 0.5 * (entry["answer"] in answer)
    )
    package.create_dataset = lambda name, seed, size, **config: (entry(seed + i) for i in range(size))
    monkeypatch.setitem(sys.modules, "reasoning_gym", package)


def rows_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_no_question_is_in_two_files(few_sums, tmp_path):
    sizes = {"n_tune": 20, "n_test": 30}
    folder = questions.make_questions(tmp_path / "a", "sums", n_train=50, **sizes)
    rows = {name: rows_of(folder / f"{name}.jsonl") for name in ("train", "tune", "test")}
    assert {name: len(found) for name, found in rows.items()} == {"train": 50, "tune": 20, "test": 30}
    assert len({row["prompt"][-1]["content"] for found in rows.values() for row in found}) == 100
    fewer = questions.make_questions(tmp_path / "b", "sums", n_train=5, **sizes)
    assert (fewer / "test.jsonl").read_bytes() == (folder / "test.jsonl").read_bytes()
    other = questions.make_questions(tmp_path / "c", "sums", n_train=5, **sizes, seed=1)
    assert (other / "test.jsonl").read_bytes() != (folder / "test.jsonl").read_bytes()
    with pytest.raises(ConfigError, match="sums has 100 different questions"):
        questions.make_questions(tmp_path / "d", "sums", n_train=51, **sizes)
    assert not (tmp_path / "d").exists()
    with pytest.raises(ConfigError, match="is not an empty folder"):
        questions.make_questions(folder, "sums", n_train=5, **sizes)


def test_right_answers_only_are_rewarded(few_sums, tmp_path):
    (row,) = rows_of(questions.make_questions(tmp_path / "q", "sums", n_train=1, n_tune=1, n_test=1) / "train.jsonl")
    answer = row["answer"].partition("=")[2]
    texts = [f"It is {answer}.", f"{answer}00", "no idea", f"1 + 1 = {answer},"]
    completions = [[{"role": "assistant", "content": text}] for text in texts]
    (reward,) = load_rewards(["studies.smollm2.questions.score"])
    for found in (texts, completions):
        assert reward(completions=found, entry=[row["entry"]] * 4, answer=[row["answer"]] * 4) == [1.0, 0.0, 0.0, 1.0]
