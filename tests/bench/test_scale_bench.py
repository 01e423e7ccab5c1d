"""The benchmark of model sizes: a small run, cases that do not fit, its report, and wrong options."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="needs transformers: pip install 'sparse-opt[train]'")
pytest.importorskip("datasets", reason="needs datasets: pip install 'sparse-opt[train]'")

from sparse_opt.bench import rows, scale
from sparse_opt.bench.models import masked_shapes, model_config, n_parameters
from sparse_opt.bench.rows import Run
from sparse_opt.bench.scale import Case
from sparse_opt.cli.main import main


@pytest.fixture
def case() -> Case:
    return Case(
        shape="tiny_qwen2",
        method="lean",
        base="bf16",
        checkpointing=True,
        compile=False,
        precomputed_reference=False,
        sequence_length=32,
        density=0.05,
        pattern="tile64",
        lora_rank=4,
        learning_rate=1e-6,
        n_steps=2,
        seed=0,
        device="cpu",
        limit_gib=None,
    )


def test_a_small_run_writes_rows_and_keeps_those_of_the_file(tmp_path, run_here, capsys):
    run_here(scale)
    output = tmp_path / "scale.json"
    words = ["bench", "scale", "--small", "--n_steps", "2", "--density", "0.05", "--output", str(output)]
    assert main([*words, "--methods", "lean,dense", "--checkpointing", "on"]) == 0
    again = ["--shapes", "tiny", "--methods", "lean", "--checkpointing", "on,off", "--resume"]
    assert main([*words, *again]) == 0
    run = rows.read(output)
    names = ("shape", "method", "checkpointing")
    measured = [tuple(row.case.get(name, False) for name in names) for row in run.rows if row.metric == "step"]
    assert sorted(measured) == [
        ("tiny", "dense", True),
        ("tiny", "lean", False),
        ("tiny", "lean", True),
        ("tiny_qwen2", "dense", True),
        ("tiny_qwen2", "lean", True),
    ]
    assert all(row.n == 1 for row in run.rows) and run.completed
    assert "weights, MiB" in capsys.readouterr().out


def test_least_bytes_are_those_that_a_step_holds(case):
    row = scale.run(case)
    held = {name: n for name, n in row["bytes"].items() if name != "indices"}
    active = row["n_trained"] / sum(math.prod(shape) for shape in masked_shapes(case.config).values())  # in whole tiles
    assert replace(case, density=active).least_bytes() == pytest.approx(sum(held.values()), abs=8)
    dense = scale.run(replace(case, method="dense"))
    assert replace(case, method="dense").least_bytes() == sum(dense["bytes"].values())


@pytest.mark.parametrize("method", ["lora", "lean"])
def test_an_nf4_base_holds_less(method, case):
    pytest.importorskip("bitsandbytes", reason="needs bitsandbytes: pip install 'sparse-opt[test]'")
    pytest.importorskip("peft", reason="needs peft: pip install 'sparse-opt[test]'")
    case = replace(case, method=method)
    row, plain = scale.run(replace(case, base="nf4")), scale.run(case)
    assert row["bytes"]["weights"] < plain["bytes"]["weights"]
    assert replace(case, base="nf4").least_bytes() <= sum(row["bytes"].values())
    assert scale.wrong_results(row, replace(case, base="nf4")) == []


@pytest.mark.parametrize("method", ["dense", "lora", "lean"])
def test_a_precomputed_reference_gives_the_same_losses_for_less_memory(method, case):
    case = replace(case, method=method, learning_rate=1e-3, n_steps=3)
    found = [scale.run(replace(case, precomputed_reference=flag)) for flag in (False, True)]
    losses = [[step["loss"] for step in row["steps"]] for row in found]
    assert losses[0] == losses[1] and len(set(losses[0])) == 3
    sections = [set(row["steps"][0]["section_s"]) for row in found]
    assert sections[0] - sections[1] == {"reference"}
    held = [sum(row["bytes"].values()) for row in found]
    assert held[0] > held[1] if method != "lora" else held[0] == held[1]
    least = [replace(case, precomputed_reference=flag).least_bytes() for flag in (False, True)]
    assert least[0] - least[1] == pytest.approx(held[0] - held[1], rel=0.2)  # in whole tiles


def test_lean_has_bf16_moments_and_the_step_begins_at_ln_2(case):
    lean = scale.run(case)
    assert lean["bytes"]["state"] == 4 * lean["n_trained"]
    assert lean["bytes"]["grad"] == lean["bytes"]["base"] == 2 * lean["n_trained"]
    assert lean["steps"][0]["loss"] == pytest.approx(math.log(2), abs=scale.FIRST_LOSS_ATOL)


def test_a_case_that_runs_out_of_memory_is_a_row(case, monkeypatch):
    def run_out(*args: Any) -> Any:
        raise torch.OutOfMemoryError("Tried to allocate 2.00 GiB. GPU 0 has less.")

    monkeypatch.setattr(scale, "_measure", run_out)
    row = scale.run(case)
    assert not row["fits"]
    assert row["needs_more_than_bytes"] == case.least_bytes()


def test_shapes_are_those_of_the_published_models():
    # As their model cards count.
    counted = {name: n_parameters(model_config(name, 1)) for name in ("3b", "8b", "14b", "32b", "qwen3_30b_a3b", "70b")}
    assert list(counted.values()) == [
        *(3_212_749_824, 8_030_261_248, 14_770_033_664, 32_763_876_352, 30_532_122_624, 70_553_706_496),
    ]


def result(peak_gib: float = 60.0, **values: Any) -> dict[str, Any]:
    peak = int(peak_gib * 2**30)
    return {
        "fits": True,
        "bytes": {"weights": 2**30},
        "n_tiled": 3,
        "peak_memory_bytes": peak,
        "peak_reserved_bytes": peak,
        "build_peak_bytes": peak,
        "steps": [{"loss": math.log(2), "grad_norm": 1.0, "step_s": 1.0}] * 3,
        **values,
    }


def test_rows_of_cases_that_fit_and_that_do_not(case):
    run = Run({}, scale.result_rows(result(40.0), case))
    assert {row.metric: row.value for row in run.rows}["peak reserved"] == 40 * 2**30
    run.rows += scale.result_rows({"fits": False, "needs_more_than_bytes": 2**38}, replace(case, method="dense"))
    (row,) = run.matching(method="dense")
    assert (row.metric, row.value) == ("does not fit: more than", 2**38)
    assert "lora_rank" not in row.case and "density" not in row.case


def test_wrong_results_are_named(case):
    step = {"loss": math.log(2), "grad_norm": 1.0, "step_s": 1.0}
    assert scale.wrong_results(result(), case) == []
    for wrong, message in (
        ({"steps": [step | {"loss": 0.5}]}, "expected ln 2"),
        ({"steps": [step | {"grad_norm": 0.0}]}, "norm of 0"),
        ({"n_tiled": 0}, "by tiles"),
    ):
        (line,) = scale.wrong_results(result(**wrong), case)
        assert message in line


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--shapes", "32b"], "--shapes 32b: expected some of tiny, tiny_qwen2"),
        (["--sequence_length", "8"], "--sequence_length is 8, expected at least 16"),
        (["--n_steps", "1"], "--n_steps is 1, expected at least 2"),
    ],
)
def test_wrong_options_end_before_any_work(words, message, tmp_path, capsys):
    assert main(["bench", "scale", "--small", "--output", str(tmp_path / "o.json"), *words]) == 2
    assert message in capsys.readouterr().err
