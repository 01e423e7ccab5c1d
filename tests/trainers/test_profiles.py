"""Profiles: plain config files, below everything that a user gives."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from sparse_opt.config import parse_config, to_yaml
from sparse_opt.errors import ConfigError
from sparse_opt.trainers import profiles
from sparse_opt.trainers.rft import train as rft

WORDS = ["--policy_name", "m", "--dataset", "d.jsonl"]


def configured(stage, *words):
    config_class, _ = rft.STAGES[stage]
    return parse_config(config_class, [*WORDS, *words])


def profile_file(name, stage):
    return Path(profiles.__file__).parent / name / ("train.yaml" if stage == "train" else "sampling.yaml")


@pytest.mark.parametrize("stage", rft.STAGES)
@pytest.mark.parametrize("name", profiles.NAMES)
def test_a_profile_is_a_config_file(name, stage):
    config = configured(stage, "--profile", name)
    values = yaml.safe_load(profile_file(name, stage).read_text(encoding="utf-8"))
    assert values and {key: getattr(config, key) for key in values} == values
    assert config.profile == name
    config.profile = None
    assert configured(stage, "--config", str(profile_file(name, stage))) == config


def test_profiles_average_over_as_many_examples_a_step():
    configs = [configured("train", "--profile", name) for name in profiles.NAMES]
    assert {config.examples_per_step for config in configs} == {32}


def test_what_is_given_wins(tmp_path):
    (tmp_path / "mine.yaml").write_text("packing: false\n", encoding="utf-8")
    config = configured(
        "train", "--batch_size", "3", "--profile", "balanced", "dtype=fp32", "--config", str(tmp_path / "mine.yaml")
    )
    assert (config.batch_size, config.dtype, config.packing) == (3, "fp32", False)
    assert config.gradient_accumulation_steps == configured("train", "profile=balanced").gradient_accumulation_steps


def test_the_options_of_a_run_are_its_options_again(tmp_path):
    config = configured("train", "--profile", "aggressive", "--batch_size", "3")
    (tmp_path / "options.yaml").write_text(to_yaml(config), encoding="utf-8")
    assert parse_config(rft.RFTConfig, ["--config", str(tmp_path / "options.yaml")]) == config


def test_a_profile_of_ones_own(tmp_path):
    train, sampling = tmp_path / "train.yaml", tmp_path / "sampling.yaml"
    train.write_text("packing: true\n", encoding="utf-8")
    sampling.write_text("temperature: 0.7\n", encoding="utf-8")
    for path in (str(train), str(tmp_path)):
        assert configured("train", "--profile", path).packing is True
    for stage in ("datagen", "test"):
        assert configured(stage, "--profile", str(tmp_path)).temperature == 0.7


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("packin: true", "unknown option 'packin' .from profile .*own.yaml.; the nearest is 'packing'"),
        ("packing: much", "'packing' .from profile .*own.yaml. is 'much': expected bool"),
        ("- packing", "profile .*own.yaml holds a list; expected 'key: value' lines"),
        ("a: [", "profile .*own.yaml is not valid YAML"),
    ],
)
def test_profiles_that_are_none(tmp_path, content, message):
    (tmp_path / "own.yaml").write_text(content, encoding="utf-8")
    with pytest.raises(ConfigError, match=message):
        configured("train", "--profile", str(tmp_path / "own.yaml"))


def test_profiles_that_cannot_be_read(tmp_path):
    with pytest.raises(
        ConfigError, match="'profile' is 'balance', neither a folder nor a .yaml file; the nearest is 'balanced'"
    ):
        configured("train", "--profile", "balance")
    with pytest.raises(ConfigError, match="cannot read profile /nowhere/p.yaml: No such file"):
        configured("test", "--profile", "/nowhere/p.yaml")
    with pytest.raises(ConfigError, match=f"cannot read profile {tmp_path}/train.yaml: No such file"):
        configured("train", "--profile", str(tmp_path))
