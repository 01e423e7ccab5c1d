"""The benchmark of a logging loop, on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sparse_opt import DeltaLog, backends
from sparse_opt.bench.training.delta_logging import main as delta_logging
from sparse_opt.bench.training.delta_logging.report import document_text

needs_native = pytest.mark.skipif(
    bool(backends.why_unavailable("cpu", "cpu")), reason="needs the native extension, as patches are timed in it alone"
)
SMALL = ["--small", "--n_blocks", "1", "--n_steps", "2", "--sequence_length", "16", "--learning_rate", "1e-4"]


@needs_native
def test_both_modes_are_timed_shown_and_written(tmp_path, capsys):
    path, work = tmp_path / "new" / "logging.json", tmp_path / "work"
    work.mkdir()
    assert delta_logging.main([*SMALL, "--directory", str(work), "--output", str(path)]) == 0
    assert list(work.iterdir()) == []
    report = json.loads(path.read_text())
    assert report["completed"] and report["targets"] == []  # nothing is judged on a CPU
    assert report["file_system"]
    dense, sparse = report["rows"]
    assert (dense["mode"], sparse["mode"]) == ("dense", "sparse")
    assert dense["mask_nnz"] is None and sparse["mask_nnz"] == pytest.approx(0.025 * sparse["numel"], rel=0.01)
    for row in report["rows"]:
        assert len(row["plain_ms"]["each"]) == len(row["logged_ms"]["each"]) == len(row["append_host_ms"]["each"]) == 2
        assert row["slower_mean_ms"] == pytest.approx(row["logged_ms"]["mean"] - row["plain_ms"]["mean"])
        assert [step["kind"] for step in row["steps"]] == ["patch", "patch"]
        assert all(step["masked"] == (row["mode"] == "sparse") and step["changed"] > 0 for step in row["steps"])
        assert {"encode", "digests", "copy to the host"} <= set(row["parts"])
        assert row["peaks"] == {kind: {"device_bytes": None, "pinned_bytes": None} for kind in ("plain", "logged")}
    # A step of a sparse run changes nothing but its active elements.
    assert max(step["changed"] for step in sparse["steps"]) <= sparse["mask_nnz"]
    assert "slower by, mean" in capsys.readouterr().out
    assert "| dense | encode |" in document_text(report)


@needs_native
def test_a_log_that_is_not_the_model_is_an_error(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(DeltaLog, "step_of", lambda self, model: None)
    path = tmp_path / "logging.json"
    assert delta_logging.main([*SMALL, "--modes", "dense", "--directory", str(tmp_path), "--output", str(path)]) == 1
    assert "WRONG RESULT: mode dense: the model has the weights of step None, logged " in capsys.readouterr().err
    assert not json.loads(path.read_text())["completed"]


def report_of(slower_mean_ms: float, slower_median_ms: float, *, small: bool = False, gpu: bool = True) -> dict:
    machine = {"cpu": "x", **({"gpu": {"name": "y"}} if gpu else {})}
    row = {"mode": "dense", "slower_mean_ms": slower_mean_ms, "slower_median_ms": slower_median_ms}
    return {"settings": {"small": small}, "environment": {"machine": machine}, "rows": [row]}


def test_the_larger_difference_is_judged():
    assert delta_logging.judge(report_of(9.0, 10.0))[0].met
    for slower in ((10.5, 3.0), (3.0, 10.5)):
        (verdict,) = delta_logging.judge(report_of(*slower))
        assert not verdict.met
        assert verdict.text == "a log of every step, mode dense (cuda): 10.5 ms a step, expected <= 10 ms a step"
    assert delta_logging.judge(report_of(50.0, 50.0, small=True)) == []
    assert delta_logging.judge(report_of(50.0, 50.0, gpu=False)) == []


def test_the_file_system_of_a_path():
    assert delta_logging.file_system(Path("/proc/self")) == "proc"
    assert delta_logging.file_system(Path("/")) != ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--modes", "dense,lora"], "--modes dense,lora: expected some of dense, sparse, each once"),
        (["--n_steps", "0"], "--n_steps is 0, expected at least 1"),
        (["--density", "0"], "--density is 0.0, expected more than 0"),
        (["--directory", "/no/such"], "--directory /no/such: no such folder"),
        (["--output", "/proc/none/x.json"], "cannot be written to /proc/none/x.json"),
    ],
)
@needs_native
def test_a_wrong_call_ends_with_2_and_one_line(arguments, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        delta_logging.main([*SMALL, *arguments])
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err.splitlines()[-1]
