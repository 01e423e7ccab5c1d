from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest

from sparse_opt.config import option, parse_config, to_yaml
from sparse_opt.errors import ConfigError


@dataclass(kw_only=True)
class Options:
    """Options of a test.

    More words that --help leaves out.
    """

    model: str = option(help="what to load", aliases=("model_name",))
    learning_rate: float = option(1e-6, "peak learning rate")
    n_steps: int = option(100, "steps, 100 % of them")
    mlp_only: bool = option(False, "MLPs only")
    subset_size: int | None = option(None, "examples")
    master_weights: bool | None = option(None, "fp32 copies")
    output_dir: Path | None = option(None, "folder")
    mode: Literal["dense", "sparse"] = option("dense", "which weights")
    steps: str = option("every:5", "schedule")
    layers: list[int] = option([], "layers")


def parse(*argv: str) -> Options:
    return parse_config(Options, ["model=m", *argv], prog="test")


def test_defaults_and_types():
    options = parse(
        "--learning_rate", "5e-5", "--n-steps=7", "--mlp_only", "--output_dir", "a/b", "--mode", "sparse", "layers=1,2"
    )
    assert options == Options(
        model="m", learning_rate=5e-5, n_steps=7, mlp_only=True, output_dir=Path("a/b"), mode="sparse", layers=[1, 2]
    )
    assert Options(model="m").layers is not Options(model="m").layers


@pytest.mark.parametrize(
    ("words", "value"),
    [
        (["--mlp_only"], True),
        (["--mlp-only"], True),
        (["--no-mlp_only"], False),
        (["--mlp_only", "--no_mlp_only"], False),
        (["--mlp_only", "true"], True),
        (["--mlp_only", "False"], False),
        (["--mlp_only=yes"], True),
        (["mlp_only=off"], False),
        (["--mlp_only", "n_steps=3"], True),
    ],
)
def test_booleans(words, value):
    assert parse(*words).mlp_only is value


@pytest.mark.parametrize(("word", "value"), [("none", None), ("true", True), ("false", False)])
def test_optional_boolean(word, value):
    assert parse("--master_weights", word).master_weights is value


def test_yaml_below_flags_and_overrides_in_their_order(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("learning_rate: 5e-5\nn_steps: 3\nsubset_size: 8\nmode: sparse\nsteps: [1, 5, 10]\n")
    assert parse("--config", str(file)) == Options(
        model="m", learning_rate=5e-5, n_steps=3, subset_size=8, mode="sparse", steps="1,5,10"
    )
    options = parse("--n_steps", "4", "subset_size=none", "--config", str(file), "n_steps=5")
    assert (options.n_steps, options.subset_size, options.learning_rate) == (5, None, 5e-5)
    assert parse("n_steps=5", "--n_steps", "4").n_steps == 4
    second = tmp_path / "second.yaml"
    second.write_text("n_steps: 9\n")
    assert parse("--config", str(file), f"--config={second}").n_steps == 9


def test_alias_and_written_config_read_back(tmp_path):
    assert parse("--model_name", "other").model == "other"
    options = parse("--output_dir", "x", "layers=3", "--mlp_only")
    file = tmp_path / "options.yaml"
    file.write_text(to_yaml(options))
    assert parse_config(Options, ["--config", str(file)]) == options


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["--learning_rte", "1"], ["'learning_rte'", "--learning_rte", "'learning_rate'"]),
        (["--learning_rte"], ["'learning_rte'", "'learning_rate'"]),
        (["n_step=1"], ["'n_step'", "'n_step=1'", "'n_steps'"]),
        (["--n_steps", "ten"], ["'n_steps'", "--n_steps", "'ten'", "expected int"]),
        (["--n_steps", "1.5"], ["'n_steps'", "'1.5'", "expected int"]),
        (["--subset_size", "x"], ["'subset_size'", "expected int or none"]),
        (["--learning_rate", "fast"], ["'fast'", "expected float"]),
        (["--mlp_only=maybe"], ["'mlp_only'", "'maybe'", "expected bool"]),
        (["--mode", "spares"], ["'mode'", "'spares'", "dense, sparse", "nearest is 'sparse'"]),
        (["--n_steps"], ["'--n_steps'", "expected a value"]),
        (["--n_steps", "--mlp_only"], ["'--n_steps'", "expected a value"]),
        (["stray"], ["'stray'", "key=value"]),
        (["--config", "missing.yaml"], ["missing.yaml", "No such file"]),
    ],
)
def test_errors_name_key_value_and_source(words, parts):
    with pytest.raises(ConfigError) as error:
        parse(*words)
    message = str(error.value)
    assert "\n" not in message
    assert [part for part in parts if part not in message] == [], message


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("learning_rte: 1", ["'learning_rte'", "run.yaml", "'learning_rate'"]),
        ("n_steps: [1]", ["'n_steps'", "run.yaml", "[1]", "expected int"]),
        ("n_steps: true", ["'n_steps'", "True", "expected int"]),
        ("mlp_only: 1", ["'mlp_only'", "expected bool"]),
        ("a: b: c", ["run.yaml", "not valid YAML", "line 1"]),
        ("- a", ["run.yaml", "holds a list"]),
    ],
)
def test_yaml_errors_name_the_file(tmp_path, text, parts):
    file = tmp_path / "run.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as error:
        parse("--config", str(file))
    message = str(error.value)
    assert "\n" not in message
    assert [part for part in parts if part not in message] == [], message


def test_missing_required_option():
    with pytest.raises(ConfigError, match="--model"):
        parse_config(Options, [])


def test_help_shows_texts_and_defaults(capsys):
    with pytest.raises(SystemExit) as exit_:
        parse_config(Options, ["--help"], prog="sparse-opt train test")
    assert exit_.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    parts = [
        "usage: sparse-opt train test",
        "Options of a test.",
        "--model str",
        "--model_name",
        "what to load (required)",
    ]
    parts += ["(default: 1e-06)", "100 % of them", "--no-mlp_only", "dense|sparse", "(default: none)"]
    assert [part for part in parts if part not in text] == []


def test_import_leaves_torch_alone():
    code = "import sys, sparse_opt.config; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
