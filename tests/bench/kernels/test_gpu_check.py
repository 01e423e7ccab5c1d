"""The checks of a GPU machine on a CPU; the parts that need a GPU are skipped with a reason."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from sparse_opt import backends
from sparse_opt.bench.common import harness
from sparse_opt.bench.kernels import cases, gpu_check
from sparse_opt.bench.kernels.table import main as table
from sparse_opt.bench.kernels.table import targets
from sparse_opt.bench.kernels.table.recorder import Recorder, Work
from sparse_opt.ops import STEP_OPS

WITH_TILES = ["--device", "cpu", "--skip_tests", "--numel", "50000", "--delta_numel", "5000", "--n_rounds", "2"]
SMALL = [*WITH_TILES, "--no_tiles"]


@pytest.fixture
def needs_extension():
    if "cpu" not in backends.available("cpu"):
        pytest.skip("needs the extension: " + backends.why_unavailable("cpu", "cpu"))


def test_a_run_that_was_cut_short_goes_on(tmp_path, capsys, monkeypatch, needs_extension):
    path = tmp_path / "gpu_check.json"
    words = [*SMALL, "--output", str(path), "--only", "deltas"]
    monkeypatch.setenv("SPARSE_OPT_COMMIT", "abc")
    assert gpu_check.main([*words, "--skip_kernels"]) == 0
    report = json.loads(path.read_text())
    assert not report["completed"] and "kernels" not in report
    passed = {"exit_code": 0, "seconds": 1.0, "passed": 7, "failed": 0, "skipped": 0}
    checks = {tool: {"exit_code": 0, "seconds": 1.0} for tool in gpu_check.SANITIZER_TOOLS}
    monkeypatch.setattr(gpu_check, "_tests", lambda *_: pytest.fail("the tests had been run"))
    words.remove("--skip_tests")
    path.write_text(json.dumps({**report, "tests": passed, "sanitizer": checks}))
    assert gpu_check.main([*words, "--resume"]) == 0
    assert f"tests: done on {report['environment']['date']}" in capsys.readouterr().out
    again = json.loads(path.read_text())
    assert again["completed"] and again["tests"] == passed and again["sanitizer"] == checks and again["kernels"]["rows"]

    # Failed parts, parts of another commit, and parts without a commit are run again.
    calls = []
    monkeypatch.setattr(gpu_check, "_tests", lambda *_: calls.append(1) or [])
    failed = {**passed, "exit_code": 1}
    for commit, tests, times in (("abc", failed, 1), ("def", passed, 1), ("abc-dirty", passed, 1), ("abc", passed, 0)):
        calls.clear()
        monkeypatch.setenv("SPARSE_OPT_COMMIT", commit)
        environment = {**report["environment"], "commit": commit if commit != "def" else "abc"}
        path.write_text(json.dumps({**report, "environment": environment, "tests": tests, "sanitizer": checks}))
        assert gpu_check.main([*words, "--resume", "--skip_kernels"]) == 0
        assert len(calls) == times, commit
    here = {**report["environment"], "commit": None}
    monkeypatch.setattr(harness, "environment", lambda _: here)
    path.write_text(json.dumps({"environment": here, "tests": passed, "sanitizer": checks}))
    assert gpu_check.main([*words, "--resume", "--skip_kernels"]) == 0
    assert len(calls) == 1

    path.write_text("{")
    with pytest.raises(SystemExit):
        gpu_check.main([*words, "--resume"])
    assert f"--resume: {path} is not JSON: Expecting" in capsys.readouterr().err


def test_a_part_is_kept_as_it_ends(tmp_path, monkeypatch, needs_extension):
    """A machine's time may end in the next part, without a signal that Python could answer."""
    path = tmp_path / "gpu_check.json"
    kept = []

    def run_part(name):
        def part(report, *_):
            kept.append(set(json.loads(path.read_text())) if path.exists() else set())
            report[name] = {"exit_code": 0}
            return []

        return part

    for part in ("tests", "sanitizer"):
        monkeypatch.setattr(gpu_check, f"_{part}", run_part(part))
    monkeypatch.setattr(gpu_check.kernels, "run_table", lambda report, *_: run_part("kernels")(report))
    monkeypatch.setattr(gpu_check.kernels, "text", lambda report: "")
    words = [word for word in SMALL if word != "--skip_tests"]
    assert gpu_check.main([*words, "--output", str(path)]) == 0
    before_tests, before_sanitizer, before_kernels = kept
    assert not {"tests", "sanitizer"} & before_tests
    assert "tests" in before_sanitizer and "sanitizer" not in before_sanitizer
    assert {"tests", "sanitizer"} <= before_kernels


