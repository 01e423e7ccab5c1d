"""The benchmark of model sizes: small runs, the memory that they take, and cases that do not fit."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="needs transformers: pip install 'sparse-opt[train]'")
pytest.importorskip("datasets", reason="needs datasets: pip install 'sparse-opt[train]'")

from sparse_opt.bench import rows, scale
from sparse_opt.bench.models import model_config, n_parameters
from sparse_opt.bench.training.baseline import main as baseline
from sparse_opt.bench.training.baseline import run as baseline_run
from sparse_opt.bench.training.baseline.modes import Job, least_bytes
from sparse_opt.bench.training.baseline.results import wrong_results
from sparse_opt.cli.main import main
from sparse_opt.masks import MaskSet


@pytest.fixture
def job(tmp_path, monkeypatch) -> Callable[..., Job]:
    """`job(mode, *words, **changes)`: that of `sparse-opt bench scale --modes MODE WORDS`, on a tiny model."""

    def make(mode: str, *words: object, **changes: Any) -> Job:
        jobs = []

        def keep(module: str, name: str, given: dict[str, Any], *others: Any) -> None:
            if given["mask"] is not None:
                given |= {"mask": shutil.copy(given["mask"], tmp_path)}
            jobs.append(Job(**given | {"dataset": shutil.copy(given["dataset"], tmp_path)}))

        monkeypatch.setattr(baseline, "run_in_process", keep)
        given = ["--small", "--n_steps", 3, "--density", 0.05, "--lora_rank", 4, "--gradient_checkpointing"]
        given += ["--modes", mode, "--shapes", "tiny_qwen2", "--output", tmp_path / "jobs.json", *words]
        scale.main(list(map(str, given)))
        return replace(jobs[0], **changes)

    return make


def test_a_small_run_writes_rows_and_keeps_those_of_the_file(tmp_path, run_here, capsys):
    run_here(baseline_run)
    output = tmp_path / "scale.json"
    words = ["bench", "scale", "--small", "--n_steps", "2", "--density", "0.05", "--output", str(output)]
    assert main([*words, "--modes", "tiles,dense", "--gradient_checkpointing", "--shapes", "tiny,tiny_moe"]) == 0
    assert main([*words, "--shapes", "tiny", "--modes", "tiles", "--resume"]) == 0
    run = rows.read(output)
    names = ("shape", "mode", "gradient_checkpointing")
    measured = [tuple(row.case.get(name, False) for name in names) for row in run.rows if row.metric == "whole step"]
    assert sorted(measured) == [
        ("tiny", "dense", True),
        ("tiny", "tiles", False),
        ("tiny", "tiles", True),
        ("tiny_moe", "dense", True),
        ("tiny_moe", "tiles", True),
    ]
    assert all(row.n == 1 for row in run.rows if row.metric == "whole step") and run.completed
    assert all("density" not in row.case and "lean" not in row.case for row in run.matching(mode="dense"))
    assert "weights, MiB" in capsys.readouterr().out


def test_least_bytes_are_those_that_a_step_holds(job):
    for mode in ("tiles", "dense"):
        one = job(mode)
        held = baseline_run.run(one)["bytes"]
        mask = MaskSet.load(one.mask) if one.mask else None
        assert least_bytes(one, mask) == pytest.approx(sum(n for name, n in held.items() if name != "indices"), abs=8)


@pytest.mark.parametrize(("mode", "shape"), [("lora", "tiny_qwen2"), ("tiles", "tiny_qwen2"), ("tiles", "tiny_moe")])
def test_an_nf4_base_holds_less(mode, shape, job):
    pytest.importorskip("bitsandbytes", reason="needs bitsandbytes: pip install 'sparse-opt[test]'")
    pytest.importorskip("peft", reason="needs peft: pip install 'sparse-opt[test]'")
    one = job(mode, "--base", "nf4", "--shapes", shape)
    found, plain = baseline_run.run(one), baseline_run.run(replace(one, base="bf16"))
    assert found["bytes"]["weights"] < plain["bytes"]["weights"]
    assert least_bytes(one, MaskSet.load(one.mask) if one.mask else None) <= sum(found["bytes"].values())
    assert wrong_results("dpo", [found], 0.01) == []


@pytest.mark.parametrize("mode", ["dense", "lora", "tiles"])
def test_a_precomputed_reference_gives_the_same_losses_for_less_memory(mode, job):
    jobs = [job(mode, learning_rate=1e-3, precomputed_reference=flag) for flag in (False, True)]
    found = [baseline_run.run(one) for one in jobs]
    losses = [[step["loss"] for step in row["steps"]] for row in found]
    assert losses[0] == losses[1] and len(set(losses[0])) == 3
    sections = [set(row["steps"][0]["section_s"]) for row in found]
    assert sections[0] - sections[1] == {"reference"}
    held = [sum(row["bytes"].values()) for row in found]
    assert held[0] > held[1] if mode != "lora" else held[0] == held[1]
    least = [least_bytes(one, MaskSet.load(one.mask) if one.mask else None) for one in jobs]
    assert least[0] - least[1] == pytest.approx(held[0] - held[1], rel=0.01)


def test_lean_has_bf16_moments_and_the_step_begins_at_ln_2(job):
    lean = baseline_run.run(job("tiles"))
    assert lean["bytes"]["state"] == 4 * lean["n_trained"]
    assert lean["bytes"]["grad"] == lean["bytes"]["base"] == 2 * lean["n_trained"]
    assert wrong_results("dpo", [lean], 0.01) == []


def test_a_case_that_runs_out_of_memory_is_a_row(job, monkeypatch, tmp_path):
    def run_out(*args: Any) -> Any:
        raise torch.OutOfMemoryError("Tried to allocate 2.00 GiB. GPU 0 has less.")

    monkeypatch.setattr(baseline_run, "_measure", run_out)
    one = job("dense")
    found = baseline_run.run(one)
    assert not found["fits"] and found["needs_more_than_bytes"] == least_bytes(one, None)
    monkeypatch.setattr(baseline, "run_in_process", lambda *args: found)
    words = ["--small", "--modes", "dense", "--shapes", "tiny_qwen2", "--output", str(tmp_path / "scale.json")]
    assert main(["bench", "scale", *words]) == 0
    (row,) = rows.read(tmp_path / "scale.json").rows
    assert (row.metric, row.value) == ("does not fit: more than", least_bytes(one, None))


def test_shapes_are_those_of_the_published_models():
    # As their model cards count.
    counted = {name: n_parameters(model_config(name, 1)) for name in ("3b", "8b", "14b", "32b", "qwen3_30b_a3b", "70b")}
    assert list(counted.values()) == [
        *(3_212_749_824, 8_030_261_248, 14_770_033_664, 32_763_876_352, 30_532_122_624, 70_553_706_496),
    ]
