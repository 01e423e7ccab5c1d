"""Fixtures that run the command line in the test's process, and files of a tiny run as its inputs."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from sparse_opt import DeltaLog
from sparse_opt.cli.main import main
from sparse_opt.cli.quickstart import data as quickstart_data
from sparse_opt.trainers.arithmetic import make_tokenizer


@pytest.fixture(autouse=True)
def private_dataset_cache(tmp_path_factory, monkeypatch):
    """Keep the cache of `datasets` out of the user's home."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path_factory.getbasetemp() / "datasets")


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
        assert self.code == code, (self.code, self.out, self.err)
        assert self.out == ""
        lines = self.err.splitlines()
        assert len(lines) == 1, self.err
        assert lines[0].startswith("sparse-opt: error: ")
        return lines[0]


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
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=hidden_size,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=64,
            tie_word_embeddings=True,
        )
    )


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
