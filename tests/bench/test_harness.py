"""The command line that all benchmarks share: checks before times, files, errors and exit codes."""

from argparse import Namespace

import pytest
import torch

from sparse_opt.bench import harness, rows
from sparse_opt.bench.harness import Benchmark, Work, WrongResult, job_main, out_of_range, run_in_process
from sparse_opt.bench.rows import Row, Run
from sparse_opt.errors import ConfigError, SparseOptError


def one_row(work: str = "one") -> Row:
    return Row(suite="one", case={"work": work}, metric="time", unit="ms", value=1.0)


def benchmark(measure=lambda args, run: run.add(one_row()), **options) -> Benchmark:
    return Benchmark(name="one", doc="Times one.", measure=measure, device="cpu", **options)


def refused(run, *words) -> str:
    with pytest.raises(ConfigError) as error:
        run([*map(str, words)])
    return str(error.value)


def test_rows_are_printed_and_written_to_the_default_file(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert benchmark(threads=3, output="results/{threads}_{device}.json").main([]) == 0
    run = rows.read(tmp_path / "results/3_cpu.json")
    assert run.completed and run.rows == [one_row()]
    assert set(run.environment) == {"date", "commit", "machine", "versions"}
    out = capsys.readouterr().out
    assert "time, ms" in out and "results: results/3_cpu.json" in out


def test_only_right_results_are_timed(capsys):
    def wrong():
        raise WrongResult("one bit")

    run, called = Run({}), []
    works = [Work({"work": name}, lambda: called.append(1), check) for name, check in (("a", wrong), ("b", None))]
    harness.time_works(run, "one", works, torch.device("cpu"), 4)
    assert run.wrong == ["a: one bit"] and [row.case["work"] for row in run.rows] == ["b"]
    assert run.rows[0].n == 4 and len(called) == 3 + 4
    assert "WRONG RESULT, not timed: a: one bit" in capsys.readouterr().out


def test_rows_before_an_error_are_written_and_the_threads_restored(tmp_path):
    threads = torch.get_num_threads()

    def fail(args, run):
        assert torch.get_num_threads() == args.threads == threads + 1
        run.add(one_row())
        raise RuntimeError("the GPU is gone")

    path = tmp_path / "one.json"
    with pytest.raises(RuntimeError, match="gone"):
        benchmark(fail, threads=threads + 1).main(["--output", str(path)])
    assert torch.get_num_threads() == threads
    run = rows.read(path)
    assert run.rows == [one_row()] and not run.completed


def test_saved_rows_outlive_a_kill(tmp_path):
    def measure(args, run):
        run.add(one_row())
        run.save()
        found = rows.read(args.output)  # what a kill would leave
        assert found.rows == [one_row()] and not found.completed

    assert benchmark(measure).main(["--output", str(tmp_path / "run.json")]) == 0
    assert rows.read(tmp_path / "run.json").completed


def test_an_earlier_file_stays_if_nothing_was_measured(tmp_path, capsys):
    def fail(args, run):
        raise WrongResult("2 is not 1")

    path = tmp_path / "one.json"
    path.write_text("{}")
    assert benchmark(fail).main(["--output", str(path)]) == 1
    assert capsys.readouterr().err == "WRONG RESULT: 2 is not 1\n"
    assert path.read_text() == "{}"


def test_with_resume_earlier_rows_are_kept_with_their_commit(tmp_path, monkeypatch):
    path, commits = tmp_path / "one.json", iter("ab")
    monkeypatch.setattr(rows, "commit", lambda: next(commits))
    for name in ("first", "second"):
        one = benchmark(lambda args, run, name=name: run.add(one_row(name)))
        assert one.main(["--output", str(path), "--resume"]) == 0
    run = rows.read(path)
    assert [(row.case["work"], run.environment_of(row)["commit"]) for row in run.rows] == [
        ("first", "a"),
        ("second", "b"),
    ]


def test_wrong_and_missing_rows_and_with_strict_missed_targets_end_with_1(capsys, monkeypatch):
    def partly(args, run):
        run.add(one_row())
        run.wrong.append("a bit")
        run.note("not measured: two")
        run.completed = False

    assert benchmark(partly).main([]) == 1
    assert capsys.readouterr().err == "WRONG RESULT: a bit\nnot measured: two\n"
    target = {"where": {}, "metric": "time", "at_most": 0.5, "reason": "because"}
    monkeypatch.setattr(harness.report, "targets", lambda: {"one": [target]})
    assert benchmark().main([]) == 0
    assert benchmark().main(["--strict"]) == 1
    assert "MISSED: one: time 1, expected <= 0.500 ms (because)" in capsys.readouterr().err


def test_wrong_options_end_before_any_work(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    one = benchmark(lambda args, run: pytest.fail("it ran"), threads=1)
    assert "--device is meta, expected cpu, cuda or cuda:N" in refused(one.main, "--device", "meta")
    assert "finds no CUDA device here" in refused(one.main, "--device", "cuda:1")
    assert "--threads is 0, expected at least 1" in refused(one.main, "--threads", "0")
    assert "cannot be written to /proc/none/x.json" in refused(one.main, "--output", "/proc/none/x.json")
    assert "unknown option 'round'" in refused(one.main, "--round", "1")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"numel": 2**40}, "--numel is 1099511627776, expected at least 1 and less than 1099511627776"),
        ({"batch_size": 0}, "--batch_size is 0, expected at least 1 and less than 2147483648"),
        ({"density": 0.0}, "--density is 0.0, expected more than 0 and at most 1"),
        ({"learning_rate": -1.0}, "--learning_rate is -1.0, expected at least 0"),
        ({"limit_gib": 0.0}, "--limit_gib is 0.0, expected at least"),
        ({"n_steps": 3, "n_warmup": 3}, "--n_steps 3 leaves nothing after --n_warmup 3"),
    ],
)
def test_numbers_that_no_benchmark_can_use(options, message):
    assert out_of_range(Namespace(**options)).startswith(message)


