"""The command line that all benchmarks share: files, errors and exit codes."""

from __future__ import annotations

import dataclasses
import json
from argparse import Namespace

import pytest
import torch

from sparse_opt.bench.common import harness
from sparse_opt.bench.common.harness import (
    Benchmark,
    WrongResult,
    job_main,
    numbers_out_of_range,
    one_of_each,
    run_in_process,
)
from sparse_opt.errors import SparseOptError


def benchmark(measure=lambda args, report: report.update(rows=[1]), **options) -> Benchmark:
    return Benchmark(name="one", doc="Times one.", measure=measure, text=lambda report: f"{report['rows']}", **options)


def refused(capsys, run, *words) -> str:
    with pytest.raises(SystemExit) as stopped:
        run([*map(str, words)])
    assert stopped.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


@pytest.mark.parametrize("flag", ["--output", "--json", "--results"])
def test_the_report_is_printed_and_written(tmp_path, capsys, flag):
    path = tmp_path / "new" / "one.json"
    assert benchmark(device="cpu").main([flag, str(path)]) == 0
    report = json.loads(path.read_text())
    assert (report["benchmark"], report["completed"], report["rows"]) == ("one", True, [1])
    assert set(report["environment"]) == {"date", "commit", "machine", "versions"}
    assert capsys.readouterr().out == f"[1]\n\nresults: {path}\n"


def test_the_default_file_names_options_and_the_device(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    one = benchmark(device="cpu", threads=3, output="results/{threads}_{device}.json")
    assert one.main([]) == 0
    assert [path.name for path in tmp_path.glob("results/*")] == ["3_cpu.json"]


def test_measurements_before_an_error_are_written_and_the_threads_restored(tmp_path):
    threads = torch.get_num_threads()

    def fail(args, report):
        assert torch.get_num_threads() == args.threads == threads + 1
        report["rows"] = [1]
        raise RuntimeError("the GPU is gone")

    path = tmp_path / "one.json"
    with pytest.raises(RuntimeError, match="gone"):
        benchmark(fail, threads=threads + 1).main(["--output", str(path)])
    assert torch.get_num_threads() == threads
    report = json.loads(path.read_text())
    assert report["rows"] == [1] and not report["completed"]


def test_an_earlier_file_stays_if_nothing_was_measured(tmp_path, capsys):
    def fail(args, report):
        raise WrongResult("2 is not 1")

    path = tmp_path / "one.json"
    path.write_text("{}")
    assert benchmark(fail).main(["--output", str(path)]) == 1
    assert capsys.readouterr().err == "WRONG RESULT: 2 is not 1\n"
    assert path.read_text() == "{}"


def test_failures_are_listed_and_end_with_1(tmp_path, capsys):
    path = tmp_path / "one.json"
    failing = benchmark(failures=lambda report, args: ["MISSED: a", "MISSED: b"], partial=lambda args: True)
    assert failing.main(["--output", str(path)]) == 1
    assert capsys.readouterr().err == "MISSED: a\nMISSED: b\n"
    assert not json.loads(path.read_text())["completed"]


def test_errors_of_the_library_are_one_line(capsys, monkeypatch):
    def fail(args, report):
        raise SparseOptError("no\nmask")

    monkeypatch.delenv("SPARSE_OPT_DEBUG", raising=False)
    assert benchmark(fail).main([]) == 1
    assert capsys.readouterr().err == "sparse-opt: error: no mask\n"
    monkeypatch.setenv("SPARSE_OPT_DEBUG", "1")
    with pytest.raises(SparseOptError):
        benchmark(fail).main([])


def test_wrong_options_end_with_2_before_any_work(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    one = benchmark(
        lambda args, report: pytest.fail("it ran"),
        options=lambda parser: parser.add_argument("--n_rounds", type=int, default=1),
        device="cpu",
        threads=1,
    )
    assert "--device is meta, expected cpu, cuda or cuda:N" in refused(capsys, one.main, "--device", "meta")
    assert "finds no CUDA device here" in refused(capsys, one.main, "--device", "cuda:1")
    assert "--threads is 0, expected at least 1" in refused(capsys, one.main, "--threads", "0")
    assert "--n_rounds is 0, expected at least 1" in refused(capsys, one.main, "--n_rounds", "0")
    assert "less than 2147483648" in refused(capsys, one.main, "--n_rounds", 2**31)
    assert "cannot be written to /proc/none/x.json" in refused(capsys, one.main, "--json", "/proc/none/x.json")
    assert "unknown option 'round'" in refused(capsys, one.main, "--round", "1")


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("numel", -5, "--numel is -5, expected at least 1"),
        ("numel", 2**40, "--numel is 1099511627776, expected at least 1 and less than 1099511627776"),
        ("batch_size", 0, "--batch_size is 0, expected at least 1 and less than 2147483648"),
        ("threads", 2**12, "--threads is 4096, expected at least 1 and less than 4096"),
        ("seed", 2**64, f"--seed is {2**64}, expected at least -{2**63} and less than {2**64}"),
        ("seeds", [0, 2**64], f"--seeds is {2**64}, "),
        ("density", 0.0, "--density is 0.0, expected more than 0 and at most 1"),
        ("density", 1.5, "--density is 1.5, "),
        ("learning_rate", -1.0, "--learning_rate is -1.0, expected at least 0"),
    ],
)
def test_numbers_that_no_benchmark_can_use(option, value, message):
    assert numbers_out_of_range(Namespace(**{option: value})).startswith(message)


