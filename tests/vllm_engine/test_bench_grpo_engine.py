"""The benchmark of GRPO next to vLLM, with a tiny model."""

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")
pytest.importorskip("trl", reason="needs TRL 1.16 in vLLM's environment: pip install trl")

from sparse_opt.bench import grpo_engine, rows


def test_a_small_run(tmp_path):
    output = tmp_path / "rows.json"
    assert grpo_engine.main(["--small", "--modes", "tiles", "--n_steps", "2", "--output", str(output)]) == 0
    run = rows.read(output)
    found = {row.metric: row.value for row in run.rows}
    assert run.completed and found["weights that vLLM has again"] == 0
    assert found.keys() >= {"sampling", "reference", "synchronisation", "training"}