def test_a_table_that_was_cut_short_goes_on(tmp_path, capsys, monkeypatch, needs_extension):
    path = tmp_path / "gpu_check.json"
    words = [*WITH_TILES, "--output", str(path), "--skip_sanitizer", "--only", "tiles,deltas"]
    monkeypatch.setenv("SPARSE_OPT_COMMIT", "abc")
    time_delta = table.time_delta

    def stopped(*arguments):
        time_delta(*arguments)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(table, "time_delta", stopped)
        with pytest.raises(KeyboardInterrupt):
            gpu_check.main(words)
    cut = json.loads(path.read_text())
    assert not cut["completed"] and list(cut["kernels"]["parts"]) == ["tiles"]
    of_deltas = [row for row in cut["kernels"]["rows"] if row["part"] == "deltas"]
    kept = [row for row in cut["kernels"]["rows"] if row["part"] != "deltas"]
    assert of_deltas and len(kept) > 1 and kept[0]["work"] == "copy"

    with monkeypatch.context() as patch:
        patch.setattr(table.tile_gradients, "time_rows", lambda *_: pytest.fail("the part was timed again"))
        capsys.readouterr()
        assert gpu_check.main([*words, "--resume"]) == 0
    assert "kept from the earlier run: copy, tiles" in capsys.readouterr().out
    again = json.loads(path.read_text())
    found = again["kernels"]
    assert again["completed"] and list(found["parts"]) == ["tiles", "deltas"] and found["rows"][: len(kept)] == kept
    assert found["copy_gb_per_s"] == cut["kernels"]["copy_gb_per_s"]
    works = [(row["work"], row["backend"], row["density"]) for row in found["rows"]]
    assert len(set(works)) == len(works) > len(kept) + len(of_deltas)
    of_copy = found["copy_gb_per_s"] * 1e9
    assert all(row["floor_ms"] == pytest.approx(1e3 * row["bytes"] / of_copy) for row in found["rows"][len(kept) :])

    # If the tests have to run again, and are cut short, the table is still there.
    def stop(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(gpu_check, "_tests", stop)
        with pytest.raises(KeyboardInterrupt):
            gpu_check.main([*(word for word in words if word != "--skip_tests"), "--resume"])
    assert json.loads(path.read_text())["kernels"] == found

    # A table of other settings, of another build, with a wrong result, and of an older version begins again.
    timed = []
    monkeypatch.setattr(table.tile_gradients, "time_rows", lambda *_: timed.append(1))
    wrong = {**again, "kernels": {**found, "wrong_results": ["something"]}}
    older = {**again, "kernels": {name: value for name, value in found.items() if name != "wrong_results"}}
    settings = (["--n_rounds", "3"], ["--seed", "1"], ["--no_peers"], ["--numel", "60000"], ["--delta_numel", "6000"])
    for changed, report in (
        *((change, again) for change in settings),
        ([], wrong),
        ([], older),
        ([], other_build(again)),
    ):
        path.write_text(json.dumps(report))
        timed.clear()
        assert gpu_check.main([*words, *changed, "--resume"]) == 0
        assert timed and list(json.loads(path.read_text())["kernels"]["parts"]) == ["tiles", "deltas"], changed

    # A table is only kept by a run that has one.
    path.write_text(json.dumps(wrong))
    assert gpu_check.main([*words, "--resume", "--skip_kernels"]) == 0
    assert "kernels" not in json.loads(path.read_text())


def other_build(report: dict[str, Any]) -> dict[str, Any]:
    return {**report, "build_info": {**report["build_info"], "compiler": "another"}}


def test_a_row_that_was_timed_after_all_is_not_left_out():
    recorder = Recorder(torch.device("cpu"), [], n_rounds=1, left_out={"a peer": "FAILED", "another": "FAILED"})
    recorder.time([Work("a peer", "torch", None, lambda: None, None)])
    assert recorder.left_out == {"another": "FAILED"}


def test_the_gpu_tests_are_all_there():
    tests = Path(__file__).parents[2]
    for _, names, left_out in gpu_check.GPU_TESTS:
        assert all((tests / name).exists() for name in (*names, *left_out)), names


def test_a_part_of_the_table_is_kept_as_it_ends(tmp_path, monkeypatch, needs_extension):
    path = tmp_path / "gpu_check.json"
    written = []
    monkeypatch.setattr(
        table, "time_delta", lambda *_: written.append(list(json.loads(path.read_text())["kernels"]["parts"]))
    )
    assert gpu_check.main([*WITH_TILES, "--output", str(path), "--only", "tiles,deltas"]) == 0
    assert written == [["tiles"]] * len(table.DELTA_DENSITIES)


def test_every_row_is_checked_timed_and_written(tmp_path, capsys, monkeypatch, needs_extension):
    monkeypatch.delenv("SPARSE_OPT_BACKEND", raising=False)  # SparseAdamW's rows are of the automatic choice
    path = tmp_path / "gpu_check.json"
    assert gpu_check.main([*WITH_TILES, "--output", str(path)]) == 0
    report = json.loads(path.read_text())
    assert report["completed"]
    assert report["failures"] == []
    assert report["sanitizer"] == {"skipped": "cpu is not a GPU"}
    assert report["build_info"]["torch"]

    rows = report["kernels"]["rows"]
    timed = {(row["work"], row["density"]) for row in rows if row["backend"] == "cpu"}
    steps = {f"{op}, {kind} gradients" for op in STEP_OPS for kind in ("dense", "compact")}
    on_indices = {*steps, "masked_grad_gather_", "indexed_swap_", "indexed_replace_"}
    on_weights = {
        *on_indices,
        *(f"{op}, int32 indices" for op in on_indices),
        "SparseAdamW.step, dense gradients",
        "SparseAdamW.step, compact gradients",
        "SparseAdamW.step, dense gradients, bf16 moments",
        "SparseAdamW.step, compact gradients, bf16 moments",
        "SparseAdamW.clip_grad_norm_",
        "SparseAdamW.base_weights, in",
        "SparseAdamW.base_weights, out",
        "SparseAdamW.step, dense gradients, lr 1e-6",
        "SparseAdamW.step, compact gradients, lr 1e-6",
        "SparseAdamW.step, dense gradients, lr 1e-6, compact weights",
        "SparseAdamW.step, compact gradients, lr 1e-6, compact weights",
        *(
            f"SparseAdamW.base_weights, {way}, lr 1e-6{more}"
            for way in ("in", "out")
            for more in ("", ", compact weights")
        ),
    }
    on_delta = {"delta_encode", "delta_apply_"}
    expected = {(work, density) for work in on_weights for density in (0.025, 0.1)}
    expected |= {(work, density) for work in on_delta for density in (0.01, 0.025, 0.1)}
    expected |= {(f"SparseAdamW.step, dense gradients, {pattern}", 0.025) for pattern in ("run16", "run32")}
    for pattern in ("tile64", "tile128"):
        name = targets.tile_gradient(pattern, 48)
        expected |= {(name, density) for density in (0.025, 0.1)}
        expected |= {(name + calls, 0.025) for calls in (", a call an input", ", a call a matrix")}
    expected |= {(targets.tile_gradient("tile128", 48), 1.0), (targets.gathered_gradient(48), 0.025)}
    # At this size no matrix has as many tiles as it takes for one to be 2.5 % of them.
    assert timed == expected
    assert "less than one unit of tile64" in report["kernels"]["left_out"]["SparseAdamW.step, dense gradients, tile64"]
    peers = {row["work"] for row in rows if row["backend"] == "torch"}
    torch_steps = {
        "torch.optim.AdamW(fused=True).step",
        "torch.optim.AdamW(foreach=True).step",
        "grad *= mask, torch.optim.AdamW(fused=True).step",
        "torch.nn.utils.clip_grad_norm_",
    }
    assert peers == {"copy", "ne, nonzero, index", "torch.mm, 48 tokens", *torch_steps}
    assert set(report["kernels"]["left_out"]) >= {"FlashAdamW.step", "torchao AdamW8bit.step"}
    for row in rows:
        assert row["ms"] > 0
        if row["floor_ms"] is not None:
            assert row["floor_ms"] == pytest.approx(row["bytes"] / (1e6 * report["kernels"]["copy_gb_per_s"]))
            assert row["share_of_floor"] == pytest.approx(row["floor_ms"] / row["ms"])
    out = capsys.readouterr().out
    assert "all checks passed" in out
    verdicts = report["kernels"]["targets"]
    n_missed = sum(not verdict["met"] for verdict in verdicts)
    assert verdicts
    assert f"{len(verdicts) - n_missed} met, {n_missed} missed" in out
    assert out.count("\nmissed: ") == n_missed


def test_a_wrong_result_is_not_timed_and_fails_the_check(tmp_path, capsys, monkeypatch, needs_extension):
    true_op = cases.ops.indexed_swap_

    def wrong(dense, compact, *where, backend, **options):
        true_op(dense, compact, *where, backend=backend, **options)
        if backend != "reference":
            dense[0].zero_()

    monkeypatch.setattr(cases.ops, "indexed_swap_", wrong)
    path = tmp_path / "gpu_check.json"
    assert gpu_check.main([*SMALL, "--output", str(path)]) == 1
    report = json.loads(path.read_text())
    found = [failure.split(":")[0] for failure in report["failures"]]
    n_backends = len(backends.available("cpu")) - 1  # the reference is not judged by itself
    # One for each density and backend; base_weights() calls the kernels past this function, and is right.
    each = ["indexed_swap_"] * n_backends + ["indexed_swap_, int32 indices"] * n_backends
    assert found == each * 2
    assert not any(row["work"] == "indexed_swap_" for row in report["kernels"]["rows"])
    assert "gpu-check: FAILED" in capsys.readouterr().out


def test_a_missed_target_fails_only_a_strict_check(tmp_path, monkeypatch, needs_extension):
    missing = targets.Verdict("delta_encode", "cpu", 0.01, "of the copy rate", 0.5, 0.95, False)
    monkeypatch.setattr(targets, "judge", lambda rows: [missing])
    words = [*SMALL, "--only", "deltas", "--output", str(tmp_path / "gpu_check.json")]
    assert gpu_check.main(words) == 0
    assert gpu_check.main([*words, "--strict"]) == 1


def test_what_was_found_before_an_error_is_written(tmp_path, monkeypatch):
    def fail(*args):
        raise RuntimeError("the GPU is gone")

    monkeypatch.setattr("sparse_opt.bench.kernels.table.main.time_delta", fail)
    path = tmp_path / "gpu_check.json"
    with pytest.raises(RuntimeError, match="gone"):
        gpu_check.main([*SMALL, "--only", "deltas", "--output", str(path)])
    report = json.loads(path.read_text())
    assert not report["completed"]
    assert any(row["work"] == "copy" for row in report["kernels"]["rows"])


def test_a_failing_suite_fails_the_check(tmp_path):
    tests = tmp_path / "tests" / "ops"
    tests.mkdir(parents=True)
    (tests / "test_one.py").write_text(
        "import pytest\n"
        "def test_right(): pass\n"
        "def test_wrong(): assert False\n"
        "def test_left_out(): assert False\n"
        "def test_skipped(): pytest.skip('needs nothing')\n"
    )
    path = tmp_path / "gpu_check.json"
    arguments = [word for word in SMALL if word != "--skip_tests"]
    words = [*arguments, "--only", "deltas", "--tests", str(tmp_path / "tests"), "--pytest_options=-k 'not left_out'"]
    assert gpu_check.main([*words, "--output", str(path)]) == 1
    report = json.loads(path.read_text())
    found = {key: report["tests"][key] for key in ("exit_code", "passed", "failed", "skipped")}
    assert found == {"exit_code": 1, "passed": 1, "failed": 1, "skipped": 1}
    assert any(failure.startswith("tests: exit code 1") for failure in report["failures"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device", "cpu", "--tests", "no_such_folder"], "tests folder no_such_folder: not found"),
        (["--device", "cpu", "--skip_tests", "--output", "/proc/none/x.json"], "cannot be written"),
        (
            ["--device", "cpu", "--skip_tests", "--only", "tiles,gather"],
            "--only tiles,gather: no part 'gather', expected",
        ),
    ],
)
def test_a_wrong_call_ends_with_2_and_one_line(arguments, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        gpu_check.main(arguments)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


def test_every_sanitizer_tool_runs_on_the_ops_and_must_find_nothing(tmp_path, monkeypatch):
    log = tmp_path / "log"
    tool = tmp_path / gpu_check.SANITIZER
    tool.write_text(
        f'#!/bin/sh\necho "$PYTORCH_NO_CUDA_MEMORY_CACHING $*" >> {log}\ncase "$*" in *racecheck*) exit 1;; esac\n'
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    report: dict[str, Any] = {}
    assert gpu_check._sanitizer(report, torch.device("cuda")) == ["compute-sanitizer racecheck: exit code 1"]
    assert [report["sanitizer"][name]["exit_code"] for name in ("memcheck", "racecheck")] == [0, 1]
    memcheck, racecheck = log.read_text().splitlines()
    for line, name in ((memcheck, "memcheck"), (racecheck, "racecheck")):
        assert line.startswith(f"1 --tool {name} --error-exitcode 1 ")
        assert line.endswith(f"{sys.executable} -m sparse_opt.bench.kernels.sanitize_ops")


def test_a_part_past_its_limit_fails():
    code, seconds = gpu_check._run([sys.executable, "-c", "import time; time.sleep(60)"], 0.2)
    assert code is None
    assert seconds < 30
