"""The benchmark of several devices: a small run with two processes, its check of results, and its report."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from launch import launch, run_command, run_module

pytest.importorskip("transformers", reason="needs transformers: pip install 'sparse-opt[train]'")

from sparse_opt import MaskSet
from sparse_opt.bench.distributed import main as distributed_main
from sparse_opt.bench.distributed import on_own_cores, results, targets
from sparse_opt.bench.distributed import report as reports
from sparse_opt.bench.distributed.collectives import CollectiveCounter
from sparse_opt.bench.distributed.models import masked_shapes, model_config, pair
from sparse_opt.bench.distributed.on_own_cores import take_share_of_cores
from sparse_opt.bench.distributed.reference import Reference, first_step
from sparse_opt.bench.distributed.variants import VARIANTS, make_training
from sparse_opt.bench.distributed.world import World
from sparse_opt.cli.main import main
from sparse_opt.errors import ConfigError

SPARSE = ["local_element_fp32", "replicate_element_fp32", "replicate_tile64_bf16", "fsdp2_tile64_bf16"]
DENSE = ["ddp", "fsdp2"]


@pytest.fixture
def forked_ranks(monkeypatch):
    """torchrun's processes are forked, see launch.py. test_distributed_limit.py starts a real torchrun."""

    class Torchrun:
        def __init__(self, command, env, stdout):
            self.code = run_module(command, env)

        def wait(self, timeout):
            return self.code

        def poll(self):
            return self.code

    started = SimpleNamespace(Popen=Torchrun, TimeoutExpired=subprocess.TimeoutExpired)
    monkeypatch.setattr(distributed_main, "subprocess", started)


@pytest.mark.slow
def test_a_small_run(tmp_path, capfd, forked_ranks):
    pytest.importorskip("matplotlib", reason="--plot needs matplotlib: pip install 'sparse-opt[plot]'")
    output, picture = tmp_path / "distributed.json", tmp_path / "distributed.png"
    output.write_text("an earlier run, which the first rows replace")
    # A bf16 product takes milliseconds on a CPU: the sequences are short.
    words = ["--small", "--sequence_length", "8", "--n_rounds", "3", "--variants", ",".join(SPARSE + DENSE)]
    words += ["--output", str(output), "--share_cores"]
    code = main(["bench", "distributed", *words, "--gpus", "2", "--plot", str(picture)])
    out, err = capfd.readouterr()
    assert code == 0, err
    report = json.loads(output.read_text())
    assert report["completed"] and report["settings"]["shape"] == "tiny"
    assert {(row["world_size"], row["variant"]) for row in report["rows"]} == {(2, name) for name in SPARSE + DENSE}
    for row in report["rows"]:
        assert row["p20_ms"] <= row["ms"] <= row["p80_ms"] and row["peak_memory_bytes"] is None
        together = [name for name in SPARSE + DENSE if name.startswith("fsdp2") == row["variant"].startswith("fsdp2")]
        assert row["timed_with"] == together
        assert (row["check"] is None) == (row["layout"] == "local")
        if row["layout"] == "local":
            assert row["collectives"] == {}
        if row["layout"] in ("replicate", "fsdp2") and row["pattern"] is not None:
            assert row["reduced_bytes"] == row["nnz"] * {"fp32": 4, "bf16": 2}[row["grad_dtype"]]
        if row["layout"] == "replicate":
            assert row["other_bytes"] == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "5 of 5 checked rows" in out

    # One more row in an older file, one of whose rows is wrong, measured by processes with the variables of a torchrun
    # that the user starts.
    del report["settings"]["compile"], report["settings"]["limit_gib"]
    wrong = next(row for row in report["rows"] if row["variant"] == "ddp")
    wrong["check"]["met"], wrong["ms"] = False, None
    output.write_text(json.dumps(report))
    picture.unlink()
    words[words.index("--variants") + 1] = "replicate_element_fp32,replicate_element_bf16"
    done = run_command(
        2,
        ["bench", "distributed", *words, "--resume", "--plot", str(picture)],
        {**os.environ, "TORCHELASTIC_RUN_ID": "started-by-the-user"},
    )
    assert done.returncode == 1, done.stderr
    assert done.stderr.count("WRONG RESULT") == 1 and f"{wrong['variant']}: WRONG RESULT" in done.stderr
    assert done.stdout.count("5 of 6 checked rows") == 1
    assert picture.read_bytes().startswith(b"\x89PNG")
    rows = json.loads(output.read_text())["rows"]
    assert rows[:-1] == report["rows"] and rows[-1]["variant"] == "replicate_element_bf16"


