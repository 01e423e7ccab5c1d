"""Runs of several processes under torchrun: resumed with another number of processes, failed, killed, refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from launch import launch, run_command
from safetensors.torch import load_file
from stopping import StoppedError, rows

from sparse_opt.delta.log import DeltaLog
from sparse_opt.errors import ConfigError
from sparse_opt.trainers import grpo, sft
from sparse_opt.trainers.rft import datagen, evaluate
from sparse_opt.trainers.run.training_run import TrainingRun


@pytest.fixture
def options(model_folder, pairs_file, tmp_path):
    return {
        "policy_name": str(model_folder),
        "dataset": str(pairs_file),
        "dtype": "fp32",
        "device": "cpu",
        "n_steps": 6,
        "batch_size": 4,
        "max_length": 64,
        "learning_rate": 1e-3,
        "save_steps": 2,
        "output_dir": str(tmp_path / "run"),
    }


@pytest.fixture
def environment(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("datasets"))
    return {**os.environ, "HF_DATASETS_CACHE": folder, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parent)}


def train_words(options, *words):
    return ["train", *words, *(f"--{name}={value}" for name, value in options.items())]


def command_line(options, n, *words):
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(n)]
    return [sys.executable, *torchrun, "-m", "sparse_opt", *train_words(options, *words)]


def own_lines(ended):
    """The lines of stderr that sparse-opt wrote."""
    return [line for line in ended.stderr.splitlines() if line.startswith("sparse-opt: ")]


def train_until(rank, options, last):
    """Train until the process dies after this step."""
    original = TrainingRun.log

    def log(self, step, *args, **metrics):
        original(self, step, *args, **metrics)
        if step == last:
            raise StoppedError

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TrainingRun, "log", log)
        try:
            sft.train(sft.SFTConfig(**{**options, "output_dir": Path(options["output_dir"])}))
        except StoppedError:
            return True
        return False


def test_a_run_goes_on_with_another_number_of_processes(options, tmp_path):
    sft.train(sft.SFTConfig(**{**options, "output_dir": tmp_path / "one"}))
    of_each = {**options, "per_device_train_batch_size": 2}
    assert launch(train_until, 2, of_each, 3) == [True, True]
    assert [path.name for path in sorted(tmp_path.glob("run/checkpoints/*"))] == ["step_00000002"]
    with pytest.raises(ConfigError, match="batch_size is 2; expected 4"):
        train_until(0, {**of_each, "resume": True}, 5)
    assert train_until(0, {**options, "resume": True}, 5)
    assert launch(train_until, 2, {**of_each, "resume": True}, 7) == [False, False]
    uninterrupted, resumed = (rows(tmp_path / name / "metrics.jsonl") for name in ("one", "run"))
    assert [row["step"] for row in resumed] == [1, 2, 3, 4, 5, 6]
    for expected, found in zip(uninterrupted, resumed, strict=True):
        # The gradients are sums in another order; see test_distributed_losses.
        assert found["loss"] == pytest.approx(expected["loss"], rel=5e-4)
    # Steps 3 and 4 were repeated by one process, steps 5 and 6 by two.
    assert ["rank1/peak_host_memory_bytes" in row for row in resumed] == [True, True, False, False, True, True]


def sample_twice(rank, options):
    """The first completions of two runs."""
    found = []
    for name in ("a", "b"):
        folder = Path(options["output_dir"]) / name
        grpo.train(grpo.GRPOConfig(**{**options, "output_dir": folder}))
        found.append([row["completion"] for row in rows(folder / "samples.jsonl")])
    return found


def test_samples_differ_between_ranks_and_are_the_same_twice(options, tmp_path):
    # The four completions of the only prompt: two of each rank.
    options |= {"n_steps": 1, "n_generations": 4, "max_completion_length": 8, "sample_steps": 1}
    options |= {"reward_functions": ["token_rewards:even_tokens"]}
    first, second = launch(sample_twice, 2, {**options, "output_dir": str(tmp_path)})[0]
    assert first == second
    assert len(first) == 4 and first[:2] != first[2:]


def sample_and_test(rank, options):
    """The files of the RFT stages that sample, and their reports without times."""
    options = {name: value for name, value in options.items() if name in RFT_OPTIONS}
    folder = Path(options.pop("output_dir"))
    own = {"prompts_per_batch": 5, "max_completion_length": 6, "reward_functions": ["rft_worlds:short"]}
    reports = [
        datagen.datagen(datagen.DatagenConfig(**options, **own, output_dir=folder / "kept")),
        evaluate.test(evaluate.TestConfig(**options, **own, output_dir=folder / "tested", n_generations=1)),
    ]
    for report in reports:
        for name in ("generate_time_s", "verify_time_s", "tokens_per_s", "text", "kept_file", "results_file"):
            report.pop(name, None)
    return reports, (folder / "kept" / "kept.jsonl").read_text(), (folder / "tested" / "results.jsonl").read_text()


RFT_OPTIONS = ("policy_name", "dataset", "dtype", "device", "output_dir", "seed")


def test_rft_samples_the_same_in_several_processes(options, tmp_path):
    expected = sample_and_test(0, {**options, "output_dir": tmp_path / "one"})
    for found in launch(sample_and_test, 2, {**options, "output_dir": str(tmp_path / "two")}):
        assert found == expected
    assert 0 < expected[0][0]["accuracy"] < 1 and expected[2].count("\n") == 24


@pytest.mark.parametrize("parallel", ["replicate", "fsdp"])
def test_the_error_of_one_rank_is_shown_once(options, environment, tmp_path, parallel):
    options |= {"parallel": parallel, "n_generations": 4, "max_completion_length": 4}
    options |= {"reward_functions": "token_rewards:fails_on_rank_1"}
    ended = run_command(2, train_words(options, "grpo"), environment)
    assert ended.returncode == 1
    (line,) = own_lines(ended)
    assert line.startswith("sparse-opt: rank 1: error: reward function 'fails_on_rank_1' failed: ValueError")
    assert "sparse_opt/trainers" not in ended.stderr  # no traceback
    assert list(tmp_path.glob("run/*")) == []  # no step was logged


def test_a_rank_that_hangs_is_named_after_the_timeout(options, environment, tmp_path):
    options |= {"parallel": "fsdp", "n_generations": 4, "max_completion_length": 4, "ddp_timeout": 4}
    options |= {"reward_functions": "token_rewards:hangs_on_rank_1"}
    ended = run_command(2, train_words(options, "grpo"), environment, timeout=60)  # torch's default is 30 minutes
    assert ended.returncode == 1
    (line,) = own_lines(ended)
    assert line.startswith("sparse-opt: rank 0: error: a collective of the processes failed, rank 1 did not respond")
    assert "sparse_opt/trainers" not in ended.stderr  # no traceback


def test_torchrun_trains_and_prints_once(options, environment, mask_file, tmp_path):
    options |= {"mode": "sparse", "mask": mask_file, "delta_log_dir": tmp_path / "log", "report_to": "tensorboard"}
    command = command_line(options, 2, "sft", "--json")
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=180)
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout) == json.loads((tmp_path / "run" / "summary.json").read_text())
    assert own_lines(ended) == []
    logged, saved = DeltaLog.open(tmp_path / "log").load(6), load_file(tmp_path / "run" / "final" / "model.safetensors")
    assert logged.keys() == saved.keys() and all(torch.equal(logged[name], saved[name]) for name in saved)
    (events,) = (tmp_path / "run" / "tensorboard").iterdir()
    assert b"rank1/peak_host_memory_bytes" in events.read_bytes()
    again = run_command(2, train_words(options, "sft"), environment)
    assert again.returncode == 2
    (line,) = own_lines(again)
    assert "option 'output_dir'" in line and "exists and is not empty" in line
    assert "sparse_opt/trainers" not in again.stderr  # no traceback


@pytest.mark.parametrize(
    ("changes", "n", "message"),
    [
        ({"parallel": "none"}, 2, "option 'parallel' is none, with 2 processes: expected auto, replicate or fsdp"),
        ({"parallel": "replicate"}, 1, "start N of them with: torchrun --nproc_per_node=N -m sparse_opt train"),
        ({"batch_size": 1}, 2, "the 2 processes share these examples, expected at least one for each"),
        ({"n_step": 3}, 2, "unknown option 'n_step'"),
    ],
    ids=["none", "one process", "batch", "typo"],
)
def test_a_refused_run_leaves_nothing_and_says_why_once(options, environment, tmp_path, changes, n, message):
    ended = run_command(n, train_words({**options, **changes}, "sft"), environment)
    assert ended.returncode != 0
    (line,) = own_lines(ended)
    assert message in line
    assert list(tmp_path.iterdir()) == []


def test_a_killed_rank_ends_the_run(options, environment, tmp_path):
    options |= {"parallel": "fsdp", "n_steps": 100000}

    def has_saved():
        return any(tmp_path.glob("run/checkpoints/step_*"))  # whole; a checkpoint being written has another name

    ended = run_command(2, train_words(options, "sft"), environment, killed=(1, has_saved))
    assert ended.returncode != 0
    assert "sparse_opt/trainers" not in ended.stderr
    # The lock is free, and the run goes on.
    assert not (tmp_path / "run" / "run.lock").exists()
    steps = sorted(int(path.name.removeprefix("step_")) for path in tmp_path.glob("run/checkpoints/step_*"))
    assert train_until(0, {**options, "resume": True, "parallel": "none"}, steps[-1] + 1)
