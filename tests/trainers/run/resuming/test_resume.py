"""Runs that are stopped and resumed: the same outputs as of an uninterrupted run, and refused calls."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import yaml
from stopping import assert_same_run, rows, stop, stop_and_resume
from transformers import AutoModelForCausalLM

from sparse_opt.config import to_yaml
from sparse_opt.delta.log import DeltaLog
from sparse_opt.errors import ConfigError, DeltaLogError
from sparse_opt.trainers import dpo, sft
from sparse_opt.trainers.grpo import GRPOConfig
from sparse_opt.trainers.rft.datagen import DatagenConfig
from sparse_opt.trainers.rft.parts import MAY_DIFFER
from sparse_opt.trainers.run.resuming.resume import check_resumable, require_same_options


@pytest.fixture
def options(dpo_options, pairs_file, tmp_path):
    """`options("whole", mode="lora")`: a DPO run of six steps in that folder, with everything on that is written."""

    def make(folder, **changes):
        return dpo_options(
            output_dir=tmp_path / folder,
            n_steps=6,
            save_steps=2,
            sample_steps=2,
            eval_dataset=str(pairs_file),
            eval_subset_size=4,
            eval_steps=3,
            delta_log_dir=tmp_path / f"{folder}_log",
            delta_log_steps="every:1",
            lr_schedule="cosine",
            **changes,
        )

    return make


@pytest.mark.parametrize(
    ("mode", "dtype", "stopped_after"),
    [
        ("dense", "fp32", 1),  # before the first checkpoint
        ("dense", "bf16", 4),  # on one
        ("sparse", "fp32", 3),  # between two
        ("sparse", "bf16", 4),
        ("lora", "fp32", 3),
    ],
)
def test_a_stopped_dpo_run_goes_on_as_if_it_had_not_been(
    monkeypatch, options, mask_file, tmp_path, mode, dtype, stopped_after
):
    changes = {"mode": mode, "mask": mask_file if mode == "sparse" else None, "dtype": dtype}
    whole = dpo.train(options("whole", **changes))
    resumed = stop_and_resume(monkeypatch, dpo.train, options("resumed", **changes), stopped_after)
    assert_same_run(whole, resumed)
    logs = [DeltaLog.open(tmp_path / f"{name}_log") for name in ("whole", "resumed")]
    assert logs[0].steps == logs[1].steps == tuple(range(7))
    assert [logs[0].digest(step) for step in range(7)] == [logs[1].digest(step) for step in range(7)]


def test_a_stopped_sft_run_goes_on_as_if_it_had_not_been(monkeypatch, model_folder, pairs_file, tmp_path):
    def config(folder):
        return sft.SFTConfig(
            policy_name=str(model_folder),
            dataset=str(pairs_file),
            output_dir=tmp_path / folder,
            dtype="fp32",
            device="cpu",
            n_steps=5,
            save_steps=1,
            learning_rate=1e-3,
            warmup_steps=2,
        )

    whole = sft.train(config("whole"))
    assert_same_run(whole, stop_and_resume(monkeypatch, sft.train, config("resumed"), 3))


def test_checkpoints_are_written_and_the_oldest_removed(options, tmp_path):
    dpo.train(dataclasses.replace(options("run"), n_steps=9, save_total_limit=3))
    assert sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir()) == [
        "step_00000004",
        "step_00000006",
        "step_00000008",
    ]
    AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "checkpoints" / "step_00000008")


def test_all_checkpoints_are_kept_with_the_initial_weights(monkeypatch, options, tmp_path, model_folder):
    config = dataclasses.replace(options("run"), n_steps=5, save_total_limit=None)
    stop(monkeypatch, dpo.train, config, 1)
    dpo.train(dataclasses.replace(config, resume=True))  # from the beginning, where a checkpoint of step 0 is
    folder = tmp_path / "run" / "checkpoints"
    assert sorted(path.name for path in folder.iterdir()) == ["step_00000000", "step_00000002", "step_00000004"]
    first, initial = (AutoModelForCausalLM.from_pretrained(path) for path in (folder / "step_00000000", model_folder))
    assert all(torch.equal(p, initial.state_dict()[name].to(p.dtype)) for name, p in first.state_dict().items())


def test_a_torn_line_and_leftovers_are_dropped(monkeypatch, options, tmp_path):
    whole = dpo.train(options("whole"))
    stop(monkeypatch, dpo.train, options("run"), 4)
    folder = tmp_path / "run"
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "lo')
    leftover = folder / "checkpoints" / ".step_00000006.77.abcd.tmp"
    leftover.mkdir()
    assert_same_run(whole, dpo.train(dataclasses.replace(options("run"), resume=True)))
    assert not leftover.exists()


def test_resume_begins_a_run_that_had_no_checkpoint_yet(monkeypatch, options):
    whole = dpo.train(options("whole"))
    assert_same_run(whole, stop_and_resume(monkeypatch, dpo.train, options("stopped"), 0))
    assert_same_run(whole, dpo.train(dataclasses.replace(options("new"), resume=True)))


def test_a_finished_run_is_not_resumed(options):
    dpo.train(options("run"))
    with pytest.raises(ConfigError, match="the run in .* has finished"):
        dpo.train(dataclasses.replace(options("run"), resume=True))
    with pytest.raises(ConfigError, match="exists and is not empty"):
        dpo.train(options("run"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"learning_rate": 2e-3}, "learning_rate is 0.002; expected 0.001, as in the run"),
        ({"seed": 6}, "seed is 6; expected 5, as in the run"),
        ({"beta": 0.2}, "beta is 0.2; expected 0.1, as in the run"),
        ({"n_steps": 7}, "n_steps is 7; expected 6, as in the run"),
    ],
)
def test_other_options_are_refused(monkeypatch, options, changes, message):
    stop(monkeypatch, dpo.train, options("run"), 2)
    with pytest.raises(ConfigError, match=message):
        dpo.train(dataclasses.replace(options("run"), resume=True, **changes))


def test_a_run_may_use_another_server(tmp_path):
    vllm = {"rollout_engine": "vllm", "vllm_server_base_url": "http://a:1"}
    common = {"policy_name": "m", "dataset": "d", "reward_functions": ["length"], **vllm}
    other = {"vllm_server_base_url": "http://b:1"}
    config = GRPOConfig(**common)
    (tmp_path / "options.yaml").write_text(to_yaml(config))
    free = {"max_logprob_difference": 0.1, "vllm_gpu_memory_utilization": 0.5}
    check_resumable(tmp_path, dataclasses.replace(config, **other, **free))
    with pytest.raises(ConfigError, match=r"temperature is 0\.5; expected 1\.0, as in the run"):
        check_resumable(tmp_path, dataclasses.replace(config, temperature=0.5))
    sampling = DatagenConfig(**common)
    (tmp_path / "options.yaml").write_text(to_yaml(sampling))
    require_same_options(tmp_path, dataclasses.replace(sampling, **other, fsdp=False), MAY_DIFFER)


def test_an_option_that_came_later_had_its_default(monkeypatch, options, tmp_path):
    stop(monkeypatch, dpo.train, options("run"), 2)
    file = tmp_path / "run" / "options.yaml"
    begun_with = yaml.safe_load(file.read_text())
    del begun_with["compile"]
    file.write_text(yaml.safe_dump(begun_with))
    with pytest.raises(ConfigError, match="compile is True; expected None, as in the run"):
        dpo.train(dataclasses.replace(options("run"), resume=True, compile=True))
    dpo.train(dataclasses.replace(options("run"), resume=True))


def test_another_runs_delta_log_is_refused(monkeypatch, options, tmp_path):
    stop(monkeypatch, dpo.train, options("run"), 2)
    dpo.train(dataclasses.replace(options("other"), seed=8))
    (tmp_path / "run_log").rename(tmp_path / "gone")
    (tmp_path / "other_log").rename(tmp_path / "run_log")
    with pytest.raises(DeltaLogError, match="step 2 is not what the checkpoint of that step holds"):
        dpo.train(dataclasses.replace(options("run"), resume=True))


def test_evaluation_and_checkpoints_change_nothing_of_the_run(options, dpo_options, tmp_path):
    with_all = dpo.train(options("with_all"))
    bare = dpo.train(dpo_options(output_dir=tmp_path / "bare", n_steps=6, sample_steps=None, lr_schedule="cosine"))
    assert rows(with_all["metrics_file"]) == rows(bare["metrics_file"])
    assert [row["step"] for row in rows(tmp_path / "with_all" / "evaluations.jsonl")] == [0, 3, 6]