def test_numbers_that_a_benchmark_can_use():
    numbers = {"numel": 2**31, "n_rounds": None, "seed": -1, "seeds": [0, 1], "density": 1.0, "learning_rate": 0.0}
    assert numbers_out_of_range(Namespace(**numbers)) == ""


@pytest.mark.parametrize(("available", "device"), [(True, "cuda"), (False, "cpu")])
def test_auto_is_a_gpu_if_there_is_one(monkeypatch, available, device):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
    monkeypatch.setattr(harness, "environment", lambda device: {"of": device})
    seen = []
    one = benchmark(lambda args, report: report.update(rows=seen.append((args.device, report["environment"]))))
    assert dataclasses.replace(one, device="auto").main([]) == 0
    assert seen == [(device, {"of": device})]


def test_small_runs_on_a_cpu(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    seen = []
    one = benchmark(
        lambda args, report: seen.append(args.device) or report.update(rows=[]),
        options=lambda parser: parser.add_argument("--small", action="store_true"),
        device="cuda",
    )
    assert one.main(["--small"]) == 0
    assert seen == ["cpu"]
    assert "finds no CUDA device here; --small runs on a CPU" in refused(capsys, one.main)


def test_a_list_names_each_of_its_words_once():
    assert one_of_each("modes", ["b", "a"], ("a", "b")) == ""
    for modes in (["a", "a"], ["c"], []):
        assert one_of_each("modes", modes, ("a", "b")) == f"--modes {','.join(modes)}: expected some of a, b, each once"


def test_a_job_runs_in_another_process(tmp_path, monkeypatch, capfd):
    (tmp_path / "one_job.py").write_text(
        "import os, sys\n"
        "from sparse_opt.bench.common.harness import job_main\n"
        "sys.exit(job_main(lambda job: {'twice': 2 * job['n_steps'], 'variable': os.environ['ONE']}))\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    job = {"mode": "sparse", "n_steps": 3}
    assert run_in_process("one_job", "sparse", job, tmp_path, {"ONE": "1"}) == {"job": job, "twice": 6, "variable": "1"}
    assert run_in_process("no_such_module", "sparse", job, tmp_path) is None
    assert "sparse: the run ended with exit code 1" in capfd.readouterr().err


def test_a_job_that_fails_is_named(tmp_path, capsys):
    def fail(job):
        raise SparseOptError("no mask")

    (tmp_path / "job.json").write_text('{"name": "tiles", "job": {}}')
    assert job_main(fail, [str(tmp_path / "job.json"), str(tmp_path / "result.json")]) == 1
    assert capsys.readouterr().err == "sparse-opt: error: tiles: no mask\n"
    assert not (tmp_path / "result.json").exists()


def test_help_shows_the_command_and_the_file(capsys):
    with pytest.raises(SystemExit) as stopped:
        benchmark(output="bench/results/one.json").main(["--help"])
    assert stopped.value.code == 0
    out = capsys.readouterr().out
    assert "sparse-opt bench one" in out and "bench/results/one.json" in out and "Times one." in out
