"""The content of `--help`; its examples are valid calls."""

from __future__ import annotations

import importlib
import re
import shlex
import subprocess
import sys

import pytest

from sparse_opt.cli.bench import BENCHMARKS
from sparse_opt.cli.main import COMMANDS
from sparse_opt.cli.train import TRL_ALGORITHMS

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
