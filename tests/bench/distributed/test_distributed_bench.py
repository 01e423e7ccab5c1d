"""The benchmark of several devices: a small run with two processes, its check of results, and its report."""

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
from sparse_opt.bench import report, rows
from sparse_opt.bench.distributed import main as distributed_main
from sparse_opt.bench.distributed import world
from sparse_opt.bench.distributed.reference import Reference, first_step
from sparse_opt.bench.distributed.variants import VARIANTS, make_training
from sparse_opt.bench.distributed.world import CollectiveCounter, World
from sparse_opt.bench.models import masked_shapes, model_config, pair
from sparse_opt.bench.rows import Run
from sparse_opt.cli.main import main

SPARSE = ["local_element_fp32", "replicate_element_fp32", "replicate_tile64_bf16", "fsdp2_tile64_bf16"]
DENSE = ["ddp", "fsdp2"]


def times(run: Run) -> list[rows.Row]:
    return [row for row in run.rows if row.metric == "time"]


@pytest.mark.slow
def test_a_small_run(tmp_path, capfd, run_here):
    run_here(world)
    output = tmp_path / "distributed.json"
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
        if row.case["layout"] == "local":
            assert of_case["all collectives"].value == 0
        if row.case["layout"] == "replicate":
            assert report.ratio(run, of_case["all collectives"], "active elements") == 1
        if row.case["layout"] == "fsdp2" and "pattern" in row.case:
            assert report.ratio(run, of_case["reduced"], "active elements") == 1
    assert "2 x default: the first update is that of one device on the pairs of all GPUs in 5 rows" in out

    assert main(["bench", "distributed", *words, "--gpus", "2", "--resume", "--limit_s", "0.001"]) == 1
    assert f"not measured: no time was left for {', '.join(SPARSE + DENSE)} on 2 x default" in capfd.readouterr().out
    assert len(times(rows.read(output))) == len(SPARSE + DENSE)  # those of before


def test_compiled_layers_stay_compiled(tmp_path, monkeypatch, capfd):
    """Also those of a variant that is built after another's collectives were counted."""
    variants = "local_element_fp32,ddp_whole_layers,fsdp2_element_fp32"
    jobs = []

    def run_it(module: str, name: str, job: dict[str, Any], folder: Path, *args: Any, n_ranks: int) -> Any:
        jobs.append(job)
        files = folder / "job.json", folder / "result.json"
        files[0].write_text(json.dumps({"name": name, "job": job}))
        script = Path(__file__).with_name("compiled_calls.py")
        done = run_command(n_ranks, list(map(str, files)), os.environ, script=script, launched=True)
        assert done.returncode == 0, done.stderr
        # Of two layers, in three steps and three rounds of two steps of each of three variants; the first step and the
        # one whose collectives are counted are eager. DDP's layers are one graph each, too.
        assert f"\n{2 * 3 * (3 + 3 * 2)} calls of compiled graphs\n" in done.stdout
        return json.loads(files[1].read_text())

    monkeypatch.setattr(distributed_main, "run_in_process", run_it)
    words = ["--small", "--sequence_length", "8", "--n_rounds", "2", "--steps_in_a_row", "2", "--gpus", "1"]
    words += ["--variants", variants, "--output", str(tmp_path / "o.json")]
    assert main(["bench", "distributed", *words]) == 0
    assert len(jobs) == 1 and "pairs of all GPUs in 3 rows" in capfd.readouterr().out


def test_the_time_of_a_step_is_that_of_several_divided_by_their_number(monkeypatch):
    one, calls = World.__new__(World), []

    def clock(call: Any) -> tuple[float, float, float]:
        call()
        return 8.0, 6.0, 10.0

    monkeypatch.setattr(one, "clock", clock, raising=False)
    assert one._clock_of_steps(4, lambda: calls.append(1)) == (2.0, 1.5, 2.5) and len(calls) == 4


def test_fewer_steps_in_a_row_if_they_are_slow():
    one = World.__new__(World)
    one.args = Namespace(steps_in_a_row=4, n_rounds=100)
    for step_s, counts in ((0.02, (4, 100)), (0.1, (4, 25)), (1.0, (3, 3)), (20.0, (1, 3))):
        assert one._counts([(None, {"step_s": step_s / 2})] * 2) == counts


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


def count_collectives(rank: int) -> dict[str, int]:
    values, gathered = torch.ones(1000), torch.empty(2000)
    with CollectiveCounter() as counter:
        work = dist.all_reduce(values, async_op=True)
        assert work is not None
        work.wait()
        dist.all_reduce(values.bfloat16())
        dist.all_gather_into_tensor(gathered, values)
    dist.all_reduce(values)  # outside
    assert counter.reduced == 6000 and counter.other == 8000
    return dict(counter.bytes)


def test_collectives_are_counted_by_name():
    assert launch(count_collectives, 2)[0] == {"allreduce": 6000, "allgather": 8000}


GPU = {"machine": {"cpu": "C", "gpu": {"name": "NVIDIA H200"}}}


def rows_of(variant: str, ms: float, *, gpus: int = 4, network: str = "default", **changes: Any) -> list[rows.Row]:
    settings = dict.fromkeys(distributed_main.SETTINGS) | {"shape": "3b", "compile": True, "sequence_length": 512}
    case = distributed_main.case_of(VARIANTS[variant], gpus, network, Namespace(**settings | changes))
    result = {"ms": ms, "p20_ms": ms, "p80_ms": ms, "n_rounds": 20, "reduced_bytes": 2000, "other_bytes": 0}
    result |= {"n_reduced": 1000, "peak_memory_bytes": 10 * 2**30, "build_peak_bytes": 2**30}
    return distributed_main.result_rows(result, case)


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


def test_a_wrong_update_and_a_process_that_failed_have_no_rows(monkeypatch, tmp_path, capsys):
    check = {"moment_error": 1.0, "moment_tolerance": 0.1, "update_error": 1.0, "update_tolerance": 0.2}
    wrong = {"variant": "ddp", "ms": None, "check": check | {"worst_parameter": "w", "met": False}}
    output = tmp_path / "o.json"
    words = ["bench", "distributed", "--small", "--gpus", "2", "--variants", "ddp", "--output", str(output)]
    monkeypatch.setattr(distributed_main, "run_in_process", lambda *args, **options: [wrong])
    assert main(words) == 1
    line = capsys.readouterr().err.splitlines()[0]
    assert line.startswith("WRONG RESULT: 2 x default, ddp: first moments are off by 1.00e+00")
    assert line.endswith("is in w")
    monkeypatch.setattr(distributed_main, "run_in_process", lambda *args, **options: None)
    assert main(words) == 1
    assert "not measured: a process failed on 2 x default" in capsys.readouterr().err and not output.exists()
