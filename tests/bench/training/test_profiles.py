"""The comparison of RFT's profiles: what is measured, what counts as held accuracy, and one small run."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", reason="needs transformers: pip install 'sparse-opt[train]'")
pytest.importorskip("datasets", reason="needs datasets: pip install 'sparse-opt[train]'")

from sparse_opt.bench.training.profiles import main as profiles
from sparse_opt.bench.training.profiles import run as profiles_run
from sparse_opt.bench.training.profiles.main import (
    make_configurations,
    order_of_runs,
    parse_settings,
    plain_values,
    profile_values,
    relative_to,
)
from sparse_opt.bench.training.profiles.report import Configuration, accuracy_check, failures, summarized, text
from sparse_opt.bench.training.profiles.run import STAGES, configured, rows_for
from sparse_opt.cli.main import main
from sparse_opt.trainers.profiles import NAMES
from sparse_opt.trainers.rft import train as rft


@pytest.fixture
def bench(capfd, monkeypatch, tmp_path):
    """`bench("--repeats", 1)` -> exit code, stdout and stderr; JSON goes to tmp_path."""
    monkeypatch.delenv("SPARSE_OPT_DEBUG", raising=False)

    def call(*words: object) -> tuple[int, str, str]:
        code = main(["bench", "profiles", "--output", str(tmp_path / "profiles.json"), *map(str, words)])
        return code, *capfd.readouterr()

    return call


def test_plain_has_none_of_what_profiles_set():
    plain = plain_values("fp32")
    for stage in STAGES:
        config_class, _ = rft.STAGES[stage]
        config = configured(config_class, {"policy_name": "m", "dataset": "d", **plain[stage]})
        assert {name: getattr(config, name) for name in plain[stage]} == plain[stage]
        for name in NAMES:
            # Off has to be known for each; the mask's density has no meaning without one.
            assert set(profile_values(name)[stage]) - set(plain[stage]) <= {"mask_density"}


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_each_setting_that_differs_is_measured_alone(dtype):
    found = make_configurations({name: profile_values(name) for name in NAMES}, dtype, settings=True)
    plain = found[0].values
    assert [configuration.name for configuration in found[:4]] == ["plain", *NAMES]
    assert all(a.values != b.values for i, a in enumerate(found) for b in found[:i] if "setting" in (a.kind, b.kind))
    alone = {configuration.name: configuration.values for configuration in found if configuration.kind == "setting"}
    assert alone["padding_free=true"]["train"] == {**plain["train"], "padding_free": True}
    assert {stage: alone["padding_free=true"][stage] for stage in ("datagen", "test")} == {
        stage: plain[stage] for stage in ("datagen", "test")
    }
    assert alone["mode=sparse, mask_density=0.1"]["train"] == {**plain["train"], "mode": "sparse", "mask_density": 0.1}
    assert alone["prompts_per_batch=128"]["test"]["prompts_per_batch"] == 128
    by_length = {"prompts_per_batch": 128, "max_rows": 256, "group_by_length": True}
    assert alone["prompts_per_batch=128, max_rows=256, group_by_length=true"]["test"] == {**plain["test"], **by_length}
    shares = ("optim=adamw_torch_fused", "float32_matmul_precision=high", "share_prompts=true")
    assert set(shares) <= set(alone)
    assert ("dtype=bf16" in alone) == (dtype == "fp32")
    assert ("dtype=fp32" in alone) == (dtype == "bf16")


def test_settings_of_no_profile_can_be_measured_too():
    word = "rollout_engine=continuous_batching+prompts_per_batch=32"
    plain, alone = make_configurations({}, "fp32", settings=True, also=[parse_settings(word)])
    assert alone.name == "rollout_engine=continuous_batching, prompts_per_batch=32"
    assert alone.values["train"] == plain.values["train"]
    assert {alone.values[stage]["rollout_engine"] for stage in ("datagen", "test")} == {"continuous_batching"}
    assert len(make_configurations({}, "fp32", settings=True, also=[{"dtype": "fp32"}])) == 1


def test_without_settings_there_are_profiles_alone():
    found = make_configurations({"balanced": profile_values("balanced")}, "fp32", settings=False)
    assert [(configuration.name, configuration.kind) for configuration in found] == [
        ("plain", "plain"),
        ("balanced", "profile"),
    ]


def test_accuracy_may_fall_by_binomial_errors():
    # p = 0.45, n = 200: 3 * sqrt(2 * 0.45 * 0.55 / 200)
    check = accuracy_check(0.40, 0.50, 200, 3.0)
    assert check["tolerance"] == pytest.approx(0.149248, abs=1e-6)
    assert check["difference"] == pytest.approx(-0.1)
    assert check["holds"]
    assert not accuracy_check(0.40, 0.50, 200, 2.0)["holds"]
    assert not accuracy_check(0.40, 0.50, 1000, 3.0)["holds"]
    assert accuracy_check(0.9, 0.5, 10, 1.0)["holds"]
    assert accuracy_check(1.0, 1.0, 10, 1.0)["holds"]
    assert not accuracy_check(0.0, 1.0, 100, 3.0)["holds"]


def test_profiles_and_their_repeats_run_before_settings():
    kinds = ["plain", "profile", "profile", "setting", "setting"]
    order = list(order_of_runs([Configuration(str(i), kind, {}) for i, kind in enumerate(kinds)], 2))
    assert order == [(0, 0), (0, 1), (0, 2), (1, 1), (1, 2), (1, 0), (0, 3), (0, 4), (1, 4), (1, 3)]
    assert list(order_of_runs([Configuration("plain", "plain", {})], 3)) == [(0, 0), (1, 0), (2, 0)]


def result(name: str, accuracy: float, seconds: float = 1.0) -> dict[str, Any]:
    stages = {
        stage: {
            "wall_s": 2 * seconds,
            "work_s": seconds,
            "tokens_per_s": 100 / seconds,
            "peak_memory_bytes": None,
            "optimizer_bytes": {"state": 2**20},
            "accuracy": accuracy,
            "answer_rate": 1.0,
            "n_prompts": 100,
            "n_kept": 7,
        }
        for stage in STAGES
    }
    return {"name": name, "stages": stages, "peak_resident_bytes": 2**30}


def report_of(results: list[dict[str, Any]], n_repeats: int) -> dict[str, Any]:
    configurations = [
        Configuration(name, kind, {}) for name, kind in (("plain", "plain"), ("fast", "profile"), ("a=1", "setting"))
    ]
    return {
        "start": {"accuracy": 0.2},
        "settings": {
            "repeats": n_repeats,
            "sigmas": 3.0,
            "model_name": None,
            "n_prompts": 8,
            "n_generations": 2,
            "train_steps": 5,
            "n_test": 100,
        },
        "environment": {"machine": {"cpu": "a CPU"}},
        **summarized(configurations, results, 3.0),
    }


def test_medians_and_spread():
    seconds = (1.0, 5.0, 2.0)
    results = [result("plain", accuracy, s) for accuracy, s in zip((0.5, 0.6, 0.7), seconds, strict=True)]
    plain, fast, _ = summarized([Configuration("plain", "plain", {}), *[Configuration("fast", "profile", {})] * 2],
                                results, 3.0)["rows"]  # fmt: skip
    assert plain["train"]["work_s"] == [2.0, 1.0, 5.0]
    assert plain["work_s"] == [6.0, 3.0, 15.0]
    assert plain["accuracy"] == pytest.approx([0.6, 0.5, 0.7])
    assert fast["n_repeats"] == 0 and "accuracy_check" not in fast


def test_what_is_wrong_is_said():
    report = report_of([result("plain", 0.9), result("fast", 0.6), result("a=1", 0.5)], 1)
    (line,) = failures(report, 1)  # a setting alone may cost accuracy; it is shown, and fails nothing
    assert line.startswith("accuracy of fast is 0.6000, 0.3000 below plain; the tolerance is 0.1837")
    shown = text(report)
    assert "a=1" in shown and "NO" in shown and "accuracy 0.2000 before" in shown
    assert failures(report_of([result("plain", 0.9), result("fast", 0.9), result("a=1", 0.5)], 1), 1) == []
    missing = failures(report_of([result("plain", 0.9), result("a=1", 0.9)], 1), 1)
    assert missing == ["fast ran 0 times, expected 1"]
    assert failures({"start": None, "rows": []}, 1) == [
        "the model that all configurations start from could not be made or tested"
    ]
    assert "RFT on arithmetic" in text(report_of([], 1))


@pytest.mark.parametrize(("seconds", "code"), [(1.9, 1), (2.1, 0)])
def test_a_missed_target_fails_a_strict_run_only(bench, monkeypatch, tmp_path, seconds, code):
    """plain takes `seconds` for each stage, and conservative, which should be twice as fast, one."""

    def measured(job):
        return {**result(job.name, 0.5, seconds if job.name == "plain" else 1.0), "checkpoint": None}

    monkeypatch.setattr(profiles, "_run", measured)
    machine = {"cpu": "a CPU", "gpu": {"name": "a GPU"}}
    monkeypatch.setattr(profiles, "environment", lambda device: {"machine": machine})
    words = ["--profiles", "conservative", "--no_settings", "--repeats", 1, "--device", "cpu"]
    words += ["--model_name", "m", "--dataset", "d", "--test_dataset", "t", "--max_completion_length", 8]
    said, shown, err = bench(*words)
    verdict = "missed" if code else "met"
    line = f"{verdict}: profile conservative (cuda): {seconds} x as fast as plain, expected >= 2 x as fast as plain"
    assert (said, err) == (0, "") and line in shown.splitlines()
    (target,) = json.loads((tmp_path / "profiles.json").read_text())["targets"]
    assert (target["found"], target["met"]) == (pytest.approx(seconds), not code)
    said, _, err = bench(*words, "--strict")
    assert said == code and err.startswith("MISSED: profile conservative" if code else "")

    del machine["gpu"]
    said, shown, _ = bench(*words, "--strict")
    assert said == 0 and "targets (conservative 2 x, balanced 3 x, aggressive 5 x) are set for a GPU" in shown


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--repeats", 0], "option 'repeats' is 0: expected at least 1"),
        (["--profiles", "balanced,balanced"], "expected different names"),
        (["--profiles", "balance"], "the nearest is 'balanced'"),
        (["--model_name", "m"], "expected all of --model_name, --dataset and --test_dataset"),
        (
            ["--model_name", "m", "--dataset", "d", "--test_dataset", "t"],
            "expected --max_completion_length with --model_name",
        ),
        (["--sigmas", -1], "option 'sigmas' is -1.0: expected more than 0"),
        (["--work_dir", "/nowhere/at/all"], "option 'work_dir': no such folder: /nowhere/at/all"),
        (
            ["--also", "rollout_engin=vllm"],
            "option 'also' is rollout_engin=vllm: expected KEY=VALUE with a key of batch_size, compile",
        ),
        (["--repeat", 2], "unknown option 'repeat' (from --repeat); the nearest is 'repeats'"),
    ],
)
def test_a_wrong_call_is_one_line(bench, words, message):
    code, _, err = bench(*words)
    assert code == 2
    assert message in err and len(err.splitlines()) == 1


def test_packed_rows_hold_as_many_examples(tmp_path, monkeypatch):
    from sparse_opt.trainers.arithmetic import make_arithmetic

    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "datasets")
    world = make_arithmetic(
        tmp_path / "world", max_operand=9, n_train=40, n_test=10, n_demonstrations=40, n_layers=1, hidden_size=32
    )
    values = {"policy_name": str(world / "model"), "dataset": str(world / "data/demonstrations.jsonl")}
    # "3+4=" with its answer of one or two digits and EOS: 6 or 7 tokens, two of which fit into 14.
    assert rows_for({**values, "max_length": 14, "batch_size": 32}) == 16
    assert rows_for({**values, "max_length": 14, "batch_size": 1}) == 1


def test_results_name_no_folder_of_the_machine():
    found = {"job": {"folder": "/w/x/0_1", "n": 3, "mount_dir": "/w/x"}, "files": ["/w/x/a/b.json", "/w/xy/c", "fp32"]}
    assert relative_to(Path("/w/x"), found) == {
        "job": {"folder": "0_1", "n": 3, "mount_dir": "."},
        "files": ["a/b.json", "/w/xy/c", "fp32"],
    }


@pytest.fixture
def in_this_process(run_here):
    run_here(profiles_run)


def test_a_job_that_fails_is_said(bench, in_this_process):
    words = (
        "--model_name",
        "/nowhere/model",
        "--dataset",
        "/nowhere/d.jsonl",
        "--test_dataset",
        "/nowhere/t.jsonl",
        "--max_completion_length",
        8,
    )
    code, _, err = bench(*words, "--reward_functions", "exact_match", "--device", "cpu", "--repeats", 1)
    assert code == 1
    assert "start: the run ended with exit code 1" in err
    assert "WRONG RESULT: the model that all configurations start from could not be made or tested" in err


@pytest.mark.slow
def test_a_small_comparison(bench, in_this_process, monkeypatch, tmp_path):
    monkeypatch.setitem(profiles.ARITHMETIC, "n_demonstrations", 40 * 64)  # as many as the start trains on
    own = tmp_path / "own"
    own.mkdir()
    (own / "train.yaml").write_text("packing: true\n", encoding="utf-8")
    (own / "sampling.yaml").write_text("rollout_engine: generate\n", encoding="utf-8")
    sampling = {"rollout_engine": "generate"}
    small = ["--n_prompts", 64, "--n_generations", 8, "--train_steps", 3, "--n_test", 16, "--start_steps", 40]
    code, out, err = bench("--profiles", own, "--no_settings", "--repeats", 1, "--device", "cpu", *small, "--json")
    assert code == 0, err
    report = json.loads(out)
    assert json.loads((tmp_path / "profiles.json").read_text()) == report
    assert tempfile.gettempdir() not in json.dumps({**report, "profiles": None, "settings": None})
    assert set(report["environment"]) >= {"date", "commit", "machine", "versions"}
    plain, packed = report["rows"]
    assert (plain["name"], packed["name"]) == ("plain", "own")
    assert packed["values"]["train"] == {**plain["values"]["train"], "packing": True}
    for row in (plain, packed):
        assert row["n_repeats"] == 1 and row["n_test"] == 16
        for stage in STAGES:
            assert 0 < row[stage]["work_s"][0] <= row[stage]["wall_s"][0]
            assert row[stage]["tokens_per_s"][0] > 0
    # The same weights and seed sample the same: what differs is the training alone.
    assert plain["n_kept"] == packed["n_kept"]
    first, second = (row["results"][0]["stages"]["train"] for row in (plain, packed))
    assert 0 < first["padding"] < 1 and first["padding"] != second["padding"]
    assert first["epochs"] == pytest.approx(second["epochs"], rel=0.5)  # rows are whole, and each holds several
    assert report["profiles"] == {"own": {"datagen": sampling, "train": {"packing": True}, "test": sampling}}
    assert not list(Path(profiles.__file__).parent.glob("results/profiles_own*"))
