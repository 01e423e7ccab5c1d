import json
import re
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from sparse_opt.errors import ConfigError
from sparse_opt.integrations.trl.rewards import exact_match
from sparse_opt.trainers.arithmetic import ArithmeticConfig, Question, main, make_arithmetic
from sparse_opt.trainers.batches import load_examples, load_prompts

SMALL = {"hidden_size": 32, "n_layers": 1, "max_operand": 19, "n_train": 300, "n_test": 60, "n_demonstrations": 900}
FILES = ["demonstrations", "explanations", "preferences", "test", "train"]


def rows_of(folder: Path, name: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in (folder / "data" / f"{name}.jsonl").read_text().splitlines()]


def value(prompt: str) -> int:
    a, b = re.fullmatch(r"(\d+)\+(\d+)=", prompt).groups()
    return int(a) + int(b)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return make_arithmetic(tmp_path_factory.mktemp("tasks") / "arithmetic", **SMALL)


def test_rows_are_right(folder):
    assert sorted(path.stem for path in (folder / "data").iterdir()) == FILES
    train, test = rows_of(folder, "train"), rows_of(folder, "test")
    assert (len(train), len(test)) == (300, 60)
    assert all(int(row["answer"]) == value(row["prompt"]) >= 0 for row in train + test)
    assert len({row["prompt"] for row in train + test}) == 360
    preferences = rows_of(folder, "preferences")
    assert [row["prompt"] for row in preferences] == [row["prompt"] for row in train]
    for row in preferences:
        assert int(row["chosen"]) == value(row["prompt"])
        assert abs(int(row["rejected"]) - value(row["prompt"])) in (1, 10) and int(row["rejected"]) >= 0


def test_explanations_add_up():
    for question in [*(Question(a, b) for a in range(13) for b in range(13)), Question(99, 1), Question(507, 88)]:
        columns = question.explanation.split(",")
        digits = []
        for column in columns:
            left, right = column.split("=")
            assert eval(left) == int(right)
            digits.append(int(right) % 10)
        carried = int(columns[-1].split("=")[1]) >= 10
        total = sum(digit * 10**place for place, digit in enumerate(digits)) + carried * 10 ** len(digits)
        assert total == int(question.answer) == value(question.prompt)


def test_same_seed_same_bytes(tmp_path, folder):
    def bytes_of(path: Path) -> dict[str, bytes]:
        return {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}

    again = make_arithmetic(tmp_path / "again", **SMALL)
    other = make_arithmetic(tmp_path / "other", seed=1, **SMALL)
    assert bytes_of(again) == bytes_of(folder)
    same = {name for name, content in bytes_of(other).items() if content == bytes_of(folder)[name]}
    assert "model/model.safetensors" not in same and not {f"data/{name}.jsonl" for name in FILES} & same


def test_loads_as_any_model(folder):
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert model.config.vocab_size == len(tokenizer)
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    data = folder / "data"
    (sequence,) = load_examples("demonstration", str(data / "demonstrations.jsonl"), "train", tokenizer, max_length=64)[
        0
    ]
    assert sequence.ids[-1] == tokenizer.eos_token_id
    load_examples("preference", str(data / "preferences.jsonl"), "train", tokenizer, max_length=64)
    prompts = load_prompts(str(data / "train.jsonl"), "train", tokenizer, max_length=16)
    right = [str(value(prompt.text)) for prompt in prompts]
    assert exact_match(completions=right, answer=[prompt.row["answer"] for prompt in prompts]) == [1.0] * 300


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"n_test": 101}, r"n_train 300 and n_test 101 are more than the 400 questions.* 0 to 19"),
        ({"hidden_size": 48}, "'hidden_size' is 48: expected a multiple of 32"),
    ],
)
def test_options_out_of_range(options, part):
    with pytest.raises(ConfigError, match=part):
        ArithmeticConfig(**{**SMALL, **options})


def test_command_line(tmp_path, capsys):
    words = [f"--{name}={number}" for name, number in SMALL.items()]
    assert main([*words, f"--output_dir={tmp_path / 'a'}"]) == 0
    assert len(rows_of(tmp_path / "a", "test")) == 60
    assert main([*words, f"--output_dir={tmp_path / 'a'}"]) == 2
    assert "exists and is not empty" in capsys.readouterr().err
