"""The benchmark of several devices under a time limit: what the results file and the exit code say, and --resume."""

from __future__ import annotations

import os
import time
from types import SimpleNamespace

import pytest
from launch import run_command

pytest.importorskip("transformers", reason="needs transformers: pip install 'sparse-opt[train]'")

from sparse_opt.bench import rows
from sparse_opt.bench.distributed import main as distributed_main
from sparse_opt.cli.main import main

WORDS = ["bench", "distributed", "--small", "--eager", "--sequence_length", "8", "--n_rounds", "2"]


def where(run):
    return [(row.case["gpus"], row.case["layout"]) for row in run.rows if row.metric == "time"]


@pytest.mark.slow
def test_processes_that_the_limit_stops_leave_their_rows_and_no_traceback(tmp_path, monkeypatch, capfd):
    output, cores = tmp_path / "o.json", os.sched_getaffinity(0)

    def clock():  # an hour later as soon as two processes have measured their first row
        found = where(rows.read(output)) if output.is_file() else []
        return time.time() + 3600 * any(gpus == 2 for gpus, _ in found)

    monkeypatch.setattr(distributed_main, "time", SimpleNamespace(time=clock, sleep=time.sleep))
    words = [*WORDS, "--gpus", "2,1", "--variants", "fsdp2,ddp", "--output", str(output)]
    assert main([*words, "--limit_s", "600"]) == 1
    out, err = capfd.readouterr()
    run = rows.read(output)
    assert where(run) == [(1, "ddp"), (1, "fsdp2"), (2, "ddp")] and not run.completed
    assert "3 of 3 checked rows" in out and "Traceback" not in err
    assert err.splitlines()[-1] == "not measured: 2 x default: fsdp2; the same command with --resume measures them"
    assert os.sched_getaffinity(0) == cores

    monkeypatch.undo()
    assert main([*words, "--resume"]) == 0
    resumed = rows.read(output)
    assert resumed.completed and where(resumed) == [*where(run), (2, "fsdp2")]
    assert [row.value for row in resumed.rows[: len(run.rows)]] == [row.value for row in run.rows]


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
