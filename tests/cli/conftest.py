"""Fixtures that run the command line in the test's process, and files of a tiny run as its inputs."""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from tiny_llama import make_llama
from transformers import LlamaForCausalLM

from sparse_opt import DeltaLog
from sparse_opt.cli.main import main
from sparse_opt.cli.quickstart import data as quickstart_data
from sparse_opt.trainers.arithmetic import make_tokenizer


@dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    err: str

    def done(self) -> str:
        """stdout, after a check that the command succeeded."""
        assert self.code == 0, self.err
        return self.out

    def error_line(self, code: int) -> str:
        """The error line, the last of stderr, after a check that there is no traceback."""
        assert self.code == code, (self.code, self.out, self.err)
        assert "Traceback" not in self.err
        assert self.err.splitlines()[-1].startswith("sparse-opt: error: ")
        return self.err.splitlines()[-1]

    def failed_in_one_line(self, code: int) -> str:
        """The error line, after a check that there is nothing else: no output, no usage text, no traceback."""
        line = self.error_line(code)
        assert self.out == "" and self.err.splitlines() == [line], self.err
        return line


@pytest.fixture
def sparse_opt(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Outcome]:
    """`sparse_opt("mask", "info", file)` -> exit code, stdout and stderr."""
    monkeypatch.delenv("SPARSE_OPT_DEBUG", raising=False)

    def call(*words: object) -> Outcome:
        capfd.readouterr()
        code = main([str(word) for word in words])
        return Outcome(code, *capfd.readouterr())

    return call


def make_model(tokenizer, hidden_size: int = 16) -> LlamaForCausalLM:
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": True}
    return make_llama(vocab_size=len(tokenizer), hidden_size=hidden_size, intermediate_size=32, **heads)


@dataclass(frozen=True)
class Files:
    """A tiny model and a wider one, preference pairs, and a delta log of the tiny one with steps 0, 1, 2 and 3."""

    model: Path
    wider_model: Path
    pairs: Path
    delta_log: Path
    states: tuple[dict[str, torch.Tensor], ...]


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    folder = tmp_path_factory.mktemp("files")
    tokenizer = make_tokenizer()
    for name, hidden_size in (("model", 16), ("wider_model", 32)):
        make_model(tokenizer, hidden_size).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    pairs = folder / "pairs.jsonl"
    pairs.write_text("".join(json.dumps(row) + "\n" for row in quickstart_data.preferences(24, random.Random(0))))

    model = make_model(tokenizer).bfloat16()
    generator = torch.Generator().manual_seed(1)
    states = [{name: t.clone() for name, t in model.state_dict().items()}]
    with DeltaLog.create(folder / "log", model, metadata={"model": "tiny"}) as log:
        for step in (1, 2, 3):
            with torch.no_grad():
                for parameter in model.parameters():
                    moved = torch.rand(parameter.shape, generator=generator) < 0.3
                    parameter += 0.01 * moved * torch.randn(parameter.shape, generator=generator)
            log.append(step)
            states.append({name: t.clone() for name, t in model.state_dict().items()})
    return Files(folder / "model", folder / "wider_model", pairs, folder / "log", tuple(states))


@pytest.fixture
def rows(files, tmp_path_factory):
    """Rows with the columns of all three trainers."""
    file = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    pairs = [json.loads(line) for line in files.pairs.read_text().splitlines()]
    for row in pairs:
        row |= {"completion": row["chosen"], "answer": row["chosen"]}
    file.write_text("".join(json.dumps(row) + "\n" for row in pairs))
    return file


@pytest.fixture
def train(sparse_opt, files, rows, tmp_path):
    """`train("dpo", *words)` is a run of two steps on the tiny model into tmp_path/out."""

    def call(algorithm: str, *words: object):
        where = ("--model_name_or_path", files.model, "--dataset_name", rows, "--output_dir", tmp_path / "out")
        shape = ("--max_steps", 2, "--per_device_train_batch_size", 2, "--report_to", "none")
        rollout = ("--num_generations", 2, "--max_completion_length", 4, "--reward_funcs", "exact_match")
        return sparse_opt("train", algorithm, *where, *shape, *(rollout if algorithm == "grpo" else ()), *words)

    return call
