"""`sparse-opt train sft | dpo | grpo`: TRL's trainers, dense, under a mask and with adapters, as a user starts them."""

import json
import os
import shutil

import pytest
import torch
import yaml
from launch import run_command
from transformers import AutoModelForCausalLM, TrainerCallback

from sparse_opt import DeltaLog, MaskSet
from sparse_opt.file_lock import FileLock

DENSE_RATES = {"sft": 2e-5, "dpo": 1e-6, "grpo": 1e-6}


def changed(before, after) -> dict[str, torch.Tensor]:
    """name -> bool tensor of the elements whose bits differ."""
    before, after = (AutoModelForCausalLM.from_pretrained(model).state_dict() for model in (before, after))
    return {name: before[name] != after[name] for name in before}


@pytest.mark.parametrize("algorithm", DENSE_RATES)
def test_all_weights_or_those_of_a_mask(train, files, tmp_path, algorithm):
    more = ("--learning_rate", 1e-3, "--delta_log_dir", tmp_path / "log", "--beta", 0.1)
    text = train(algorithm, *(more[:-2] if algorithm == "sft" else more)).done()
    assert text.splitlines()[0] == f"{algorithm}: {files.model}, all weights, learning rate 0.001"
    assert DeltaLog.open(tmp_path / "log").steps == (0, 1, 2)
    dense = sum(int(elements.sum()) for elements in changed(files.model, tmp_path / "out").values())
    shutil.rmtree(tmp_path / "out")

    first = train(algorithm, "--mask_density", 0.1, "--mask_pattern", "run16", "--mask_seed", 3).done().splitlines()[0]
    mask = MaskSet.load(tmp_path / "out" / "mask.safetensors")
    assert (mask.pattern, mask.density) == ("run16", pytest.approx(0.1, rel=0.1))
    rate = DENSE_RATES[algorithm] * mask.density**-0.75
    assert f"random mask (run16, seed 3) of {mask.nnz:,} elements" in first
    assert f"learning rate {rate:.3g}: {DENSE_RATES[algorithm]:g}, the dense default, x " in first
    assert "learning_rate" not in yaml.safe_load((tmp_path / "out" / "options.yaml").read_text())  # it follows
    found = changed(files.model, tmp_path / "out")
    if algorithm != "grpo":  # whose completions are all wrong
        assert 0 < sum(int(elements.sum()) for elements in found.values()) < 0.5 * dense
    for name in mask.names:
        assert set(found[name].flatten().nonzero().flatten().tolist()) <= set(mask[name].tolist()), name


