"""Runs of several processes under torchrun: resumed with another number of processes, failed, killed, refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from launch import launch
from stopping import StoppedError, rows

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
