"""The report of `bench verl`, and its options; tests/verl_engine has a run."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest

from sparse_opt.bench.verl import report as reports
from sparse_opt.cli.main import main


def row(engine: str, ms: float, peak_gib: float) -> dict[str, Any]:
    peak = int(peak_gib * 2**30)
    times = {"ms": ms, "p20_ms": ms, "p80_ms": ms}
    return {"engine": engine, **times, "peak_memory_bytes": peak, "held_bytes": peak // 2}


@pytest.fixture
def report() -> dict[str, Any]:
    machine = {"cpu": "C", "logical_cpus": 2, "gpu": {"name": "G", "driver": "1"}}
    settings = {"shape": "3b", "gpus": 2, "density": 0.025, "pattern": "tile64", "sequence_length": 1024}
    settings |= {"batch_size": 4, "micro_batch_size": 2, "model_dtype": "fp32", "gradient_checkpointing": False}
    settings |= {"attention": "sdpa", "device": "cuda", "verl": "0.9.1"}
    errors = {"moment_error": 0.001, "moment_tolerance": 0.01, "update_error": 0.02, "update_tolerance": 0.2}
    return {
        "environment": {
            "machine": machine,
            "versions": {"torch": "2", "triton": "3"},
            "date": "2026-01-01T",
            "commit": "abc",
        },
        "settings": settings,
        "check": {**errors, "met": True},
        "rows": [row("fsdp2", 100.0, 40.0), row("sparse_fsdp2", 80.0, 26.0)],
    }


def test_verdicts(report):
    found = {verdict["what"]: (verdict["ratio"], verdict["met"]) for verdict in reports.verdicts(report)}
    assert found == {"time": (0.8, True), "peak memory": (0.65, False)}
    text = reports.text(report)
    assert "met" in text and "missed" in text and "<= 0.6" in text and "26.00" in text


@pytest.mark.parametrize("settings", [{"shape": "tiny"}, {"device": "cpu"}])
def test_targets_are_those_of_the_3b_shape_on_gpus(settings, report):
    report["settings"] |= settings
    assert reports.verdicts(report) == []


def test_wrong_line_names_the_errors(report):
    report["check"] |= {"moment_error": 3.3}
    assert "3.3e+00, expected at most 1.0e-02" in reports.wrong_line(report["check"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--batch_size", "3"], "--batch_size 3 is no multiple of --micro_batch_size 2"),
        (["--gpus", "1"], "--gpus is 1, expected at least 2"),
        (["--micro_batch_size", "0"], "--micro_batch_size is 0"),
        pytest.param(
            [],
            "verl is not installed here: `make test-verl`",
            marks=pytest.mark.skipif(find_spec("verl") is not None, reason="needs an environment without verl"),
        ),
    ],
    ids=["batch", "gpus", "micro", "verl"],
)
def test_wrong_options(words: list[str], message: str, capsys):
    assert main(["bench", "verl", "--small", *words]) == 2
    assert message in capsys.readouterr().err
