"""Every command reads its options from YAML files, flags and key=value words, the later ones winning."""

from __future__ import annotations

import json

import pytest

from sparse_opt.cli.analyze import _parser as analyze_parser
from sparse_opt.cli.delta import _parser as delta_parser
from sparse_opt.cli.mask import _parser as mask_parser
from sparse_opt.errors import ConfigError

LOG = ("--delta_log_dir", "log")


def parse(*words):
    return analyze_parser().parse_words(["sparsity", *LOG, *words])


def test_later_settings_win_and_files_come_first(tmp_path):
    file = tmp_path / "options.yaml"
    file.write_text("steps: [1, 2]\ntolerance: 1e-5\ndevice: cuda\nmlp-only: true\n")
    args = parse("--device", "cpu", f"config={file}", "steps=3,4")
    assert (args.steps, args.tolerance, args.device, args.mlp_only) == ([3, 4], [1e-5], "cpu", True)
    args = parse("--config", str(file), "device=auto", "--device=cpu", "--no_mlp_only")
    assert (args.steps, args.device, args.mlp_only, args.json) == ([1, 2], "cpu", False, False)
    assert not hasattr(args, "config")


def test_files_are_positional_and_may_hold_an_equals_sign(tmp_path):
    args = mask_parser().parse_words(["compare", "--common", "lr=1.safetensors", "b.pt", "--json"])
    assert ([str(file) for file in args.files], args.common, args.json) == (["lr=1.safetensors", "b.pt"], True, True)
    file = tmp_path / "options.yaml"
    file.write_text("files: [a.pt, b.pt]\n")
    args = mask_parser().parse_words(["compare", "--config", str(file)])
    assert [str(file) for file in args.files] == ["a.pt", "b.pt"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["reconstruct", *LOG, "step=x"], "argument --step: invalid int value: 'x'"),
        (["reconstruct", *LOG, "--step"], "option '--step': expected a value"),
        (["list", *LOG, "stray"], "cannot read 'stray'"),
        (["lst"], "unknown action 'lst'; the nearest is 'list'"),
    ],
)
def test_errors_name_key_value_and_source(words, message):
    with pytest.raises(ConfigError) as error:
        delta_parser().parse_words(words)
    assert message in str(error.value)


def test_a_file_names_no_further_file_and_is_named_in_errors(tmp_path):
    file = tmp_path / "options.yaml"
    cases = {"config: x.yaml": "has the key 'config'", "steps: [one]": "argument --steps: invalid int value: 'one'"}
    for content, message in cases.items():
        file.write_text(content)
        with pytest.raises(ConfigError) as error:
            parse("--config", str(file))
        assert str(file) in str(error.value) and message in str(error.value)


def test_a_command_runs_from_a_file_alone(sparse_opt, files, tmp_path):
    file = tmp_path / "random.yaml"
    output = tmp_path / "mask.safetensors"
    file.write_text(f"model_name: {files.model}\ndensity: 0.5\noutput: {output}\njson: true\n")
    assert json.loads(sparse_opt("mask", "random", "--config", file).done())["file"] == str(output)
