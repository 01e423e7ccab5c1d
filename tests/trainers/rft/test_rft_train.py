"""RFT's training stage: SFT under its own name, with a random mask if a profile sets one."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from stopping import assert_same_run, stop

from sparse_opt.config import parse_config
from sparse_opt.errors import ConfigError, DataError
from sparse_opt.masks.mask_set import MaskSet
from sparse_opt.trainers import sft
from sparse_opt.trainers.rft import train as rft


@pytest.fixture
def options(tmp_path, model_folder, monkeypatch):
    monkeypatch.chdir(tmp_path)
    data = tmp_path / "kept.jsonl"
    rows = [{"prompt": f"What is {i} plus {i}?", "completion": f" {2 * i}", "reward": 1.0} for i in range(12)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")

    def make(config_class=rft.RFTConfig, **changes):
        values = {
            "policy_name": str(model_folder),
            "dataset": str(data),
            "output_dir": tmp_path / "run",
            "dtype": "fp32",
            "device": "cpu",
            "n_steps": 4,
            "max_length": 64,
            "learning_rate": 1e-3,
            "sample_steps": None,
            "seed": 5,
        }
        return config_class(**{**values, **changes})

    return make


def losses(summary, read_metrics):
    return [row["loss"] for row in read_metrics(summary)]


def test_it_is_sft_by_another_name(options, tmp_path, read_metrics):
    ours = rft.train(options(output_dir=None))
    theirs = sft.train(options(sft.SFTConfig))
    assert losses(ours, read_metrics) == losses(theirs, read_metrics)
    assert (ours["algorithm"], ours["stage"]) == ("rft", "train")
    assert Path(ours["checkpoint"]) == Path("checkpoints_tiny_llama_rft/final")
    assert "rft train dense: 4 steps on 12 examples" in ours["text"]


def test_sparse_with_every_element_active_is_dense(options, tmp_path, read_metrics):
    dense = rft.train(options(output_dir=tmp_path / "dense"))
    sparse = rft.train(options(output_dir=tmp_path / "sparse", mode="sparse", mask_density=1.0))
    # The same arithmetic in another order; see test_runs.
    assert losses(sparse, read_metrics) == pytest.approx(losses(dense, read_metrics), rel=2e-4)


def test_a_random_mask_is_made_once(options, tmp_path, model):
    changes = {"mode": "sparse", "mask_density": 0.125, "mask_pattern": "run16"}
    config = options(output_dir=tmp_path / "one", **changes)
    assert config.mask == Path("masks/tiny_llama_random_12_5pct_run16_seed5.safetensors") and config.makes_mask
    rft.train(config)
    mask = MaskSet.load(config.mask, model)
    assert mask.density == pytest.approx(0.125, rel=0.02) and mask.pattern == "run16"
    assert mask == MaskSet.random(model, density=0.125, pattern="run16", seed=5)
    written = config.mask.stat().st_mtime_ns
    rft.train(options(output_dir=tmp_path / "two", **changes))
    assert config.mask.stat().st_mtime_ns == written
    MaskSet.random(model, density=0.125, pattern="run16", seed=6).save(config.mask)
    with pytest.raises(ConfigError, match="holds another mask than the random one of .* at density 0.125"):
        rft.train(options(output_dir=tmp_path / "three", **changes))


def test_a_mask_file_that_is_given_is_used(options, tmp_path, mask_file):
    config = options(mode="sparse", mask=mask_file, mask_density=0.1)
    assert config.mask == mask_file and not config.makes_mask
    rft.train(config)
    assert not (tmp_path / "masks").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mask_density": 0.0, "mode": "sparse"}, "'mask_density' is 0.0: expected more than 0, at most 1"),
        ({"mode": "sparse"}, "mode sparse needs a mask file"),
        ({"learning_rate_scale": 0.0}, "'learning_rate_scale' is 0.0: expected more than 0"),
        ({"learning_rate_scale": -1.0}, "'learning_rate_scale' is -1.0: expected more than 0"),
        ({"learning_rate_scale": float("nan")}, "'learning_rate_scale' is nan"),
        ({"learning_rate_scale": float("inf")}, "'learning_rate_scale' is inf"),
    ],
)
def test_options_that_cannot_be(options, changes, message):
    with pytest.raises(ConfigError, match=message):
        options(**changes)


def test_the_learning_rate_is_scaled_once(options, tmp_path, read_metrics, monkeypatch):
    # 2^-10 and 8: products without rounding, so that the runs are the same to the last bit.
    scaled = {"learning_rate": 2.0**-10, "learning_rate_scale": 8.0, "save_steps": 2}
    plain = rft.train(options(output_dir=tmp_path / "plain", learning_rate=2.0**-7))
    whole = rft.train(options(output_dir=tmp_path / "whole", **scaled))
    assert losses(whole, read_metrics) == losses(plain, read_metrics)
    written = yaml.safe_load((tmp_path / "whole/options.yaml").read_text(encoding="utf-8"))
    assert (written["learning_rate"], written["learning_rate_scale"]) == (2.0**-7, 1.0)

    # Gone on with by the same options, and by those that the run wrote.
    torn = options(output_dir=tmp_path / "torn", **scaled)
    stop(monkeypatch, rft.train, torn, step=2)
    shutil.copytree(tmp_path / "torn", tmp_path / "again")
    words = ["--config", str(tmp_path / "again/options.yaml"), f"output_dir={tmp_path / 'again'}", "resume=true"]
    for config in (replace(torn, resume=True), parse_config(rft.RFTConfig, words)):
        assert_same_run(rft.train(config), plain)


def test_the_scale_of_a_profile_goes_with_its_mode():
    words = ["--policy_name", "m", "--dataset", "d", "--profile", "aggressive"]
    assert parse_config(rft.RFTConfig, words).learning_rate_scale == 10
    assert parse_config(rft.RFTConfig, [*words, "mode=sparse", "mask_density=0.2"]).learning_rate_scale == 10
    assert parse_config(rft.RFTConfig, [*words, "mode=dense"]).learning_rate_scale == 1
    assert parse_config(rft.RFTConfig, [*words, "mode=dense", "learning_rate_scale=3"]).learning_rate_scale == 3


def test_the_master_weights_of_a_profile_give_way_to_lean():
    words = ["--policy_name", "m", "--dataset", "d", "--profile", "aggressive"]
    assert parse_config(rft.RFTConfig, words).master_weights
    lean = parse_config(rft.RFTConfig, [*words, "lean=true"])
    assert lean.lean and lean.mode == "sparse" and lean.master_weights is None
    with pytest.raises(ConfigError, match="'lean' is true, and master_weights too"):
        parse_config(rft.RFTConfig, [*words, "lean=true", "master_weights=true"])


def test_nothing_kept_is_an_error(options, tmp_path):
    (tmp_path / "none.jsonl").touch()
    with pytest.raises(DataError, match="none.jsonl: the file is empty"):
        rft.train(options(dataset=str(tmp_path / "none.jsonl")))


def test_the_precision_of_products_is_set(options):
    before = torch.get_float32_matmul_precision()
    try:
        rft.train(options(n_steps=1, float32_matmul_precision="high"))
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision(before)
