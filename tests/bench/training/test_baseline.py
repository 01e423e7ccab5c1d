"""The end-to-end benchmark: its calls, one small run of each algorithm, and what it makes of wrong results."""

import copy
import dataclasses
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", reason="needs transformers: pip install 'sparse-opt[train]'")
pytest.importorskip("datasets", reason="needs datasets: pip install 'sparse-opt[train]'")

from sparse_opt import DeltaLog, MaskSet
from sparse_opt.bench import report, rows
from sparse_opt.bench.rows import Run
from sparse_opt.bench.training.baseline import main as baseline
from sparse_opt.bench.training.baseline import run as baseline_run
from sparse_opt.bench.training.baseline.results import MEMORY, SHARED_NORM_RTOL, result_rows, wrong_results
from sparse_opt.cli.main import main

SECTIONS = ["reference", "forward", "backward", "clip", "step"]
Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def bench(capfd, monkeypatch, tmp_path) -> Call:
    """`bench("dpo", "--small")` -> exit code, stdout and stderr, as a shell sees them; JSON goes to tmp_path."""
    monkeypatch.delenv("SPARSE_OPT_DEBUG", raising=False)

    def call(algorithm: str, *words: object) -> tuple[int, str, str]:
        output = [] if "--output" in words else ["--output", tmp_path / "baseline.json"]
        code = main(["bench", "baseline", algorithm, *map(str, [*words, *output])])
        return code, *capfd.readouterr()

    return call


@pytest.fixture
def in_this_process(run_here):
    run_here(baseline_run)


@pytest.mark.slow
def test_dpo_in_all_modes(tmp_path, bench, in_this_process):
    pytest.importorskip("peft", reason="modes lora and shira need peft: pip install 'sparse-opt[bench]'")
    code, out, err = bench(
        "dpo", "--small", "--n_steps", 4, "--n_warmup", 1, "--sequence_length", 32, "--work_dir", tmp_path
    )
    assert code == 0, err
    run = rows.read(tmp_path / "baseline.json")
    assert run.completed and set(run.environment) >= {"date", "commit", "machine", "versions"}
    found = {mode: metrics(run, mode=mode) for mode in ("dense", "sparse", "lora", "shira")}
    assert len(run.matching(algorithm="dpo", sequence_length=32)) == len(run.rows)
    for mode, of_mode in found.items():
        whole = of_mode["whole step"]
        assert whole.p20 <= whole.value <= whole.p80 and whole.n == 3
        assert all(of_mode[name].value > 0 for name in (*SECTIONS, "CPU time"))
        assert "peak memory" not in of_mode and "launched" not in of_mode  # no GPU
        assert mode == "dense" or report.ratio(run, whole, "dense") > 0
    numel = found["dense"]["whole step"].case["numel"]
    trained = {mode: of_mode["values trained"].value for mode, of_mode in found.items()}
    assert trained["dense"] == numel and trained["sparse"] == pytest.approx(0.025 * numel, rel=0.02)
    held = {mode: {row.metric: row.value for row in run.matching(mode=mode) if row.suite == MEMORY} for mode in found}
    for mode in ("lora", "shira"):
        assert (held[mode]["grad"], held[mode]["state"]) == (2 * trained[mode], 4 * trained[mode])
        assert held[mode]["weights"] == 2 * (numel + trained[mode]) and "reference" not in held[mode]
    # Of each layer: q, o 256 x 256; k, v 128 x 256; gate, up, down 512 x 256.
    assert found["shira"]["whole step"].case["shira_rank"] == 1
    assert trained["shira"] == 2 * (2 * (256 + 256) + 2 * (128 + 256) + 3 * (512 + 256))
    assert held["shira"]["indices"] == 8 * trained["shira"]
    assert held["dense"]["reference"] == held["dense"]["weights"] == 2 * numel
    assert (held["sparse"]["grad"], held["sparse"]["state"]) == (2 * trained["sparse"], 8 * trained["sparse"])
    assert "x dense" in out and [path.name for path in tmp_path.iterdir()] == ["baseline.json"]


@pytest.mark.slow
def test_experts_are_compared_with_attention_alone(tmp_path, bench, in_this_process):
    words = ("--shape", "tiny_moe", "--density", 0.25, "--lean", "--gradient_checkpointing", "--sequence_length", 32)
    code, out, err = bench(
        "dpo", "--device", "cpu", *words, "--modes", "tiles,attention,experts", "--experts", 2, "--n_steps", 3,
        "--n_warmup", 0,
    )  # fmt: skip
    assert code == 0, err
    run = rows.read(tmp_path / "baseline.json")
    experts, attention = (metrics(run, mode=mode) for mode in ("experts", "attention"))
    assert run.peer(experts["backward"], "without experts") == attention["backward"]
    run.environment["machine"]["gpu"] = {"name": "NVIDIA H200"}
    run.rows += [dataclasses.replace(mode["backward"], metric="kernels, backward") for mode in (experts, attention)]
    (verdict,) = [verdict for verdict in report.judge(run) if verdict.row.suite == "baseline"]
    assert verdict.found == experts["backward"].value / attention["backward"].value and "<= 1.05" in verdict.target
    assert "x without experts" in out and experts["backward"].case["experts"] == 2
    # Of each of two layers, two of eight experts, of three matrices of 256 x 128.
    difference = experts["values trained"].value - attention["values trained"].value
    assert difference == 2 * 2 * 3 * 256 * 128
    assert experts["gradients by tiles"].value == attention["gradients by tiles"].value + 2 * 2
    # bf16 moments, and base weights
    assert (experts["state"].value, experts["base"].value) == tuple(n * experts["values trained"].value for n in (4, 2))


