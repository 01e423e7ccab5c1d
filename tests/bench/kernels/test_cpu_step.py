"""The CPU benchmark of the optimizer step, at a size that takes no time."""

from __future__ import annotations

import json

import pytest
import torch

from sparse_opt import SparseAdamW, backends
from sparse_opt.bench.common.environment import COMMIT_VARIABLE, commit
from sparse_opt.bench.kernels import cpu_step

BACKEND = next(name for name in ("cpu", "reference") if name in backends.available("cpu"))
SMALL = ["--numel", "100000", "--backend", BACKEND, "--n_rounds", "3"]


def test_results_are_checked_timed_printed_and_written(tmp_path, capsys):
    threads = torch.get_num_threads()
    path = tmp_path / "new" / "cpu_step.json"
    assert cpu_step.main([*SMALL, "--min_ratio", "0", "--json", str(path)]) == 0
    assert torch.get_num_threads() == threads

    report = json.loads(path.read_text())
    steps = ["SparseAdamW, dense gradients", "SparseAdamW, compact gradients", "torch.optim.AdamW(fused=True)"]
    assert [row["step"] for row in report["rows"]] == steps
    assert report["numel"] == pytest.approx(100_000, rel=0.1)
    assert report["nnz"] == pytest.approx(0.025 * report["numel"], rel=0.05)
    dense = report["rows"][-1]
    for row in report["rows"]:
        assert row["p20_ms"] <= row["ms"] <= row["p80_ms"]
        assert row["n_rounds"] == 3
        assert row["times_as_fast"] == pytest.approx(dense["ms"] / row["ms"])
    assert report["ratio"] == min(row["times_as_fast"] for row in report["rows"][:-1])
    assert set(report["environment"]) == {"date", "commit", "machine", "versions"}

    out = capsys.readouterr().out
    assert all(step in out for step in steps)


def test_a_step_that_is_too_slow_fails(capsys):
    assert cpu_step.main([*SMALL, "--min_ratio", "1e9"]) == 1
    assert "TOO SLOW" in capsys.readouterr().err


def test_a_wrong_step_is_not_timed(monkeypatch, capsys):
    monkeypatch.setattr(SparseAdamW, "step", lambda self: None)
    monkeypatch.setattr(cpu_step, "measure", lambda *args, **kwargs: pytest.fail("timed a wrong result"))
    assert cpu_step.main([*SMALL, "--min_ratio", "0"]) == 1
    assert "WRONG RESULT" in capsys.readouterr().err


def test_a_step_outside_the_mask_is_not_timed(monkeypatch, capsys):
    true_step = SparseAdamW.step

    def step(self):
        true_step(self)
        with torch.no_grad():
            self.param_groups[0]["params"][0].view(-1)[:200] += 1e-3

    monkeypatch.setattr(SparseAdamW, "step", step)
    assert cpu_step.main([*SMALL, "--min_ratio", "0"]) == 1
    assert "WRONG RESULT" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--backend", "cuda"], "runs on cuda tensors"),
        (["--json", "/proc/none/x.json"], "cannot be written to /proc/none/x.json"),
        (["--min_speed", "4"], "--min_speed"),
        (["--numel", "-5"], "--numel is -5, expected at least 1"),
        (["--numel", "1"], "--density 0.025 of 88 elements is less than one in each matrix"),
    ],
)
def test_a_wrong_call_ends_with_2_and_one_line(arguments, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        cpu_step.main(arguments)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


def test_outside_a_repository_the_commit_comes_from_the_environment(monkeypatch):
    monkeypatch.setattr("sparse_opt.bench.common.environment._git", lambda *args: "")
    monkeypatch.delenv(COMMIT_VARIABLE, raising=False)
    assert commit() is None
    monkeypatch.setenv(COMMIT_VARIABLE, "abc")
    assert commit() == "abc"
