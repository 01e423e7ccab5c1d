"""The rows of `bench verl`, and its options; tests/verl_engine has a run."""

from importlib.util import find_spec
from typing import Any

import pytest

from sparse_opt.bench import report
from sparse_opt.bench.rows import Run
from sparse_opt.bench.verl.main import result_rows
from sparse_opt.cli.main import main


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


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--batch_size", "3"], "--batch_size 3 is no multiple of --micro_batch_size 2"),
        (["--gpus", "1"], "--gpus is 1, expected at least 2"),
        pytest.param(
            [],
            "verl is not installed here: `make test-verl`",
            marks=pytest.mark.skipif(find_spec("verl") is not None, reason="needs an environment without verl"),
        ),
    ],
    ids=["batch", "gpus", "verl"],
)
def test_wrong_options(words: list[str], message: str, capsys):
    assert main(["bench", "verl", "--small", *words]) == 2
    assert message in capsys.readouterr().err
