"""The benchmark of several devices under a time limit: what the results file and the exit code say, and --resume."""

from __future__ import annotations

import json
import os
import time
from types import SimpleNamespace

import pytest
from launch import run_command

pytest.importorskip("transformers", reason="needs transformers: pip install 'sparse-opt[train]'")

from sparse_opt.bench.distributed import main as distributed_main
from sparse_opt.cli.main import main

WORDS = ["bench", "distributed", "--small", "--eager", "--sequence_length", "8", "--n_rounds", "2"]


def where(rows):
    return [(row["world_size"], row["variant"]) for row in rows]


@pytest.mark.slow
def test_processes_that_the_limit_stops_leave_their_rows_and_no_traceback(tmp_path, monkeypatch, capfd):
    output, cores = tmp_path / "o.json", os.sched_getaffinity(0)

    def clock():  # an hour later as soon as two processes have measured their first row
        rows = json.loads(output.read_text())["rows"] if output.is_file() else []
        return time.time() + 3600 * any(row["world_size"] == 2 for row in rows)

    monkeypatch.setattr(distributed_main, "time", SimpleNamespace(time=clock, sleep=time.sleep))
    words = [*WORDS, "--gpus", "2,1", "--variants", "fsdp2,ddp", "--output", str(output)]
    assert main([*words, "--limit_s", "600"]) == 1
    out, err = capfd.readouterr()
    report = json.loads(output.read_text())
    assert where(report["rows"]) == [(1, "ddp"), (1, "fsdp2"), (2, "ddp")] and not report["completed"]
    assert where(report["missing"]) == [(2, "fsdp2")] and report["failed"] == []
    assert "3 of 3 checked rows" in out and "Traceback" not in err
    assert err.splitlines()[-1] == "not measured: 2 x default: fsdp2; the same command with --resume measures them"
    assert os.sched_getaffinity(0) == cores

    monkeypatch.undo()
    assert main([*words, "--resume"]) == 0
    resumed = json.loads(output.read_text())
    assert resumed["completed"] and resumed["rows"][:-1] == report["rows"]
    assert where(resumed["rows"][-1:]) == [(2, "fsdp2")]


@pytest.mark.slow
def test_a_process_that_fails_ends_the_others(tmp_path, capfd):
    """It cannot write into the folder of masks, while the other rank waits for it."""
    masks = tmp_path / "masks"
    masks.mkdir()
    (masks / "tiny_element_0.025_0.safetensors").mkdir()
    words = [*WORDS, "--gpus", "2", "--variants", "ddp", "--mask_dir", str(masks), "--output", str(tmp_path / "o.json")]
    assert main(words) == 1
    err = capfd.readouterr().err
    assert err.count("Traceback") <= 1 and "no row was measured" in err


def test_a_torchrun_ends_at_the_limit(tmp_path):
    output = tmp_path / "o.json"
    words = [*WORDS, "--output", str(output), "--variants", "local_element_bf16", "--limit_s", "0.001"]
    done = run_command(2, words, {**os.environ, "TORCHELASTIC_RUN_ID": "started-by-the-user"})
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert f"no row was measured; {output} is as it was before" in done.stderr
