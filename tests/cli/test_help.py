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
from sparse_opt.cli.train import ALGORITHMS, TRL_ALGORITHMS
from sparse_opt.config import parse_config

ACTIONS = [
    *((command,) for command in COMMANDS),
    *(("mask", action) for action in ("find", "random", "info", "compare", "convert", "invert", "union", "intersect")),
    *(("delta", action) for action in ("list", "info", "verify", "reconstruct", "squash", "export", "convert")),
    *(("analyze", action) for action in ("sparsity", "coverage", "ranks", "shapes", "report")),
]


@pytest.mark.parametrize("words", [(), *((command,) for command in COMMANDS)], ids=" ".join)
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
    if algorithm in TRL_ALGORITHMS:
        from sparse_opt.integrations.trl.command_line import parse

        if "--config" not in words:  # whose file is not there to be read
            parse(algorithm, words)
        return
    module = importlib.import_module(f"sparse_opt.trainers.{algorithm}")
    if algorithm == "rft":
        stage, *words = words
        config_class, _ = module.STAGES[stage]
    else:
        config_class = getattr(module, ALGORITHMS[algorithm])
    if "--config" not in words:  # whose file is not there to be read
        parse_config(config_class, words)


# An algorithm, or a stage of one, and an option that it has and some others have not.
OWN_OPTIONS = {
    ("minimal_dpo",): "label_smoothing",
    ("ppo",): "lam",
    ("rft", "datagen"): "deduplicate",
    ("rft", "train"): "mask_density",
    ("rft", "test"): "reward_threshold",
    ("rlt",): "student_model",
}


@pytest.mark.parametrize("words", OWN_OPTIONS, ids=" ".join)
def test_an_algorithm_lists_its_options(sparse_opt, words):
    text = sparse_opt("train", *words, "--help").done()
    assert text.startswith(f"usage: sparse-opt train {' '.join(words)} ")
    options = set(re.findall(r"^  --(\w+)", text.replace("[no-]", ""), re.MULTILINE))
    assert OWN_OPTIONS[words] in options
    assert ("delta_log_steps" in options) == (words[-1] not in ("datagen", "test"))
    assert ("label_smoothing" in options) == (words == ("minimal_dpo",))


@pytest.mark.parametrize("algorithm", TRL_ALGORITHMS)
def test_trls_options_are_listed_with_those_of_a_mask(sparse_opt, algorithm):
    text = sparse_opt("train", algorithm, "--help").done()
    assert text.startswith(f"usage: sparse-opt train {algorithm} ")
    options = set(re.findall(r"^  --(\w+)", text, re.MULTILINE))
    assert options >= {"model_name_or_path", "dataset_name", "max_steps", "use_peft", "mask", "mask_density"}
    assert ("num_generations" in options) == ("reward_funcs" in options) == (algorithm == "grpo")
    assert "density^-0.75" in text


def test_every_algorithm_is_asked_for_its_options():
    assert {words[0] for words in OWN_OPTIONS} == set(ALGORITHMS)


@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_rft_lists_its_stages(sparse_opt, flag):
    text = sparse_opt("train", "rft", flag).done()
    assert text.startswith("usage: sparse-opt train rft STAGE ")
    stages = re.findall(r"^    (\w+) +[A-Z]", text, re.MULTILINE)
    assert (
        stages == list(importlib.import_module("sparse_opt.trainers.rft.train").STAGES) == ["datagen", "train", "test"]
    )


def test_rft_without_a_stage_says_which_there_are(sparse_opt):
    assert "the action is missing; expected one of datagen, train, test" in sparse_opt(
        "train", "rft"
    ).failed_in_one_line(2)
    assert "unknown action 'sample'; expected one of datagen, train, test" in sparse_opt(
        "train", "rft", "sample"
    ).failed_in_one_line(2)
