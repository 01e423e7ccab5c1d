"""Options come from YAML files, flags and key=value words, the later ones winning; `--help` and its examples."""

import importlib
import json
import re
import shlex
import subprocess
import sys

import pytest

from sparse_opt.cli.analyze import _parser as analyze_parser
from sparse_opt.cli.bench import BENCHMARKS
from sparse_opt.cli.delta import _parser as delta_parser
from sparse_opt.cli.main import COMMANDS
from sparse_opt.cli.mask import _parser as mask_parser
from sparse_opt.cli.train import TRL_ALGORITHMS
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


ACTIONS = [
    *((command,) for command in COMMANDS),
    *(("mask", action) for action in ("find", "random", "info", "compare", "convert", "invert", "union", "intersect")),
    *(("delta", action) for action in ("list", "info", "verify", "reconstruct", "convert")),
    *(("analyze", action) for action in ("sparsity", "coverage", "ranks", "report")),
]


@pytest.mark.parametrize("words", [(), ("mask",), ("train",)], ids=" ".join)
def test_answers_without_loading_torch(words):
    code = (
        "import sys; from sparse_opt.cli.main import main; code = main(sys.argv[1:]);"
        "assert not {'torch', 'numpy', 'transformers', 'yaml'} & set(sys.modules); sys.exit(code)"
    )
    result = subprocess.run([sys.executable, "-c", code, *words, "--help"], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    assert result.stdout.startswith(f"usage: {' '.join(['sparse-opt', *words])} ")


@pytest.mark.parametrize("words", [(), *ACTIONS], ids=" ".join)
def test_examples_are_calls_that_are_understood(sparse_opt, words):
    text = sparse_opt(*words, "--help").done().replace("\\\n", "")
    examples = [shlex.split(line, comments=True) for line in re.findall(r"^  sparse-opt (.*)$", text, re.MULTILINE)]
    assert examples
    for command, *arguments in (example[: example.index("|")] if "|" in example else example for example in examples):
        if command == "train":
            understood_by_train(*arguments)
        elif command == "bench":
            assert arguments[0] in BENCHMARKS
        else:
            importlib.import_module(f"sparse_opt.cli.{command}")._parser().parse_words(arguments)


def understood_by_train(algorithm, *words):
    from sparse_opt.integrations.trl.command_line import parse

    assert algorithm in TRL_ALGORITHMS
    if "--config" not in words:  # whose file is not there to be read
        parse(algorithm, words)


@pytest.mark.parametrize("algorithm", TRL_ALGORITHMS)
def test_trls_options_are_listed_with_those_of_a_mask(sparse_opt, algorithm):
    text = sparse_opt("train", algorithm, "--help").done()
    assert {"--max_steps", "--mask_density"} <= set(re.findall(r"^  (--\w+)", text, re.MULTILINE))
