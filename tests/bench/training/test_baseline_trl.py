"""`sparse-opt bench baseline trl`: DPO in TRL's trainer, on a tiny model on the CPU."""

import pytest

pytest.importorskip("trl", reason="needs TRL: pip install 'sparse-opt[test]'")

from sparse_opt.bench import rows
from sparse_opt.bench.training.baseline import trl
from sparse_opt.bench.training.baseline.main import main

TINY = ["trl", "--small", "--sequence_length", "32", "--n_steps", "2", "--n_warmup", "1", "--density", "0.1"]


@pytest.mark.slow
@pytest.mark.parametrize("reference", [[], ["--precomputed_reference"]])
def test_modes_are_run_compared_and_written(tmp_path, run_here, reference):
    run_here(trl)
    path = tmp_path / "new" / "trl.json"
    words = ["--modes", "dense,sparse,tiles", "--gradient_checkpointing", *reference]
    assert main([*TINY, *words, "--output", str(path)]) == 0
    run = rows.read(path)
    found = {mode: {row.metric: row for row in run.matching(mode=mode)} for mode in ("dense", "sparse", "tiles")}
    whole, active = (found[mode]["values trained"].value for mode in ("dense", "sparse"))
    assert active == pytest.approx(0.1 * whole, rel=0.01) and found["tiles"]["gradients by tiles"].value > 0
    for values in found.values():
        assert values["whole step"].n == 1 and values["whole step"].value > 0
    assert run.peer(found["sparse"]["whole step"], "dense") == found["dense"]["whole step"]
    assert run.environment["versions"]["trl"]