def test_a_run_that_measures_nothing_keeps_the_results(tmp_path, capfd):
    output = tmp_path / "o.json"
    output.write_text("kept")
    assert main(["bench", "distributed", "--small", "--limit_s", "0.001", "--output", str(output)]) == 1
    assert f"no row was measured; {output} is as it was before" in capfd.readouterr().err
    assert output.read_text() == "kept"


def test_a_file_from_before_an_option_can_be_resumed(tmp_path):
    committed = Path(__file__).parents[3] / "bench" / "results" / "distributed.json"
    report = json.loads(committed.read_text())
    added_later = {"compile": False, "limit_gib": None, "steps_in_a_row": 1, "share_cores": True}
    old = {name: value for name, value in report["settings"].items() if name not in added_later}
    path = tmp_path / "old.json"
    path.write_text(json.dumps({**report, "settings": old}))
    found = results.read_report(Namespace(**old, **added_later, output=path))
    assert found["settings"] == {**old, **added_later} and found["rows"]
    with pytest.raises(ConfigError, match="has rows of compile False, expected True"):
        results.read_report(Namespace(**old, **{**added_later, "compile": True}, output=path))


def test_each_process_has_cores_of_its_own(monkeypatch, tmp_path):
    taken = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {9, 2, 4, 6, 8})
    monkeypatch.setattr(os, "sched_setaffinity", lambda process, cores: taken.append(cores))
    for rank in range(2):
        take_share_of_cores(rank, 2)
    take_share_of_cores(0, 6)  # more processes than cores
    assert taken == [[2, 4], [6, 8]]
    monkeypatch.undo()

    (tmp_path / "printing.py").write_text("import os, sys; print(len(os.sched_getaffinity(0)), sys.argv[1:], __name__)")
    done = subprocess.run(
        [sys.executable, on_own_cores.__file__, "printing", "a", "b"],
        env={**os.environ, "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": str(len(os.sched_getaffinity(0)))},
        cwd=tmp_path, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout == "1 ['a', 'b'] __main__\n"


def test_compiled_layers_stay_compiled(tmp_path):
    """Also those of a variant that is built after another's collectives were counted."""
    words = ["--small", "--sequence_length", "8", "--compile", "--n_rounds", "2", "--output", str(tmp_path / "o.json")]
    words += ["--steps_in_a_row", "2"]
    done = run_command(
        1,
        ["bench", "distributed", *words, "--variants", "local_element_fp32,fsdp2_element_fp32"],
        {**os.environ, "TORCHELASTIC_RUN_ID": "started-by-the-user"},
        script=Path(__file__).with_name("compiled_calls.py"),
        launched=True,
    )
    assert done.returncode == 0, done.stderr
    assert "layers compiled" in done.stdout and "2 of 2 checked rows" in done.stdout
    # Of two layers, in three steps and five rounds of two steps of each of two variants; the first step and the one
    # whose collectives are counted are eager.
    assert f"\n{2 * 2 * (3 + 5 * 2)} calls of compiled graphs\n" in done.stdout


def test_the_time_of_a_step_is_that_of_several_divided_by_their_number(monkeypatch):
    world, calls = World.__new__(World), []

    def clock(call: Any) -> tuple[float, float, float]:
        call()
        return 8.0, 6.0, 10.0

    monkeypatch.setattr(world, "_clock", clock, raising=False)
    assert world._clock_of_steps(4, lambda: calls.append(1)) == (2.0, 1.5, 2.5) and len(calls) == 4


def test_fewer_steps_in_a_row_if_they_are_slow():
    world = World.__new__(World)
    world.args = Namespace(steps_in_a_row=4, group_s=30.0, n_rounds=100)
    for step_s, in_a_row, n_rounds in ((0.1, 4, 75), (1.0, 4, 7), (2.0, 3, 5), (10.0, 1, 5)):
        group = [(None, {"step_s": step_s / 2})] * 2
        assert (world._steps_in_a_row(group), world._n_rounds(group)) == (in_a_row, n_rounds)


def tiny_training(name: str, config: Any, mask: MaskSet) -> Any:
    return make_training(VARIANTS[name], config, mask, torch.device("cpu"), lr=1e-6, seed=0)


def check_updates(rank: int) -> list[bool]:
    """Whether the check accepts the averaged update, this rank's own update, and no update."""
    config = model_config("tiny", 32)
    mask = MaskSet.random(masked_shapes(config), density=0.05, pattern="tile64")
    pairs = [pair(i, 32, config.vocab_size, torch.device("cpu")) for i in range(2)]
    expected = Reference.of(tiny_training("local_tile64_fp32", config, mask), mask, pairs)
    averaged, own = (tiny_training(name, config, mask) for name in ("replicate_tile64_bf16", "local_tile64_bf16"))
    found = []
    for training in (averaged, own):
        first_step(training, [pairs[rank]])
        found.append(expected.check(training, mask)["met"])
    still = tiny_training("local_tile64_bf16", config, mask)
    first_step(still, pairs)
    still.model.load_state_dict(tiny_training("local_tile64_bf16", config, mask).model.state_dict())
    return [*found, expected.check(still, mask)["met"]]


def test_only_the_update_of_the_global_batch_is_accepted():
    assert launch(check_updates, 2) == [[True, False, False]] * 2


def count_collectives(rank: int) -> dict[str, tuple[int, int]]:
    values, gathered = torch.ones(1000), torch.empty(2000)
    with CollectiveCounter() as counter:
        work = dist.all_reduce(values, async_op=True)
        assert work is not None
        work.wait()
        dist.all_reduce(values.bfloat16())
        dist.all_gather_into_tensor(gathered, values)
    dist.all_reduce(values)  # outside
    assert counter.reduced == 6000 and counter.other == 8000
    return {name: (counter.calls[name], n) for name, n in counter.bytes.items()}


def test_collectives_are_counted_by_name():
    assert launch(count_collectives, 2)[0] == {"allreduce": (2, 6000), "allgather": (1, 8000)}


def row(variant: str, ms: float, *, gpus: int = 4, network: str = "default", **values: Any) -> dict[str, Any]:
    errors = {"moment_error": 0.0, "moment_tolerance": 0.1, "update_error": 0.0, "update_tolerance": 0.2}
    check = {**errors, "worst_parameter": "w", "met": True}
    sizes = {"peak_memory_bytes": 10 * 2**30, "reduced_bytes": 2000, "other_bytes": 0, "p20_ms": ms, "p80_ms": ms}
    found = {"world_size": gpus, "network": network, "variant": variant, **vars(VARIANTS[variant]), "ms": ms}
    return {
        **found,
        **sizes,
        "nnz": 1000 if VARIANTS[variant].pattern else None,
        "check": check,
        "commit": "abc",
        **values,
    }


@pytest.fixture
def report() -> dict[str, Any]:
    machine = {"cpu": "C", "logical_cpus": 2}
    settings = {"shape": "3b", "sequence_length": 512, "density": 0.025, "gradient_checkpointing": False, "dpo": False}
    return {
        "environment": {"machine": machine, "versions": {"torch": "2"}, "date": "2026-01-01T", "commit": "abc"},
        "settings": settings,
        "rows": [
            row("replicate_element_bf16", 102.0),
            row("replicate_element_bf16", 160.0, network="sockets"),
            row("local_element_bf16", 100.0),
            row("local_element_bf16", 96.0, gpus=1),
            row("ddp", 200.0),
            row("ddp", 2000.0, network="sockets"),
        ],
    }


def test_ratios_are_to_rows_of_as_many_gpus(report):
    found = {
        (r["row"]["network"], r["other"]["variant"], r["other"]["network"]): r["ratio"] for r in targets.ratios(report)
    }
    assert found == {
        ("default", "local_element_bf16", "default"): 1.02,
        ("default", "ddp", "default"): 0.51,
        ("sockets", "ddp", "sockets"): 0.08,
        ("sockets", "replicate_element_bf16", "default"): pytest.approx(160 / 102),
    }
    assert [(r["variant"], r["efficiency"]) for r in targets.efficiencies(report)] == [
        ("replicate_element_bf16", pytest.approx(96 / 102))
    ]
    verdicts = [line.split()[-1] for line in reports.text(report).splitlines() if "<= " in line or ">= " in line]
    assert verdicts == ["met", "met", "missed", "missed", "missed"]


def test_bytes_and_peak_memory_have_verdicts(report):
    def verdicts(**settings):
        found = {**report, "settings": {**report["settings"], **settings}}
        return {(r["row"]["variant"], r["row"]["network"], r["what"]): r["met"] for r in targets.bounds(found)}

    gib = 2**30
    fsdp2 = {"other_bytes": 10**9, "peak_memory_bytes": 61 * gib, "build_peak_bytes": 40 * gib}
    report["rows"].append(row("fsdp2_tile64_bf16", 150.0, **fsdp2))
    expected = {
        ("replicate_element_bf16", "default", "bytes of all collectives"): True,
        ("replicate_element_bf16", "sockets", "bytes of all collectives"): True,
        ("fsdp2_tile64_bf16", "default", "bytes reduced"): True,
    }
    assert verdicts() == expected
    peak = ("fsdp2_tile64_bf16", "default", "peak memory of a GPU")
    assert verdicts(shape="70b", dpo=True) == expected | {peak: True}
    report["rows"][-1]["build_peak_bytes"] = 63 * gib
    assert verdicts(shape="70b", dpo=True) == expected | {peak: False}
    report["rows"][-1]["reduced_bytes"] += 2
    report["rows"][0]["other_bytes"] = 4
    missed = {
        ("fsdp2_tile64_bf16", "default", "bytes reduced"),
        ("replicate_element_bf16", "default", "bytes of all collectives"),
    }
    assert {key for key, met in verdicts().items() if not met} == missed
    lines = [line.split() for line in reports.text(report).splitlines() if "= 1,000 x 2" in line]
    assert [(words[-6], words[-1]) for words in lines] == [("2,004", "missed"), ("2,002", "missed"), ("2,000", "met")]


def test_a_wrong_result_is_reported_and_has_no_time(report):
    wrong = copy.deepcopy(report)
    wrong["rows"][0]["check"] |= {"met": False, "update_error": 1.0}
    wrong["rows"][0]["ms"] = None
    assert reports.wrong_lines(report) == []
    (line,) = reports.wrong_lines(wrong)
    assert "replicate_element_bf16: WRONG RESULT" in line and line.endswith("is in w")
    assert "5 of 6 checked rows" in reports.text(wrong) and "102.0" not in reports.text(wrong)
    wrong["rows"][0]["commit"] = None
    assert "Rows of commits abc, unknown." in reports.text(wrong)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--variants", "ddp,replicate"], "--variants ddp,replicate: expected some of local_element_fp32"),
        (["--networks", "sockets"], "--networks sockets: expected some of default"),
        (["--gpus", "0"], "--gpus 0: expected 1"),
        (["--gpus", "two"], "--gpus two: expected numbers"),
        (["--dpo"], "--dpo needs --variants with sparse variants only"),
        (["--dpo", "--variants", "fsdp2_tile64_bf16,ddp"], "--dpo needs --variants with sparse variants only"),
        (["--density", "0"], "--density is 0.0, expected more than 0"),
        (["--mask_dir", "nowhere"], "--mask_dir nowhere: no such folder"),
        (["--limit_gib", "-1"], "--limit_gib is -1.0, expected at least 0"),
        (["--limit_gib", "8"], "--limit_gib 8 limits the memory of GPUs, and the device is the CPU"),
    ],
)
def test_wrong_options_end_before_any_work(words, message, tmp_path, capsys):
    assert main(["bench", "distributed", "--small", "--output", str(tmp_path / "o.json"), *words]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--gpus", "1,2"], "--gpus 1,2: torchrun has started 4 processes, expected 4 or no --gpus"),
        (["--networks", "default,sockets"], "--networks default,sockets: under torchrun expected one"),
        (["--networks", "sockets"], "--networks sockets uses the loopback interface, and the processes are on several"),
    ],
)
def test_options_that_torchrun_has_decided_are_refused(words, message, tmp_path, capsys, monkeypatch):
    of_ranks = {"TORCHELASTIC_RUN_ID": "a", "RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}
    for name, value in of_ranks.items():
        monkeypatch.setenv(name, value)
    assert main(["bench", "distributed", "--small", "--output", str(tmp_path / "o.json"), *words]) == 2
    assert message in capsys.readouterr().err


def test_a_file_of_other_settings_is_not_extended(tmp_path, capsys):
    output = tmp_path / "o.json"
    settings = {"shape": "3b", "sequence_length": 512}
    output.write_text(json.dumps({"settings": settings, "rows": []}))
    assert main(["bench", "distributed", "--small", "--resume", "--output", str(output)]) == 2
    assert "has rows of shape 3b, expected tiny" in capsys.readouterr().err
    assert json.loads(Path(output).read_text())["settings"] == settings
