"""The benchmark of several devices: a small run with two processes, its check of results, and its report."""

from __future__ import annotations

import copy
import json
import os
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from launch import launch, run_command

pytest.importorskip("transformers", reason="needs transformers: pip install 'sparse-opt[train]'")

from sparse_opt import MaskSet
from sparse_opt.bench.distributed import report as reports
from sparse_opt.bench.distributed import targets
from sparse_opt.bench.distributed.collectives import CollectiveCounter
from sparse_opt.bench.distributed.models import masked_shapes, model_config, pair
from sparse_opt.bench.distributed.reference import Reference, first_step
from sparse_opt.bench.distributed.variants import VARIANTS, make_training
from sparse_opt.bench.distributed.world import World
from sparse_opt.cli.main import main

SPARSE = ["local_element_fp32", "replicate_element_fp32", "replicate_tile64_bf16", "fsdp2_tile64_bf16"]
DENSE = ["ddp", "fsdp2"]


@pytest.mark.slow
def test_a_small_run(tmp_path, capfd):
    pytest.importorskip("matplotlib", reason="--plot needs matplotlib: pip install 'sparse-opt[plot]'")
    output, picture = tmp_path / "distributed.json", tmp_path / "distributed.png"
    output.write_text("an earlier run, which the first rows replace")
    # A bf16 product takes milliseconds on a CPU: the sequences are short.
    words = ["--small", "--eager", "--sequence_length", "8", "--n_rounds", "3", "--output", str(output)]
    words += ["--variants", ",".join(SPARSE + DENSE)]
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
            assert row["n_reduced"] == row["nnz"] + 8 * 2
            assert row["reduced_bytes"] == row["n_reduced"] * {"fp32": 4, "bf16": 2}[row["grad_dtype"]]
        if row["layout"] == "replicate":
            assert row["other_bytes"] == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "5 of 5 checked rows" in out

    # One more row in a file of a torchrun that the user starts, one of whose rows is wrong.
    report["settings"]["share_cores"] = True
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
    assert main(["bench", "distributed", "--small", "--eager", "--limit_s", "0.001", "--output", str(output)]) == 1
    assert f"no row was measured; {output} is as it was before" in capfd.readouterr().err
    assert output.read_text() == "kept"


def test_compiled_layers_stay_compiled(tmp_path):
    """Also those of a variant that is built after another's collectives were counted."""
    words = ["--small", "--sequence_length", "8", "--n_rounds", "2", "--output", str(tmp_path / "o.json")]
    words += ["--steps_in_a_row", "2"]
    done = run_command(
        1,
        ["bench", "distributed", *words, "--variants", "local_element_fp32,ddp_whole_layers,fsdp2_element_fp32"],
        {**os.environ, "TORCHELASTIC_RUN_ID": "started-by-the-user"},
        script=Path(__file__).with_name("compiled_calls.py"),
        launched=True,
    )
    assert done.returncode == 0, done.stderr
    assert "layers compiled" in done.stdout and "3 of 3 checked rows" in done.stdout
    # Of two layers, in three steps and three rounds of two steps of each of three variants; the first step and the one
    # whose collectives are counted are eager. DDP's layers are one graph each, too.
    assert f"\n{2 * 3 * (3 + 3 * 2)} calls of compiled graphs\n" in done.stdout


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
    for step_s, in_a_row, n_rounds in ((0.1, 4, 75), (1.0, 4, 7), (4.0, 2, 3), (20.0, 1, 3)):
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
        "nnz": 976 if VARIANTS[variant].pattern else None,
        "n_reduced": 1000 if VARIANTS[variant].pattern else None,
        "check": check,
        "commit": "abc",
        **values,
    }


@pytest.fixture
def report() -> dict[str, Any]:
    machine = {"cpu": "C", "logical_cpus": 2}
    settings = {"shape": "3b", "sequence_length": 512, "density": 0.025, "gradient_checkpointing": False, "dpo": False}
    settings["compile"] = True
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
    found = {(r["row"]["network"], r["other"]["variant"]): r["ratio"] for r in targets.ratios(report)}
    assert found == {("default", "local_element_bf16"): 1.02, ("default", "ddp"): 0.51, ("sockets", "ddp"): 0.08}
    assert [(r["variant"], r["efficiency"]) for r in targets.efficiencies(report)] == [
        ("replicate_element_bf16", pytest.approx(96 / 102))
    ]
    verdicts = [line.split()[-1] for line in reports.text(report).splitlines() if "<= " in line or ">= " in line]
    assert verdicts == ["met", "met", "missed", "missed"]
    report["settings"]["compile"] = False  # the targets are those of compiled layers
    assert targets.ratios(report) == [] and not any(row["has_target"] for row in targets.efficiencies(report))


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