def test_a_given_rate_is_taken_and_the_factor_named(train, files, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(files.model)
    mask = MaskSet.random(model, density=0.025).save(tmp_path / "mask.safetensors")
    outcome = train("dpo", "--mask", mask, "--learning_rate", 1e-6, "--dtype", "bfloat16", "--master_weights", "false")
    assert outcome.done().splitlines()[0].endswith("learning rate 1e-06")
    (rate,) = [line for line in outcome.err.splitlines() if "dense default" in line]
    assert "learning_rate is 1e-06, and the dense default 1e-06: under a mask of density 0.0" in rate
    assert "density^-0.75" in rate
    quiet = train("dpo", "--mask", mask, "--dtype", "bfloat16", "--learning_rate", 1e-5).err
    assert "dense default" not in quiet


def test_adapters(train, tmp_path):
    assert "LoRA of rank 4" in train("sft", "--use_peft", "--lora_r", 4).done()
    assert (tmp_path / "out" / "adapter_model.safetensors").is_file()
    for words in (("--mask_density", 0.1), ("--delta_log_dir", tmp_path / "log"), ("--statistics_steps", 1)):
        assert "--use_peft" in train("sft", "--use_peft", *words).failed_in_one_line(2)


def test_options_come_from_files_flags_and_words(train, tmp_path):
    config = tmp_path / "run.yaml"
    config.write_text("env: {SPARSE_OPT_TEST: 1}\nmax_steps: 9\nsave_strategy: no\nlearning_rate: 5e-5\nseed: 3\n")
    secret = 'model_init_kwargs={"token": "hf_secret"}'
    train("sft", "--config", config, "max_steps=1", "--bf16_full_eval", "--seed", 4, "seed=5", secret).done()
    assert "hf_secret" not in (tmp_path / "out" / "options.yaml").read_text()
    options = yaml.safe_load((tmp_path / "out" / "options.yaml").read_text())
    found = [options[name] for name in ("max_steps", "save_strategy", "learning_rate", "seed", "bf16", "use_cpu")]
    assert found == [1, "no", 5e-5, 5, *((None, False) if torch.accelerator.is_available() else (False, True))]
    words = ("--config", tmp_path / "out" / "options.yaml", "--output_dir", tmp_path / "again")
    train("sft", *words).done()
    again = yaml.safe_load((tmp_path / "again" / "options.yaml").read_text())
    assert {**again, "max_steps": 1, "output_dir": None} == {**options, "output_dir": None}


def test_a_wrong_option_is_refused_before_anything_is_loaded(train, sparse_opt, tmp_path):
    config = tmp_path / "run.yaml"
    config.write_text("gradient_acumulation_steps: 2\n")
    line = train("dpo", "--config", config).failed_in_one_line(2)
    assert str(config) in line and "the nearest is 'gradient_accumulation_steps'" in line
    config.write_text("seed: 1\nmodel_init_kwargs:\n  a: 1\n  a: 2\n")
    line = train("dpo", "--config", config).failed_in_one_line(2)
    assert "'a' is in line 3 and again in line 4: give it once" in line and str(config) in line
    for words, said in (
        (("--mask", "a", "--mask_density", 0.1), "exclude each other"),
        (("--mask_density", 2), "--mask_density is 2.0"),
        (("--resume_from_checkpoint", "true"), "has no checkpoint"),
        (("--dataset_name", "nowhere.jsonl", "--mask_density", 0.1), "dataset nowhere.jsonl: no such file or folder"),
        (("--mask", "nowhere.safetensors"), "--mask nowhere.safetensors: no such file"),
        (("--model_name_or_path", "nowhere/at_all"), "--model_name_or_path nowhere/at_all: "),
    ):
        assert said in train("dpo", *words).failed_in_one_line(2)
    assert "--dataset_test_split test: " in train("dpo", "--eval_strategy", "epoch").error_line(2)
    assert "--log_margins is an option of dpo" in train("sft", "--log_margins").failed_in_one_line(2)
    line = train("grpo", "--per_device_train_batch_size", 1).failed_in_one_line(2)
    assert "Set --per_device_train_batch_size times --gradient_accumulation_steps" in line
    assert "--model_name_or_path is missing" in sparse_opt("train", "sft").failed_in_one_line(2)
    assert "needs --reward_funcs" in sparse_opt("train", "grpo", "--model_name_or_path", "m").failed_in_one_line(2)
    assert [path.name for path in tmp_path.iterdir()] == ["run.yaml"]


class Interrupt(TrainerCallback):
    """Ctrl-C after a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            raise KeyboardInterrupt


@pytest.fixture
def interrupted(train, monkeypatch):
    """`interrupted(3, "dpo", *words)` is a run that Ctrl-C ends after its third step."""

    def call(step: int, *words: object):
        from sparse_opt.integrations.trl import train as module

        add = module._add_callbacks

        def with_interrupt(algorithm, trainer, options):
            trainer.add_callback(Interrupt(step))
            return add(algorithm, trainer, options)

        with monkeypatch.context() as patch:
            patch.setattr(module, "_add_callbacks", with_interrupt)
            return train(*words)

    return call


def test_an_interrupted_run_goes_on_to_the_same_weights(train, interrupted, tmp_path, monkeypatch):
    monkeypatch.setattr("sparse_opt.progress.SECONDS_BETWEEN_LINES", 0.0)
    words = ("--max_steps", 4, "--save_steps", 2, "--mask_density", 0.2, "--logging_steps", 1, "--statistics_steps", 1)
    words += ("--log_margins", "--learning_rate", 1e-3)
    whole = train("dpo", *words, "--output_dir", tmp_path / "whole")
    whole.done()
    assert "step 2 of 4, loss 0.6" in whole.err and " s left" in whole.err
    stopped = interrupted(3, "dpo", *words)
    assert stopped.code == 130
    kept = tmp_path / "out" / "checkpoint-2"
    assert (
        f"interrupted after step 3 of 4; {kept} is kept: repeat the command with --resume_from_checkpoint {kept}"
        in (stopped.err)
    )
    (tmp_path / "out" / "checkpoint-3").mkdir()  # as a run that is killed while it saves leaves it
    refused = train("dpo", *words, "--resume_from_checkpoint", "true")
    assert refused.code == 1 and "checkpoint-3: has no sparse_opt_manifest.json" in refused.err
    assert f"the last intact one is {kept.name}: repeat the command with --resume_from_checkpoint {kept}" in refused.err
    resumed = train("dpo", *words, "--resume_from_checkpoint", kept)
    assert "missing keys" not in resumed.err and resumed.done()  # of the output layer, tied to the embedding
    assert not any(elements.any() for elements in changed(tmp_path / "whole", tmp_path / "out").values())
    for name in ("update_statistics.jsonl", "logs/margins/margins_log.jsonl"):
        assert (tmp_path / "out" / name).read_text() == (tmp_path / "whole" / name).read_text()
    assert [json.loads(line)["step"] for line in (tmp_path / "out" / "memory.jsonl").open()] == [1, 2, 3, 4, 4]


def test_a_new_run_replaces_what_an_earlier_one_wrote_about_its_steps(train, tmp_path):
    statistics, margins = tmp_path / "out/update_statistics.jsonl", tmp_path / "out/logs/margins"
    train("dpo", "--statistics_steps", 1, "--log_margins").done()
    train("dpo", "--statistics_steps", 1, "--log_margins", "--max_steps", 1).done()
    assert [json.loads(line)["step"] for line in statistics.open()] == [1]
    assert [path.name for path in margins.rglob("*.npy")] == ["step_00001.npy"]
    train("dpo").done()
    assert not statistics.exists() and not list(margins.rglob("*.*"))


@pytest.mark.parametrize("mask", [(), ("--mask_density", 0.2)], ids=["dense", "sparse"])
def test_a_run_that_is_refused_changes_nothing_in_the_folder_of_another(train, tmp_path, mask):
    train("dpo", *mask, "--save_steps", 1, "--save_total_limit", 1).done()
    assert [path.parent.name for path in tmp_path.glob("out/checkpoint-*/sparse_opt_manifest.json")] == ["checkpoint-2"]
    before = (tmp_path / "out" / "options.yaml").read_bytes()
    lock = FileLock(tmp_path / "out" / "_run.lock")
    try:
        refused = train("dpo", *mask, "--save_steps", 1, "--seed", 7)
    finally:
        lock.release()
    assert refused.code == 2 and "another run is saving checkpoints to" in refused.err
    assert (tmp_path / "out" / "options.yaml").read_bytes() == before


def test_checkpoints_of_an_earlier_run_are_not_of_this_one(train, interrupted, tmp_path):
    train("dpo", "--mask_density", 0.2, "--save_steps", 1).done()
    stopped = interrupted(1, "dpo", "--mask_density", 0.2, "--max_steps", 9, "--save_steps", 8)
    assert "no checkpoint was saved" in stopped.err
    refused = train("dpo", "--mask_density", 0.2, "--save_steps", 1, "--resume_from_checkpoint", "true")
    assert refused.code == 1 and "is of an earlier run in its folder" in refused.err


def test_options_and_rows_without_effect(train, tmp_path):
    line = train("dpo", "--mask_pattern", "tile64").failed_in_one_line(2)
    assert "--mask_pattern is of a random mask: give --mask_density" in line
    line = train("sft", "--stochastic_rounding").failed_in_one_line(2)
    assert "--stochastic_rounding has no effect without a mask" in line
    refused = train("sft", "--max_length", 1)
    assert refused.code == 2 and "no row has a token to train" in refused.err


@pytest.mark.dist
def test_two_processes(files, rows, tmp_path):
    words = f"--model_name_or_path {files.model} --dataset_name {rows} --output_dir {tmp_path / 'out'} --max_steps 2"
    words += " --per_device_train_batch_size 2 --report_to none --mask_density 0.1 --log_margins --statistics_steps 1"
    environment = {**os.environ, "HF_DATASETS_CACHE": str(tmp_path / "datasets"), "OMP_NUM_THREADS": "1"}
    ended = run_command(2, ["train", "dpo", *words.split(), "--use_cpu"], environment)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("dpo: ") == ended.stdout.count("trained to step 2") == 1
    margins = [json.loads(line) for line in (tmp_path / "out/logs/margins/margins_log.jsonl").open()]
    assert [row["n"] for row in margins] == [4, 4]
    assert len((tmp_path / "out" / "update_statistics.jsonl").read_text().splitlines()) == 2
    (memory,) = [json.loads(line) for line in (tmp_path / "out" / "memory.jsonl").open()]
    assert len(memory["ranks"]) == 2


def test_a_mask_for_another_model(train, files, tmp_path):
    mask = MaskSet.random(AutoModelForCausalLM.from_pretrained(files.wider_model), density=0.1)
    file = mask.save(tmp_path / "mask.safetensors")
    line = train("dpo", "--mask", file).failed_in_one_line(1)
    assert f"--mask {file}: mask does not fit the model: " in line
    assert "model.layers.0.mlp.down_proj.weight is [32, 32] in the mask, [16, 32] in the model" in line
    assert line.endswith(": make a mask for this model ('sparse-opt mask'), or train the model of this mask")


def test_out_of_gpu_memory_says_what_to_lower(train, monkeypatch):
    def exhaust(*args):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nSee the documentation.")

    monkeypatch.setattr("sparse_opt.integrations.trl.train.run", exhaust)
    line = train("dpo").failed_in_one_line(1)
    assert "lower --per_device_train_batch_size" in line and "Tried to allocate 2.00 GiB" in line
