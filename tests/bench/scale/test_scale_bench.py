"""The benchmark of model sizes: a small run, cases that do not fit, its report, and wrong options."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="needs transformers: pip install 'sparse-opt[train]'")
pytest.importorskip("datasets", reason="needs datasets: pip install 'sparse-opt[train]'")

from sparse_opt.bench.scale import report as reports
from sparse_opt.bench.scale import run as scale_run
from sparse_opt.bench.scale.cases import SHAPES, Case, n_parameters
from sparse_opt.cli.main import main


@pytest.fixture
def case() -> Case:
    return Case(
        shape="tiny_qwen2",
        method="lean",
        checkpointing=True,
        compile=False,
        cuda_graphs=False,
        precomputed_reference=False,
        sequence_length=32,
        density=0.05,
        pattern="tile64",
        exclude=None,
        lora_rank=4,
        learning_rate=1e-6,
        n_steps=2,
        seed=0,
        device="cpu",
        limit_gib=None,
    )


def test_a_small_run_writes_rows_and_keeps_those_of_the_file(tmp_path, run_here, capsys):
    pytest.importorskip("matplotlib", reason="--plot needs matplotlib: pip install 'sparse-opt[plot]'")
    run_here(scale_run)
    output, picture = tmp_path / "scale.json", tmp_path / "scale.png"
    words = ["bench", "scale", "--small", "--n_steps", "2", "--density", "0.05", "--output", str(output)]
    assert main([*words, "--methods", "lean,dense", "--checkpointing", "on", "--plot", str(picture)]) == 0
    out = capsys.readouterr().out
    assert "checkpointed" in out and picture.read_bytes().startswith(b"\x89PNG")
    assert main([*words, "--shapes", "tiny", "--methods", "lean", "--checkpointing", "on,off"]) == 0
    report = json.loads(output.read_text())
    measured = [tuple(row["case"][name] for name in ("shape", "method", "checkpointing")) for row in report["rows"]]
    assert sorted(measured) == [
        ("tiny", "dense", True),
        ("tiny", "lean", False),
        ("tiny", "lean", True),
        ("tiny_qwen2", "dense", True),
        ("tiny_qwen2", "lean", True),
    ]
    for row in report["rows"]:
        assert row["fits"] and len(row["steps"]) == 2
        assert (row["n_tiled"] > 0) == (row["case"]["method"] == "lean")


def test_least_bytes_are_those_that_a_step_holds(case):
    row = scale_run.run(case)
    held = {name: n for name, n in row["bytes"].items() if name != "indices"}
    active = row["n_trained"] / sum(math.prod(shape) for shape in case.masked().values())  # in whole tiles
    assert replace(case, density=active).least_bytes() == pytest.approx(sum(held.values()), abs=8)
    dense = scale_run.run(replace(case, method="dense"))
    assert dense["least_bytes"] == sum(dense["bytes"].values())


@pytest.mark.parametrize("method", ["dense", "lora", "lean"])
def test_a_precomputed_reference_gives_the_same_losses_for_less_memory(method, case):
    case = replace(case, method=method, learning_rate=1e-3, n_steps=3)
    rows = [scale_run.run(replace(case, precomputed_reference=flag)) for flag in (False, True)]
    losses = [[step["loss"] for step in row["steps"]] for row in rows]
    assert losses[0] == losses[1] and len(set(losses[0])) == 3
    sections = [set(row["steps"][0]["section_s"]) for row in rows]
    assert sections[0] - sections[1] == {"reference"}
    held = [sum(row["bytes"].values()) for row in rows]
    assert held[0] > held[1] if method != "lora" else held[0] == held[1]
    assert rows[0]["least_bytes"] - rows[1]["least_bytes"] == pytest.approx(
        held[0] - held[1], rel=0.2
    )  # in whole tiles


def test_lean_has_bf16_moments_and_the_step_begins_at_ln_2(case):
    lean, sparse = scale_run.run(case), scale_run.run(replace(case, method="sparse"))
    assert 2 * lean["bytes"]["state"] == sparse["bytes"]["state"]
    assert lean["bytes"]["grad"] == lean["bytes"]["base"] == 2 * lean["n_trained"]
    assert lean["steps"][0]["loss"] == pytest.approx(math.log(2), abs=reports.FIRST_LOSS_ATOL)


def test_excluded_matrices_are_not_trained(case):
    every, fewer = case.masked(), replace(case, exclude=["*embed_tokens*"]).masked()
    assert set(every) - set(fewer) == {"model.embed_tokens.weight"}
    assert replace(case, exclude=["*embed_tokens*"]).least_bytes() < case.least_bytes()


def test_a_case_that_cannot_fit_is_not_tried(case, monkeypatch):
    monkeypatch.setattr(scale_run, "_measure", lambda *args: pytest.fail("tried"))
    row = scale_run.run(replace(case, limit_gib=0.001))
    assert not row["fits"] and row["needs_more_than_bytes"] == case.least_bytes() > 0.001 * 2**30


def test_a_case_that_runs_out_of_memory_is_a_row(case, monkeypatch):
    def run_out(*args: Any) -> Any:
        raise torch.OutOfMemoryError("Tried to allocate 2.00 GiB. GPU 0 has less.")

    monkeypatch.setattr(scale_run, "_measure", run_out)
    row = scale_run.run(case)
    assert not row["fits"] and row["error"] == "Tried to allocate 2.00 GiB"
    assert row["needs_more_than_bytes"] == case.least_bytes()


def test_shapes_are_those_of_the_published_models():
    # As their model cards count.
    counted = {name: n_parameters(name) for name in ("3b", "8b", "14b", "32b", "70b")}
    assert list(counted.values()) == [3_212_749_824, 8_030_261_248, 14_770_033_664, 32_763_876_352, 70_553_706_496]
    assert SHAPES["32b"].config(4096).max_position_embeddings == 4096


def row_of(case: Case, peak_gib: float | None = 60.0, **values: Any) -> dict[str, Any]:
    peak = None if peak_gib is None else int(peak_gib * 2**30)
    return {
        "case": vars(case),
        "device_name": "G",
        "commit": "0123456789",
        "fits": True,
        "bytes": {"weights": 2**30},
        "n_tiled": 3,
        "peak_memory_bytes": peak,
        "peak_reserved_bytes": peak,
        "steps": [{"loss": math.log(2), "grad_norm": 1.0, "step_s": 1.0}] * 2,
        **values,
    }


def test_the_largest_model_of_a_gpu(case):
    rows = [
        row_of(replace(case, shape="14b"), 40.0),
        row_of(replace(case, shape="32b"), 70.0),
        row_of(replace(case, shape="14b", method="lora"), 79.0),
        row_of(replace(case, shape="32b", method="dense"), fits=False, needs_more_than_bytes=2**38),
    ]
    assert reports.largest(rows, 78.0) == {"lean": "32b, 32 tokens, 70.0 GiB"}
    assert set(reports.largest(rows, 139.0)) == {"lean", "lora"}
    text = reports.text({"rows": rows, "not_begun": ["32b lora"]})
    assert "does not fit: more than 256.0" in text and "not begun, because time was up: 32b lora" in text


def test_wrong_results_are_reported(case):
    rows = [
        row_of(case, steps=[{"loss": 0.5, "grad_norm": 1.0, "step_s": 1.0}] * 2),
        row_of(case, steps=[{"loss": math.log(2), "grad_norm": 0.0, "step_s": 1.0}] * 2),
        row_of(case, n_tiled=0),
        row_of(case),
    ]
    lines = reports.wrong_lines({"rows": rows, "failed": ["32b lora"]})
    assert [line.split(" ", 3)[-1][:20] for line in lines[:1]] == ["run failed"]
    assert len(lines) == 4 and "expected ln 2" in lines[1] and "norm of 0" in lines[2] and "by tiles" in lines[3]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--shapes", "32b"], "--shapes 32b: expected some of tiny, tiny_qwen2"),
        (["--methods", "qlora"], "--methods qlora: expected some of dense, lora, sparse, lean"),
        (["--checkpointing", "yes"], "--checkpointing yes: expected some of on, off"),
        (["--sequence_length", "8"], "--sequence_length is 8, expected at least 16"),
        (["--cuda_graphs"], "--cuda_graphs needs a GPU and --methods of sparse,lean"),
        (["--n_steps", "1"], "--n_steps 1 leaves nothing after the 1 steps of the warm-up"),
        (["--limit_gib", "-1"], "--limit_gib is -1.0, expected at least 0"),
    ],
)
def test_wrong_options_end_before_any_work(words, message, tmp_path, capsys):
    assert main(["bench", "scale", "--small", "--output", str(tmp_path / "o.json"), *words]) == 2
    assert message in capsys.readouterr().err
