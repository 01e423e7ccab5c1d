"""The rows of `bench verl`; tests/verl_engine has a run."""

from typing import Any

from sparse_opt.bench import report
from sparse_opt.bench.rows import Run
from sparse_opt.bench.verl.main import result_rows


def test_the_sparse_engine_is_judged_against_verls():
    def one(engine: str, ms: float, peak: int) -> dict[str, Any]:
        times = {"ms": ms, "p20_ms": ms, "p80_ms": ms, "n_rounds": 20}
        return {"engine": engine, **times, "peak_memory_bytes": peak, "held_bytes": None}

    rows = result_rows({"rows": [one("fsdp2", 100.0, 40), one("sparse_fsdp2", 80.0, 26)]}, {"shape": "3b"})
    run = Run({"machine": {"cpu": "C", "gpu": {"name": "NVIDIA H100"}}}, rows)
    assert {v.row.metric: (v.found, v.met) for v in report.judge(run)} == {
        "time": (0.8, True),
        "peak memory": (0.65, False),
    }
