"""The benchmark of DPO in TRL, on a tiny model on the CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("trl", reason="needs TRL: pip install 'sparse-opt[test]'")

from sparse_opt.bench import rows
from sparse_opt.bench.training import trl

TINY = ["--shape", "tiny", "--device", "cpu", "--sequence_length", "32", "--n_steps", "2"]


@pytest.fixture
def one_process(run_here):
    """For the first mode; the others run here."""
    run_here(trl, unless=lambda command: json.loads(Path(command[3]).read_text())["name"] == trl.MODES[0])


@pytest.mark.slow
def test_all_modes_are_run_compared_and_written(tmp_path, one_process):
    path = tmp_path / "new" / "trl.json"
    assert trl.main([*TINY, "--density", "0.1", "--output", str(path)]) == 0
    run = rows.read(path)
    found = {mode: {row.metric: row for row in run.matching(mode=mode)} for mode in trl.MODES}
    whole, active = (found[mode]["values trained"].value for mode in ("trl", "sparse"))
    assert active == pytest.approx(0.1 * whole, rel=0.01) and found["sparse"]["step"].case["density"] == 0.1
    for values in found.values():
        assert values["first loss"].value == pytest.approx(0.6931, abs=trl.LOSS_TOLERANCE)
        assert values["step"].n == 1
    assert run.peer(found["sparse"]["step"], "trl") == found["trl"]["step"]
    assert run.environment["versions"]["trl"]