LOGGED = ("dpo", "--small", "--delta_log", "--n_steps", 2, "--n_warmup", 1, "--sequence_length", 16)


def test_a_log_of_every_step_is_timed(tmp_path, bench, in_this_process, needs_extension):
    words = ("--modes", "dense,sparse", "--learning_rate", 1e-4, "--work_dir", tmp_path / "work")
    code, out, err = bench(*LOGGED, *words)
    assert code == 0, err
    assert list((tmp_path / "work").iterdir()) == [] and "slower by, mean" in out
    run = rows.read(tmp_path / "baseline.json")
    for mode in ("dense", "sparse"):
        found = metrics(run, mode=mode)
        assert found["step"].n == found["logged step"].n == found["append, host"].n == 6
        difference = found["logged step"].value - found["step"].value
        assert found["slower by, median"].value == pytest.approx(difference)
        assert 0 < found["changed"].value <= (1 if mode == "dense" else 0.026)
        assert found["a step in the log"].value > 0 and found["step"].case["file_system"]


def test_a_log_that_is_not_the_model_is_an_error(monkeypatch, bench, in_this_process, needs_extension):
    monkeypatch.setattr(DeltaLog, "step_of", lambda self, model: None)
    code, _, err = bench(*LOGGED, "--modes", "dense")
    assert code == 1 and "the model has the weights of step None, logged " in err


def metrics(run: Run, **case: Any) -> dict[str, rows.Row]:
    return {row.metric: row for row in run.matching(**case)}


@pytest.mark.slow
def test_dpo_with_shared_prompts(tmp_path, bench, in_this_process):
    code, out, err = bench(
        "dpo", "--small", "--modes", "dense,tiles", "--share_prompts", "--prompt_share", 0.75, "--sequence_length", 32,
        "--n_steps", 2, "--n_warmup", 0,
    )  # fmt: skip
    assert code == 0, err
    run = rows.read(tmp_path / "baseline.json")
    for mode in ("dense", "tiles"):
        whole = metrics(run, mode=mode, share_prompts=True)["whole step"]
        assert run.peer(whole, "separate rows") == metrics(run, mode=mode, share_prompts=None)["whole step"]
        assert whole.case["prompt_share"] == 0.75
    assert "x separate rows" in out


@pytest.mark.slow
def test_grpo_with_tiles(tmp_path, bench, run_here):
    # The first mode has a process of its own, as in a benchmark.
    run_here(baseline_run, unless=lambda command: json.loads(Path(command[3]).read_text())["name"] == "tiles")
    sizes = ("--sequence_length", 20, "--max_new_tokens", 8, "--n_generations", 4)
    code, _, err = bench(
        "grpo", "--small", "--modes", "tiles,dense", "--n_steps", 2, "--n_warmup", 0, *sizes,
        "--gradient_checkpointing",
    )  # fmt: skip
    assert code == 0, err
    run = rows.read(tmp_path / "baseline.json")
    for mode, pattern in (("tiles", "tile64"), ("dense", None)):
        found = metrics(run, mode=mode)
        assert {"rollout", *SECTIONS} <= set(found) and found["rollout"].case.get("pattern") == pattern
        assert found["rollout"].case["n_generations"] == 4
    # Of each layer gate, up and down, one tile of 32 each, and the output layer; 2.5 % of the others is no tile.
    assert metrics(run, mode="tiles")["gradients by tiles"].value == 1 + 2 * 3


def test_each_mode_has_its_mask(monkeypatch, bench):
    masks = {}

    def load(module, name, job, *others):
        if name != "dense":
            masks[name] = MaskSet.load(job["mask"])

    monkeypatch.setattr(baseline, "run_in_process", load)
    bench("dpo", "--small", "--modes", "dense,sparse,tiles", "--density", 0.4, "--tile_pattern", "tile128")
    assert {mode: mask.pattern for mode, mask in masks.items()} == {"sparse": "element", "tiles": "tile128"}
    assert all(0.3 < mask.density < 0.5 for mask in masks.values())


