"""The benchmark of GRPO next to vLLM, with a tiny model."""

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")
pytest.importorskip("trl", reason="needs TRL 1.16 in vLLM's environment: pip install trl")

from sparse_opt.bench import grpo_engine, rows


def test_a_small_run(tmp_path):
    output = tmp_path / "rows.json"
    assert grpo_engine.main(["--small", "--modes", "dense,tiles", "--n_steps", "2", "--output", str(output)]) == 0
    run = rows.read(output)
    copied = {row.case["mode"]: row.value for row in run.rows if row.metric == "weights that vLLM has again"}
    assert run.completed and copied["dense"] > 0 == copied["tiles"]
    assert {"sampling", "reference", "synchronisation", "training"} <= {
        row.metric for row in run.matching(mode="tiles")
    }
