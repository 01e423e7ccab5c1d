"""Made-up rows of the study's results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from sparse_opt.bench.study.plan import Part, Run, first_rates
from sparse_opt.bench.study.results import Results
from sparse_opt.bench.study.schedule import runs_left

SETTINGS = {
    "learning_rates": {"grpo": 1e-5, "sft": 1e-5, "dpo": 1e-6, "rft": 1e-5},
    "factors": [0.3, 1, 3],
    "sgd_rate": 0.3,
    "seconds": {"grpo": 100, "sft": 50, "dpo": 60, "rft": 50},
    "tile": "tile64",
    "lora": {"ranks": [8, 1, 64], "percent": 0.2269},
    "grpo": {"n_steps": 50},
}


@pytest.fixture
def settings() -> dict[str, Any]:
    return SETTINGS


@pytest.fixture
def results(tmp_path) -> Results:
    return Results(tmp_path / "results.jsonl", {"settings": "digest"})


@pytest.fixture
def measured() -> Callable[..., dict[str, Any]]:
    """``measured(accuracy, **others)``: what a run measures."""

    def row(accuracy: float = 0.5, **others: Any) -> dict[str, Any]:
        return {
            "accuracy": accuracy,
            "tune_accuracy": accuracy,
            "tune_stderr": 0.0,
            "changed_bf16": 0.2,
            "changed_fp32": 0.9,
            "changed_1e-5": 0.3,
            "changed_by_component": {"norms": 0.1},
            "changed_by_layer": {"0": 0.25, "none": 0.125},
            "ranks": {"numerical": 0.99, "numerical_min": 0.9, "effective": 0.5},
            "peak_memory_bytes": 3 * 10**9,
            "optimizer_bytes": 5 * 10**6,
            "perplexity": 2.0,
            "others": {},
            "step_time_s": 0.5,
            "seconds": 2.0,
            "jobs": 1,
            **others,
        }

    return row


@pytest.fixture
def finish(measured) -> Callable[..., None]:
    """``finish(results, parts, row)``: add all runs of the parts, in the order of the study.

    ``row(run)`` is what a run measures. A run at another rate than the middle one of the first is worse in tuning.
    """

    def do(results: Results, parts: Sequence[Part], row: Callable[[Run], dict[str, Any]]) -> None:
        while runs := [run for part in parts for run in runs_left(SETTINGS, part, results)]:
            for run in dict.fromkeys(runs):
                found = measured(**row(run))
                if run.learning_rate != first_rates(SETTINGS, subject_of(run))[1]:
                    found["tune_accuracy"] -= 0.05
                results.add(run, found)

    return do


def subject_of(run: Run) -> Any:
    from sparse_opt.bench.study.plan import Subject

    return Subject(run.algorithm, run.task, run.trained)