@pytest.mark.parametrize(
    ("package", "words"),
    [
        ("peft", ["--modes", "dense,shira"]),
        ("bitsandbytes", ["--modes", "adamw8bit"]),
        ("galore_torch", ["--modes", "galore"]),
    ],
)
def test_a_package_that_is_missing(monkeypatch, bench, package, words):
    from importlib import util

    found = util.find_spec
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setattr(util, "find_spec", lambda name, *rest: None if name == package else found(name, *rest))
    code, _, err = bench("dpo", "--small", *words)
    assert code == 2
    assert len(err.splitlines()) == 1
    assert f"{package}, which is not installed: pip install 'sparse-opt[" in err


def result(mode: str, loss: float = math.log(2), *, on_gpu: bool = False, **values: Any) -> dict[str, Any]:
    """What a mode's process returns: three steps, of which the first takes 9 s, and the others 0.1 and 0.2 s."""
    step = {"loss": loss, "grad_norm": 1.0, "host_s": 0.079, "cpu_s": 0.1}
    step |= {"section_s": {"forward": 0.08, "step": 0.02}}
    return {
        "mode": mode,
        "n_trained": 10,
        "n_tiled": 0,
        "data_digest": "d",
        "peak_memory_bytes": 2**34 if on_gpu else None,
        "peak_reserved_bytes": 2**34 if on_gpu else None,
        "bytes": {"weights": 2**32, "grad": 2**31, "base": 0},
        "fits": True,
        "steps": [copy.deepcopy(step) | {"step_s": seconds} for seconds in (9.0, 0.1, 0.2)],
        **values,
    }


def test_rows_leave_the_warm_up_out():
    run = Run({})
    run.rows += result_rows(result("dense", on_gpu=True, kernel_s={"": 0.09, "backward": 0.04}), {"mode": "dense"}, 1)
    run.rows += result_rows(
        result("sparse", on_gpu=True, kernel_s={"": 0.06, "backward": 0.03}, peak_memory_bytes=2**33),
        {"mode": "sparse", "pattern": "element"},
        1,
    )
    sparse = metrics(run, mode="sparse")
    assert (sparse["whole step"].value, sparse["whole step"].n) == (pytest.approx(150), 2)
    ratios = {name: report.ratio(run, sparse[name], "dense") for name in ("whole step", "peak memory", "kernels")}
    assert ratios == {"whole step": 1.0, "peak memory": 0.5, "kernels": pytest.approx(2 / 3)}
    assert sparse["activations and scratch"].value == 2**33 - 2**32 - 2**31 and "base" not in sparse


FIRST = {"loss": math.log(2), "grad_norm": 1.0, "ratio_error": 0.0, "k3": 0.0}


@pytest.mark.parametrize(
    ("algorithm", "first", "message"),
    [
        ("dpo", {"loss": 0.7}, "mode sparse begins at a DPO loss of 0.7"),
        ("dpo", {"loss": math.nan}, "mode sparse begins at a DPO loss of nan"),
        ("dpo", {"grad_norm": 0.0}, "mode sparse has a gradient norm of 0 in step 1"),
        ("grpo", {"ratio_error": 0.1}, "mode sparse begins with ratios off by 0.1, expected 1"),
        ("grpo", {"k3": 0.1}, "mode sparse begins at a divergence of 0.1, expected 0"),
        ("dpo", {}, ""),
    ],
)
def test_wrong_first_steps(algorithm, first, message):
    one = result("sparse")
    one["steps"][0] |= FIRST | first
    lines = wrong_results(algorithm, [one])
    assert [line[: len(message)] for line in lines] == ([message] if message else [])


def test_modes_are_compared_with_each_other():
    dense, tiles, shared = result("dense"), result("tiles", n_tiled=1), result("tiles, shared prompts", n_tiled=1)
    assert wrong_results("dpo", [dense, tiles, shared]) == []
    assert "different data" in wrong_results("dpo", [dense, {**tiles, "data_digest": "e"}])[0]
    assert "no weight gradient by tiles" in wrong_results("dpo", [{**tiles, "n_tiled": 0}])[0]
    shared["steps"][0]["grad_norm"] = 1 + 2 * SHARED_NORM_RTOL
    (line,) = wrong_results("dpo", [tiles, shared])
    assert line == "mode tiles, shared prompts begins with a gradient norm of 1.3, expected 1.0"


def test_a_wrong_result_and_a_mode_that_failed_end_with_1(monkeypatch, tmp_path, bench):
    waiting = iter([result("dense"), result("sparse", 0.7), None])
    monkeypatch.setattr(baseline, "run_in_process", lambda *args: next(waiting))
    code, _, err = bench("dpo", "--small", "--modes", "dense,sparse,tiles", "--n_steps", 3, "--n_warmup", 1)
    assert code == 1
    assert err.splitlines() == [
        f"WRONG RESULT: mode sparse begins at a DPO loss of 0.7, expected ln 2 = {math.log(2):.6f}",
        "not measured: mode tiles, whose run failed",
    ]
    assert not rows.read(tmp_path / "baseline.json").completed