def test_folders_are_made(tmp_path):
    assert out_of_range(Namespace(mask_dir=tmp_path / "a" / "b", numel=2**31, seed=-1, density=1.0)) == ""
    assert (tmp_path / "a" / "b").is_dir()
    (tmp_path / "file").write_text("")
    assert "cannot make this folder" in out_of_range(Namespace(mask_dir=tmp_path / "file"))


@pytest.mark.parametrize(
    ("available", "words", "device"), [(True, [], "cuda"), (False, [], "cpu"), (True, ["--small"], "cpu")]
)
def test_the_device_is_a_gpu_if_there_is_one(monkeypatch, available, words, device):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
    monkeypatch.setattr(rows, "environment", lambda device: {})
    seen = []
    one = Benchmark(
        name="one",
        doc="",
        measure=lambda args, run: seen.append(args.device),
        options=lambda parser: parser.add_argument("--small", action="store_true"),
    )
    assert one.main(words) == 0
    assert seen == [device]


def test_a_job_runs_in_another_process(tmp_path, monkeypatch, capfd):
    (tmp_path / "one_job.py").write_text(
        "import os, sys\n"
        "from sparse_opt.bench.harness import job_main\n"
        "sys.exit(job_main(lambda job: {'twice': 2 * job['n_steps'], 'variable': os.environ['ONE']}))\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert run_in_process("one_job", "sparse", {"n_steps": 3}, tmp_path, {"ONE": "1"}) == {"twice": 6, "variable": "1"}
    assert run_in_process("no_such_module", "sparse", {}, tmp_path) is None
    assert "sparse: the run ended with exit code 1" in capfd.readouterr().err


def test_a_job_that_fails_is_named(tmp_path, capsys):
    def fail(job):
        raise SparseOptError("no mask")

    (tmp_path / "job.json").write_text('{"name": "tiles", "job": {}}')
    assert job_main(fail, [str(tmp_path / "job.json"), str(tmp_path / "result.json")]) == 1
    assert capsys.readouterr().err == "sparse-opt: error: tiles: no mask\n"
    assert not (tmp_path / "result.json").exists()
