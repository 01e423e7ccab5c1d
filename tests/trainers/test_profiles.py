"""Profiles: that they are complete, that they are data, and that what a user gives wins over them."""

from __future__ import annotations

import pytest
import yaml

from sparse_opt.config import parse_config, to_yaml
from sparse_opt.errors import ConfigError
from sparse_opt.trainers.profiles import NAMES, STAGES, load_profile
from sparse_opt.trainers.rft import train as rft

WORDS = ["--policy_name", "m", "--dataset", "d.jsonl"]
SETTING = {"value": True, "stages": ["train"], "does": "this", "costs": "that"}


def configured(stage, *words):
    config_class, _ = rft.STAGES[stage]
    return parse_config(config_class, [*WORDS, *words])


@pytest.fixture
def profile_file(tmp_path):
    """`profile_file({"packing": {...}})`: the path of a profile with these settings."""

    def write(settings, **others):
        path = tmp_path / "own.yaml"
        path.write_text(yaml.safe_dump({"summary": "mine", "settings": settings, **others}), encoding="utf-8")
        return str(path)

    return write


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", NAMES)
def test_every_setting_of_a_profile_is_an_option_of_its_stages(name, stage):
    config = configured(stage, "--profile", name)
    values = load_profile(name).values(stage)
    assert values and {key: getattr(config, key) for key in values} == values
    assert config.profile == name


@pytest.mark.parametrize("name", NAMES)
def test_every_setting_says_what_it_does_and_costs(name):
    profile = load_profile(name)
    assert profile.summary and profile.settings
    for setting in profile.settings:
        assert len(setting.does) > 20 and len(setting.costs) > 10, setting.key
        assert {part.key for part in profile.with_needs(setting.key)} >= {setting.key, *setting.needs}


def test_profiles_average_over_as_many_examples_a_step():
    configs = [configured("train", "--profile", name) for name in NAMES]
    assert {config.examples_per_step for config in configs} == {32}


def test_what_is_given_wins(tmp_path):
    (tmp_path / "mine.yaml").write_text("packing: false\n", encoding="utf-8")
    config = configured(
        "train", "--batch_size", "3", "--profile", "balanced", "dtype=fp32", "--config", str(tmp_path / "mine.yaml")
    )
    assert (config.batch_size, config.dtype, config.packing) == (3, "fp32", False)
    assert config.gradient_accumulation_steps == load_profile("balanced").values("train")["gradient_accumulation_steps"]


def test_the_options_of_a_run_are_its_options_again(tmp_path):
    config = configured("train", "--profile", "aggressive", "--batch_size", "3")
    (tmp_path / "options.yaml").write_text(to_yaml(config), encoding="utf-8")
    assert parse_config(rft.RFTConfig, ["--config", str(tmp_path / "options.yaml")]) == config


def test_a_profile_of_ones_own(profile_file):
    path = profile_file({"packing": SETTING, "temperature": {**SETTING, "value": 0.7, "stages": ["datagen"]}})
    assert configured("train", "--profile", path).packing is True
    assert configured("datagen", "--profile", path).temperature == 0.7
    assert configured("test", "--profile", path).temperature == 0.0


@pytest.mark.parametrize(
    ("settings", "others", "message"),
    [
        ({"packin": SETTING}, {}, "unknown option 'packin' .from profile .*own.yaml.; the nearest is 'packing'"),
        ({"packing": {**SETTING, "value": "much"}}, {}, "'packing' .from profile .* is 'much': expected bool"),
        ({"packing": {**SETTING, "cost": "x"}}, {}, "packing: unknown key 'cost'; the nearest is 'costs'"),
        ({"packing": {"value": 1, "stages": ["train"], "does": "x"}}, {}, "packing: the key 'costs' is missing"),
        ({"packing": {**SETTING, "stages": ["trian"]}}, {}, "packing: stages are trian; wanted some of datagen, train"),
        ({"packing": {**SETTING, "needs": ["dtype"]}}, {}, "packing needs dtype, which it does not set"),
        ({"packing": {**SETTING, "does": 3}}, {}, "packing: 'does' is a int; wanted a str"),
        ({"packing": True}, {}, "packing: found a bool; wanted the keys value, stages, does, costs"),
        ({"packing": SETTING}, {"setings": 1}, "unknown key 'setings'; the nearest is 'settings'"),
    ],
)
def test_profiles_that_are_none(profile_file, settings, others, message):
    with pytest.raises(ConfigError, match=message):
        configured("train", "--profile", profile_file(settings, **others))


def test_profiles_that_cannot_be_read(tmp_path):
    with pytest.raises(ConfigError, match="'profile' is 'balance': wanted .*; the nearest is 'balanced'"):
        configured("train", "--profile", "balance")
    with pytest.raises(ConfigError, match="cannot read profile /nowhere/p.yaml: No such file"):
        configured("test", "--profile", "/nowhere/p.yaml")
    (tmp_path / "p.yaml").write_text("a: [", encoding="utf-8")
    with pytest.raises(ConfigError, match="p.yaml is not valid YAML"):
        configured("test", "--profile", str(tmp_path / "p.yaml"))
