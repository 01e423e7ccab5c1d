from __future__ import annotations

import json
import math
import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM

from sparse_opt import MaskSet
from sparse_opt.trainers import profiles

TINY = ("--n_steps", 2, "--batch_size", 2, "--dtype", "fp32", "--device", "cpu", "--delta_log_dir", "none")


@pytest.fixture
def dpo(sparse_opt, files, tmp_path):
    """`dpo(*words)` is a run of two steps on the tiny model into tmp_path/out."""

    def call(*words: object, dataset=files.pairs, output_dir=tmp_path / "out"):
        where = ("--policy_name", files.model, "--dataset", dataset, "--output_dir", output_dir)
        return sparse_opt("train", "dpo", *where, *TINY, *words)

    return call


def test_trains_and_prints_json(dpo, tmp_path):
    summary = json.loads(dpo("--json").done())
    assert summary["first"]["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert summary["checkpoint"] == str(tmp_path / "out" / "final")
    AutoModelForCausalLM.from_pretrained(summary["checkpoint"])


def test_text_says_where_the_files_are(dpo, tmp_path):
    text = dpo("--delta_log_dir", tmp_path / "log").done()
    assert text.startswith("dpo dense: 2 steps\n")  # no batch is compared with another
    for name in ("out/final", "out/metrics.jsonl", "log"):
        assert str(tmp_path / name) in text


def test_sft_and_options_from_a_file(sparse_opt, files, tmp_path):
    config = tmp_path / "sft.yaml"
    config.write_text(f"policy_name: {files.model}\ndataset: {files.pairs}\nn_steps: 9\ndtype: fp32\nbatch_size: 2\n")
    words = ("--config", config, "--n_steps", 1, f"output_dir={tmp_path / 'out'}", "device=cpu", "--json")
    assert json.loads(sparse_opt("train", "sft", *words).done())["n_steps"] == 1


def test_a_typo_names_the_nearest_key(dpo, sparse_opt, files, tmp_path):
    assert "the nearest is 'learning_rate'" in dpo("--learning_rat", 1e-3).failed_in_one_line(2)
    assert "the nearest is 'beta'" in dpo("bta=0.2").failed_in_one_line(2)
    config = tmp_path / "run.yaml"
    config.write_text("gradient_acumulation_steps: 2\n")
    line = dpo("--config", config).failed_in_one_line(2)
    assert "the nearest is 'gradient_accumulation_steps'" in line
    assert str(config) in line
    assert "ALGORITHM" in sparse_opt("train", "pdo").failed_in_one_line(2)
    assert [path.name for path in tmp_path.iterdir()] == ["run.yaml"]


def test_a_mask_for_another_model(dpo, files, tmp_path):
    wider_model = AutoModelForCausalLM.from_pretrained(files.wider_model)
    mask = MaskSet.random(wider_model, density=0.1).save(tmp_path / "mask.safetensors")
    line = dpo("--mode", "sparse", "--mask", mask).failed_in_one_line(1)
    assert str(mask) in line
    assert "model.layers.0.mlp.down_proj.weight is [32, 32] in the mask, [16, 32] in the model" in line
    assert line.count(" in the mask, ") == 3
    assert line.endswith("; and 17 more")
    assert [path.name for path in tmp_path.iterdir()] == ["mask.safetensors"]


def test_a_truncated_mask_file(dpo, files, tmp_path):
    mask = MaskSet({"w": torch.tensor([0, 5])}, {"w": (2, 4)}).save(tmp_path / "mask.safetensors")
    mask.write_bytes(mask.read_bytes()[:-5])
    assert str(mask) in dpo("--mode", "sparse", "--mask", mask).failed_in_one_line(1)
    assert [path.name for path in tmp_path.iterdir()] == ["mask.safetensors"]


def test_truncated_model_weights(dpo, files, tmp_path):
    checkpoint = shutil.copytree(files.model, tmp_path / "model")
    weights = checkpoint / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    line = dpo("--checkpoint", checkpoint).failed_in_one_line(1)
    assert f"cannot load a causal language model from {checkpoint}: " in line
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_damaged_checkpoint_is_not_resumed(dpo, tmp_path):
    dpo("--save_steps", 1).done()
    run = tmp_path / "out"
    (run / "summary.json").unlink()  # as if it had been killed before its end
    shutil.rmtree(run / "final")
    weights = run / "checkpoints" / "step_00000001" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    line = dpo("--save_steps", 1, "--resume").failed_in_one_line(1)
    assert f"checkpoint {weights.parent}: damaged: model.safetensors has digest " in line
    dpo("--save_steps", 1, "--resume", "--resume_step", 0).done()


def test_a_backend_that_cannot_run(dpo, tmp_path, monkeypatch):
    mask = MaskSet({"model.norm.weight": torch.tensor([0])}, {"model.norm.weight": (16,)}).save(
        tmp_path / "mask.safetensors"
    )
    sparse = ("--mode", "sparse", "--mask", mask, "--delta_log_dir", tmp_path / "log")
    assert "backend 'cuda' (argument backend)" in dpo(*sparse, "--backend", "cuda").failed_in_one_line(1)
    monkeypatch.setenv("SPARSE_OPT_BACKEND", "fastest")
    assert "'fastest' (SPARSE_OPT_BACKEND)" in dpo(*sparse).failed_in_one_line(1)
    # The delta log goes by the variable also where the optimizer does not.
    assert "'fastest' (SPARSE_OPT_BACKEND)" in dpo(*sparse, "--backend", "reference").failed_in_one_line(1)
    assert [path.name for path in tmp_path.iterdir()] == ["mask.safetensors"]


def test_a_subset_larger_than_the_data_is_said_in_one_line(dpo, files):
    outcome = dpo("--subset_size", 25)
    outcome.done()
    assert outcome.err == f"sparse-opt: warning: dataset {files.pairs}: has 24 rows, not subset_size 25\n"


def test_a_missing_dataset_column(dpo, files, tmp_path):
    data = tmp_path / "pairs.jsonl"
    data.write_text(json.dumps({"prompt": "a", "chosen": "b"}) + "\n")
    line = dpo(dataset=data).failed_in_one_line(1)
    assert str(data) in line
    assert "rejected" in line
    assert [path.name for path in tmp_path.iterdir()] == ["pairs.jsonl"]


@pytest.mark.parametrize("option", ["output_dir", "delta_log_dir"])
def test_an_output_folder_that_cannot_be_made(dpo, tmp_path, option):
    (tmp_path / "file").write_text("in the way")
    folder = tmp_path / "file" / "out"
    words = {"output_dir": folder} if option == "output_dir" else {}
    flags = ("--delta_log_dir", folder) if option == "delta_log_dir" else ()
    line = dpo(*flags, **words).failed_in_one_line(2)
    assert f"'{option}'" in line
    assert str(folder) in line
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_read_only_output_folder(dpo, tmp_path, monkeypatch):
    def refuse(*args, **kwargs):
        raise PermissionError(13, "Permission denied")

    # As root every folder can be written: let it be refused as another user would see it.
    monkeypatch.setattr("tempfile.mkdtemp", refuse)
    assert "Permission denied" in dpo().failed_in_one_line(2)
    assert list(tmp_path.iterdir()) == []


def test_a_failed_last_write_leaves_no_checkpoint(dpo, tmp_path, monkeypatch):
    def refuse(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("transformers.PreTrainedTokenizerFast.save_pretrained", refuse)
    assert "No space left on device" in dpo().failed_in_one_line(1)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "metrics.jsonl",
        "options.yaml",
        "samples.jsonl",
    ]


def test_out_of_gpu_memory_says_what_to_lower(dpo, monkeypatch):
    def exhaust(config):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nSee the documentation.")

    monkeypatch.setattr("sparse_opt.trainers.dpo.train", exhaust)
    line = dpo().failed_in_one_line(1)
    assert "lower --batch_size" in line
    assert "Tried to allocate 2.00 GiB" in line


def test_show_optimizations_of_the_profiles_is_their_files_and_memory(sparse_opt):
    shown = sparse_opt("train", "rft", "show_optimizations")
    assert (shown.code, shown.err) == (0, "")
    for name in profiles.NAMES:
        for part in ("train", "sampling"):
            for line in profiles.profile_file(name, part).read_text(encoding="utf-8").splitlines():
                assert line in shown.out
    for line in ("conservative: 16 bytes per weight in training, 4", "balanced: 18 bytes", "aggressive: 4 bytes"):
        assert line in shown.out
    found = json.loads(sparse_opt("train", "rft", "show_optimizations", "--profile", "balanced", "--json").out)
    assert list(found["profiles"]) == ["balanced"]
    assert found["profiles"]["balanced"]["settings"]["train"]["dtype"] == "bf16"
    assert "the nearest is 'balanced'" in sparse_opt("train", "rft", "show_optimizations", "--profile", "balance").err
