"""The memory benchmark of DPO in TRL, on a tiny model on the CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("trl", reason="needs TRL: pip install 'sparse-opt[test]'")

from sparse_opt.bench.training import trl_memory

TINY = ["--shape", "tiny", "--sequence_length", "32", "--n_steps", "2"]


@pytest.fixture
def one_process(run_here):
    """For the first mode; the others run here."""
    run_here(trl_memory, unless=lambda command: json.loads(Path(command[3]).read_text())["name"] == trl_memory.MODES[0])


@pytest.mark.slow
def test_all_integration_modes_are_run_printed_and_written(tmp_path, capsys, one_process):
    path = tmp_path / "new" / "trl_memory.json"
    assert trl_memory.main([*TINY, "--density", "0.1", "--output", str(path)]) == 0
    report = json.loads(path.read_text())
    theirs, precomputed, sparse = report["results"]
    assert [result["mode"] for result in report["results"]] == list(trl_memory.MODES)
    assert sparse["n_trained"] == pytest.approx(0.1 * theirs["n_trained"], rel=0.01)
    for result in report["results"]:
        assert result["losses"][0] == pytest.approx(0.6931, abs=trl_memory.LOSS_TOLERANCE)
        assert len(result["step_s"]) == len(result["losses"]) == 2
        assert result["peak_memory_bytes"] > 2**20
    assert precomputed["grad_norms"][0] == pytest.approx(theirs["grad_norms"][0], rel=0.05)
    assert 0 < sparse["grad_norms"][0] < theirs["grad_norms"][0]  # over a tenth of the elements
    assert report["settings"]["density"] == 0.1
    out = capsys.readouterr().out
    assert all(mode in out for mode in trl_memory.MODES)


def test_a_run_that_can_not_be_is_refused_first(capsys):
    with pytest.raises(SystemExit) as exit_code:
        trl_memory.main([*TINY, "--n_steps", "0"])
    assert exit_code.value.code == 2
    assert "--n_steps" in capsys.readouterr().err
