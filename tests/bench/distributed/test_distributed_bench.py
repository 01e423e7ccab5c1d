"""The benchmark of several devices: a small run with two processes, its check of results, and its report."""

from __future__ import annotations

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
from sparse_opt.bench import report, rows
from sparse_opt.bench.distributed import results
from sparse_opt.bench.distributed.models import masked_shapes, model_config, pair
from sparse_opt.bench.distributed.reference import Reference, first_step
from sparse_opt.bench.distributed.variants import VARIANTS, make_training
from sparse_opt.bench.distributed.world import CollectiveCounter, World
from sparse_opt.bench.rows import Run
from sparse_opt.cli.main import main

SPARSE = ["local_element_fp32", "replicate_element_fp32", "replicate_tile64_bf16", "fsdp2_tile64_bf16"]
DENSE = ["ddp", "fsdp2"]


def times(run: Run) -> list[rows.Row]:
    return [row for row in run.rows if row.metric == "time"]


@pytest.mark.slow
def test_a_small_run(tmp_path, capfd):
    output = tmp_path / "distributed.json"
    output.write_text("an earlier run, which the first rows replace")
    # A bf16 product takes milliseconds on a CPU: the sequences are short.
    words = ["--small", "--eager", "--sequence_length", "8", "--n_rounds", "3", "--output", str(output)]
    words += ["--variants", ",".join(SPARSE + DENSE)]
    code = main(["bench", "distributed", *words, "--gpus", "2"])
    out, err = capfd.readouterr()
    assert code == 0, err
    run = rows.read(output)
    assert run.completed and len(times(run)) == len(SPARSE + DENSE)
    for row in times(run):
        assert row.p20 <= row.value <= row.p80 and row.case["gpus"] == 2 and row.case["shape"] == "tiny"
        of_case = {other.metric: other for other in run.rows if other.case == row.case}
        assert ("error of the first updates" in of_case) == (row.case["layout"] != "local")
        if row.case["layout"] == "local":
            assert of_case["all collectives"].value == 0
        if row.case["layout"] == "replicate":
            assert report.ratio(run, of_case["all collectives"], "active elements") == 1
        if row.case["layout"] == "fsdp2" and "pattern" in row.case:
            assert report.ratio(run, of_case["reduced"], "active elements") == 1
    assert "5 of 5 checked rows" in out

    # One more row, by the processes of a torchrun that the user starts.
    words[words.index("--variants") + 1] = "replicate_element_bf16"
    done = run_command(
        2, ["bench", "distributed", *words, "--resume"], {**os.environ, "TORCHELASTIC_RUN_ID": "started-by-the-user"}
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("6 of 6 checked rows") == 1
    more = rows.read(output)
    assert [(row.case, row.value) for row in times(more)[:-1]] == [(row.case, row.value) for row in times(run)]
    (new,) = times(more)[-1:]
    assert (new.case["layout"], new.case["gradients"], new.case["share_cores"]) == ("replicate", "bf16", True)


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
    assert "3 of 3 checked rows" in done.stdout
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


SETTINGS = dict.fromkeys(results.SETTINGS) | {"shape": "3b", "compile": True, "sequence_length": 512}
GPU = {"machine": {"cpu": "C", "gpu": {"name": "NVIDIA H200"}}}


def rows_of(variant: str, ms: float, *, gpus: int = 4, network: str = "default", **values: Any) -> list[rows.Row]:
    errors = {"moment_error": 0.0, "moment_tolerance": 0.1, "update_error": 0.0, "update_tolerance": 0.2}
    sparse = VARIANTS[variant].pattern is not None
    settings = Namespace(**SETTINGS | {name: values.pop(name) for name in list(values) if name in SETTINGS})
    result = {"ms": ms, "p20_ms": ms, "p80_ms": ms, "n_rounds": 20, "check": errors, "reduced_bytes": 2000}
    result |= {"other_bytes": 0, "n_reduced": 1000 if sparse else None}
    result |= {"peak_memory_bytes": 10 * 2**30, "build_peak_bytes": 2**30, **values}
    return results.result_rows(result, results.case_of(VARIANTS[variant], gpus, network, settings))


def verdicts(found: list[list[rows.Row]]) -> dict[tuple[str, str, str], tuple[float, bool]]:
    run = Run(GPU, [row for of_one in found for row in of_one])
    return {
        (v.row.case["layout"], v.row.case["network"], v.target.split(" x ")[-1]): (v.found, v.met)
        for v in report.judge(run)
    }


def test_ratios_are_to_rows_of_as_many_gpus_and_to_one():
    measured = [
        rows_of("replicate_element_bf16", 102.0),
        rows_of("replicate_element_bf16", 160.0, network="sockets"),
        rows_of("local_element_bf16", 100.0),
        rows_of("local_element_bf16", 96.0, gpus=1),
        rows_of("ddp", 200.0),
        rows_of("ddp", 2000.0, network="sockets"),
    ]
    assert verdicts(measured) == {
        ("replicate", "default", "local"): (pytest.approx(1.02), True),
        ("replicate", "default", "ddp"): (pytest.approx(0.51), True),
        ("replicate", "default", "one GPU"): (pytest.approx(102 / 96), False),
        ("replicate", "default", "active elements"): (1.0, True),
        ("replicate", "sockets", "ddp"): (pytest.approx(0.08), False),
        ("replicate", "sockets", "active elements"): (1.0, True),
    }
    eager = [rows_of("replicate_element_bf16", 102.0, compile=False), rows_of("ddp", 200.0, compile=False)]
    assert verdicts(eager) == {}  # the targets are those of compiled layers


def test_bytes_and_peak_memory_have_verdicts():
    gib = 2**30
    one = ("fsdp2", "default", "active elements")
    assert verdicts([rows_of("fsdp2_tile64_bf16", 150.0, other_bytes=10**9)]) == {one: (1.0, True)}
    assert not verdicts([rows_of("fsdp2_tile64_bf16", 150.0, reduced_bytes=2002)])[one][1]
    assert not verdicts([rows_of("replicate_element_bf16", 1.0, other_bytes=4)])["replicate", *one[1:]][1]
    for peak, met in ((61, True), (63, False)):
        found = verdicts([rows_of("fsdp2_tile64_bf16", 150.0, shape="70b", dpo=True, build_peak_bytes=peak * gib)])
        assert found["fsdp2", "default", "<= 62.0 GiB"] == (peak * gib, met)


def test_a_wrong_update_has_no_rows(monkeypatch):
    world = World.__new__(World)
    world.run, world.size, world.args = Run({}), 4, Namespace(network="default", **SETTINGS)
    check = {"moment_error": 1.0, "moment_tolerance": 0.1, "update_error": 1.0, "update_tolerance": 0.2}
    world._add(VARIANTS["ddp"], {"ms": None, "check": check | {"worst_parameter": "w", "met": False}})
    assert world.run.rows == []
    (line,) = world.run.wrong
    assert line.startswith("4 x default, ddp: first moments are off by 1.00e+00") and line.endswith("is in w")


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
        (["--limit_gib", "-1"], "--limit_gib is -1.0, expected at least"),
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
