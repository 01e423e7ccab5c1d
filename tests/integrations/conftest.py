"""Fixtures: a tiny model with its tokenizer on disk, and dense and sparse trainers."""

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("trl", reason="needs TRL: pip install 'sparse-opt[test]'")
pytest.importorskip("accelerate", reason="needs accelerate: pip install 'sparse-opt[test]'")

from trainer_lab import WORDS, Lab, make_tokenizer
from transformers import PreTrainedTokenizerFast, TrainerCallback


@pytest.fixture(autouse=True)
def one_thread():
    """Use one thread, because the models are so small that more threads only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return make_tokenizer()


@pytest.fixture
def folder(tmp_path, tiny_llama, tokenizer) -> Path:
    """A saved model, because GRPO and DPO load their reference from the policy's folder."""
    # Larger weights than a new model's, so that log-probabilities differ between tokens.
    model = tiny_llama(vocab_size=len(WORDS), initializer_range=0.2, pad_token_id=0, bos_token_id=None, eos_token_id=1)
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


class Watch(TrainerCallback):
    """Keeps copies of the weights after the given steps."""

    def __init__(self, steps: range) -> None:
        self.steps, self.weights = steps, {}

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if state.global_step in self.steps:
            self.weights[state.global_step] = {n: p.detach().clone() for n, p in model.named_parameters()}


@pytest.fixture
def lab(tmp_path, folder, tokenizer, device, monkeypatch) -> Iterator[Lab]:
    if device.type == "cuda":  # bitwise comparisons require deterministic runs
        monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    yield Lab(folder, tokenizer, tmp_path, device)
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="session")
def watch() -> Callable[..., Watch]:
    return lambda n: Watch(range(1, n + 1))


@pytest.fixture(scope="session")
def curve() -> Callable[[Any], list[dict[str, float]]]:
    """The logged steps of a trained trainer."""

    def read(trainer: Any) -> list[dict[str, float]]:
        return [copy.copy(row) for row in trainer.state.log_history if "loss" in row]

    return read


@pytest.fixture(scope="session")
def weights() -> Callable[[Any], dict[str, torch.Tensor]]:
    """name -> copy of the parameter, on the CPU."""
    return lambda model: {name: p.detach().cpu().clone() for name, p in model.named_parameters()}
