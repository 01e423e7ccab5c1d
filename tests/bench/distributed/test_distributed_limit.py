"""The benchmark of several devices under a time limit: what the results file and the exit code say, and --resume."""

from __future__ import annotations

import json
import os

import pytest
from launch import run_command

pytest.importorskip("transformers", reason="needs transformers: pip install 'sparse-opt[train]'")

from sparse_opt.cli.main import main


def test_rows_without_a_time_are_named_and_resumed(tmp_path, capfd):
    output = tmp_path / "o.json"
    words = ["bench", "distributed", "--small", "--sequence_length", "8", "--n_rounds", "2", "--output", str(output)]
    element, tile = "local_element_fp32", "local_tile64_fp32"

    # The processes of a torchrun end by themselves, without an error.
    of_torchrun = {**os.environ, "TORCHELASTIC_RUN_ID": "started-by-the-user"}
    done = run_command(1, [*words, "--variants", element], of_torchrun, launched=True)
    report = json.loads(output.read_text())
    assert (done.returncode, report["completed"], report["missing"]) == (0, True, []), done.stderr
    measured = report["rows"]

    # It does not mix rows of processes with and without their own cores.
    assert main([*words, "--gpus", "1", "--resume"]) == 2
    assert "has rows of share_cores True, expected False" in capfd.readouterr().err
    both = [*words, "--gpus", "1", "--share_cores", "--variants", f"{element},{tile}", "--resume"]
    assert main([*both, "--limit_s", "0.001"]) == 1
    report = json.loads(output.read_text())
    assert not report["completed"] and report["rows"] == measured
    assert report["missing"] == [{"world_size": 1, "network": "default", "variant": tile}]
    line = f"1 x default: not measured: {tile}; the same command with --resume measures them"
    assert line in capfd.readouterr().err

    of_two = [*words, "--variants", f"{element},{tile}", "--resume", "--limit_s", "0.001"]
    done = run_command(2, of_two, of_torchrun)
    assert done.returncode == 1
    assert f"2 x default: not measured: {element}, {tile};" in done.stderr
    report = json.loads(output.read_text())
    assert not report["completed"] and [row["variant"] for row in report["missing"]] == [element, tile]

    # In a torchrun that this starts, whose processes have their own cores.
    output.unlink()
    assert main([*words, "--gpus", "1", "--variants", f"{element},{tile}"]) == 0, capfd.readouterr().err
    report = json.loads(output.read_text())
    assert report["completed"] and report["missing"] == [] and not report["settings"]["share_cores"]
    assert [row["variant"] for row in report["rows"]] == [element, tile]
    assert all(row["ms"] > 0 for row in report["rows"])
