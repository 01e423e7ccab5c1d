"""The options of `sparse-opt train sft | dpo | grpo`: TRL's arguments, and those of a mask.

YAML files (`--config run.yaml`, as TRL's) are read first, then flags and `key=value` words in the order of the command
line; later ones win. An unknown option names the nearest one, before a model or data is loaded.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import inspect
import json
import math
import os
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NoReturn

import torch
import yaml
from trl import DPOConfig, GRPOConfig, ModelConfig, ScriptArguments, SFTConfig, TrlParser

from ...errors import ConfigError
from ...options import FALSE, TRUE, read_yaml, similar
from ..rates import EXPONENT
from .mask_arguments import MaskArguments, option

CONFIGS = {"sft": SFTConfig, "dpo": DPOConfig, "grpo": GRPOConfig}
_WORD = re.compile(r"[A-Za-z]\w*=")
# Options whose values are not written to options.yaml, and keys of others' values.
_SECRET = ("hub_token", "token", "use_auth_token", "api_key")
# TRL's and transformers' options that `--help` lists; `--help_all` lists all.
_COMMON = """model_name_or_path dtype attn_implementation dataset_name dataset_train_split dataset_test_split
reward_funcs reward_model_name_or_path output_dir max_steps num_train_epochs per_device_train_batch_size
gradient_accumulation_steps learning_rate lr_scheduler_type warmup_steps weight_decay max_grad_norm
max_length packing beta loss_type num_generations max_completion_length temperature use_vllm vllm_mode bf16 fp16
use_cpu gradient_checkpointing torch_compile use_peft lora_r eval_strategy eval_steps logging_steps save_steps
save_total_limit resume_from_checkpoint report_to run_name seed""".split()

_EPILOG = """examples:
  all weights, with a delta log to find a mask in:
    sparse-opt train {name} --model_name_or_path M --dataset_name D --delta_log_dir log --output_dir dense
  under a mask, from a file or drawn at random:
    sparse-opt train {name} --model_name_or_path M --dataset_name D --mask masks/FILE.safetensors --output_dir sparse
    sparse-opt train {name} --model_name_or_path M --dataset_name D --mask_density 0.025 --mask_pattern tile64
  the options of an earlier run, with one changed, and an interrupted run continued:
    sparse-opt train {name} --config dense/options.yaml output_dir=dense_2 delta_log_dir=log_2
    sparse-opt train {name} --config dense/options.yaml --resume_from_checkpoint true

Without a GPU, fp32 on the CPU is the default. Under a mask and without --learning_rate the rate is the default below
times density^{exponent} (5.6 at 10 %, 16 at 2.5 %, 32 at 1 %), a start for tuning."""


@dataclass
class GRPOScriptArguments(ScriptArguments):
    """TRL's script arguments and the two of its GRPO script."""

    reward_model_name_or_path: str | None = option(None, "reward model: a sequence classifier with one label")
    reward_funcs: list[str] | None = option(  # noqa: RUF009
        None,
        "exact_match, number (both read the column answer), accuracy_reward, reasoning_accuracy_reward, "
        "think_format_reward, get_soft_overlong_punishment, or import paths: my_package.rewards.function",
    )


@dataclass(frozen=True)
class Options:
    """The options of a run.

    Attributes:
        script, training, model, mask: as TRL's trainers and `sparse_trainer` take them.
        name: the words after `sparse-opt train`: the algorithm or the recipe.
        recipe: the options of a recipe, of the class that `parse` was given; None without a recipe.
        values: name -> value of every option.
        given: names of the options in files and words.
    """

    script: Any
    training: Any
    model: ModelConfig
    mask: MaskArguments
    name: str
    recipe: Any
    values: dict[str, Any]
    given: frozenset[str]

    def to_yaml(self) -> str:
        """All options as a file for `--config`, without secrets, the checkpoint, and a rate that a mask determines."""
        left_out = {*_SECRET, "resume_from_checkpoint"}
        if self.mask.is_sparse and "learning_rate" not in self.given:
            left_out.add("learning_rate")
        values = {name: value for name, value in self.values.items() if name not in left_out}
        plain = {name: getattr(value, "value", value) for name, value in values.items()}  # enums
        for name, value in plain.items():
            if isinstance(value, str) and value.startswith("{"):
                with contextlib.suppress(ValueError):  # a text with a brace
                    value = json.loads(value)
            if isinstance(value, dict):
                plain[name] = {key: inner for key, inner in value.items() if key not in _SECRET}
        return yaml.safe_dump(plain, sort_keys=False)


class _Parser(TrlParser):
    has_sections = False

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message} (see '{self.prog} --help')")


@dataclass(frozen=True)
class Recipe:
    """A command of its own on one of TRL's trainers: `sparse-opt train NAME`.

    Attributes:
        name: the word after `sparse-opt train`.
        options: dataclass of its own options; a field's metadata has its help, as for TRL's parser.
        defaults: TRL's options that have another default.
        description, epilog: what `--help` says.
        aliases: other names of options -> the options, in files and words.
        has_sections: whether files have sections, keys that group options.
        translate: from the values of the command line and the names of those that were given to the values that the
            dataclasses are made of. `options.yaml` has the former, which it may change. None uses them as they are.
    """

    name: str
    options: type
    defaults: dict[str, Any]
    description: str
    epilog: str = ""
    aliases: Mapping[str, str] = field(default_factory=dict)
    has_sections: bool = False
    translate: Callable[[dict[str, Any], set[str]], dict[str, Any]] | None = None


def parser(algorithm: str, recipe: Recipe | None = None) -> _Parser:
    """The parser of `sparse-opt train ALGORITHM`, or of a recipe on that algorithm."""
    script = GRPOScriptArguments if algorithm == "grpo" else ScriptArguments
    classes: Any = (MaskArguments, script, CONFIGS[algorithm], ModelConfig)
    name, trainer = algorithm, f"{algorithm.upper()}Trainer"
    description = f"Train with TRL's {trainer}: all weights, those of a mask, or adapters."
    epilog = _EPILOG.format(name=algorithm, exponent=EXPONENT)
    if recipe is not None:
        name, description, epilog = recipe.name, recipe.description, recipe.epilog
        classes = (recipe.options, *classes)
    made = make_parser(name, classes, description, epilog)
    if not torch.accelerator.is_available():
        made.set_defaults(use_cpu=True, bf16=False)
    if recipe is not None:
        made.set_defaults(**recipe.defaults)
        made.has_sections = recipe.has_sections
        for alias, option in recipe.aliases.items():
            action = made._option_string_actions[f"--{alias}"] = made._option_string_actions[f"--{option}"]
            action.option_strings = [*action.option_strings, f"--{alias}"]
    return made


def make_parser(name: str, classes: Any, description: str, epilog: str = "") -> _Parser:
    """The parser of `sparse-opt train NAME` with the fields of these dataclasses as options."""
    return _Parser(
        classes,
        prog=f"sparse-opt train {name}",
        usage=f"sparse-opt train {name} [--config FILE] [--key value ...] [key=value ...]",
        description=description,
        epilog=epilog,
        formatter_class=_HelpFormatter,
        allow_abbrev=False,
    )


class _HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Shows defaults, one spelling of each option, and no long lists of choices; keeps the epilog's line breaks."""

    def _format_action_invocation(self, action: argparse.Action) -> str:
        shown = copy.copy(action)
        shown.option_strings = [name for name in action.option_strings if "-" not in name[2:]]
        if action.choices is not None and len(list(action.choices)) > 8:
            shown.metavar = action.dest.upper()
        return super()._format_action_invocation(shown)


def _print_help(of: _Parser, recipe: Recipe | None, *, everything: bool) -> None:
    shown = {"help", *_COMMON, *(option.name for option in fields(MaskArguments))}
    if recipe is not None:
        shown |= {*recipe.defaults, *recipe.aliases.values(), *(option.name for option in fields(recipe.options))}
    if not everything:
        hidden = [action for action in of._actions if action.dest not in shown]
        for action in hidden:
            action.help = argparse.SUPPRESS
        of.epilog = f"{of.epilog}\n\nThese are the options used most; --help_all lists the other {len(hidden)}."
    of.print_help()


def parse(algorithm: str, argv: Sequence[str], recipe: Recipe | None = None) -> Options:
    """The options in the words after `sparse-opt train ALGORITHM`; `--help` prints them and exits.

    Raises:
        ConfigError: an unknown option, a value of another type, an invalid file, or options that TRL refuses.
    """
    # TRL uses names that transformers will rename.
    warnings.filterwarnings("ignore", category=FutureWarning, message=".*gradient_checkpointing")
    of = parser(algorithm, recipe)
    if "-h" in argv or "--help" in argv or "--help_all" in argv:
        _print_help(of, recipe, everything="--help_all" in argv)
        raise SystemExit(0)
    values, given = read_options(of, argv)
    try:
        used = values if recipe is None or recipe.translate is None else recipe.translate(values, given)
        *own, mask, script, training, model = of.parse_dict(dict(used))
    except (ValueError, ImportError) as error:  # of TRL's checks
        hint = " Set --per_device_train_batch_size times --gradient_accumulation_steps to such a multiple."
        raise ConfigError(f"{error}{hint if 'num_generations' in str(error) else ''}") from error
    if model.model_name_or_path is None:
        raise ConfigError("--model_name_or_path is missing: the name or folder of a model")
    mask.require_used()
    if mask.is_sparse and model.use_peft:
        raise ConfigError("--use_peft trains adapters, and a mask the model's own weights: leave out one of the two")
    if model.use_peft and mask.delta_log_dir is not None:
        raise ConfigError("--delta_log_dir logs the model's own weights, which --use_peft does not train: leave it out")
    if mask.log_margins and algorithm != "dpo":
        raise ConfigError(f"--log_margins is an option of dpo, not of {algorithm}")
    rewards = (getattr(script, "reward_funcs", None), getattr(script, "reward_model_name_or_path", None))
    if algorithm == "grpo" and recipe is None and not any(rewards):
        raise ConfigError("grpo needs --reward_funcs (such as exact_match) or --reward_model_name_or_path")
    name = algorithm if recipe is None else recipe.name
    return Options(script, training, model, mask, name, own[0] if own else None, values, frozenset(given))


def read_options(of: _Parser, argv: Sequence[str]) -> tuple[dict[str, Any], set[str]]:
    """The values of all options of a parser, and the names of those that files and words give; see `parse`."""
    if "-h" in argv or "--help" in argv:
        of.print_help()
        raise SystemExit(0)
    words, given = _words(of, argv)
    namespace, rest = of.parse_known_args(words)
    if rest:
        if _WORD.match(rest[0]):
            _find(of, f"--{rest[0].partition('=')[0]}", f"'{rest[0]}'")
        of.error(f"cannot read '{rest[0]}': expected --key value, --key=value or key=value")
    values = vars(namespace)
    for name, value in values.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"--{name} is {value}, expected a finite number")
    return values, given


def _words(of: _Parser, argv: Sequence[str]) -> tuple[list[str], set[str]]:
    """The options of files and words as flags, files first; and the names of those that are given."""
    from_files: list[str] = []
    flags: list[str] = []
    given: set[str] = set()
    words = list(argv)
    while words:
        word = words.pop(0)
        key, equals, value = word.partition("=")
        if not word.startswith("--") and _WORD.match(word):
            if key != "config" and f"--{key}" not in of._option_string_actions and flags:
                flags.append(word)  # a value, in a list of values
                continue
            key = f"--{key}"
        if key == "--config":
            if not equals and not words:
                raise ConfigError("option '--config': expected a file")
            from_files += _flags_of(of, Path(value if equals else words.pop(0)), given)
        elif key.startswith("--"):
            action = _find(of, key, f"'{word}'")
            given.add(action.dest)
            flags.append(f"{key}={value}" if equals else key)
            if getattr(action.type, "__name__", "") == "string_to_bool":
                if not equals:
                    follows = words and not words[0].startswith("--") and not _WORD.match(words[0])
                    value = words.pop(0) if follows else "true"
                if value.lower() not in TRUE | FALSE:
                    of.error(f"option '{key}' is '{value}', expected true or false")
                flags[-1] = f"{key}={value.lower() in TRUE}"
            elif not equals and action.nargs is None:
                if not words or words[0].startswith("--"):
                    of.error(f"option '{key}': expected a value")
                flags[-1] += f"={words.pop(0)}"  # one value, whatever it looks like
            elif equals and action.nargs == "+":
                is_list = value.startswith("[") and value.endswith("]")  # as in Hydra: key=[1,0.01]
                flags[-1:] = [key, *([item.strip() for item in value[1:-1].split(",")] if is_list else [value])]
        else:
            flags.append(word)
    return from_files + flags, given


def _flags_of(of: _Parser, file: Path, given: set[str]) -> list[str]:
    """The options of a YAML file as flags; values without a flag become the parser's defaults, as in TRL."""
    content = read_yaml(file, "config file") or {}
    if not isinstance(content, dict):
        raise ConfigError(f"config file {file} holds a {type(content).__name__}; expected 'key: value' lines")
    variables = content.pop("env", None) or {}
    if not isinstance(variables, dict):
        raise ConfigError(f"config file {file}: 'env' is {variables!r}, expected variables by name")
    for name, value in variables.items():
        os.environ[name] = str(value)
    flags: list[str] = []
    for key, value in _without_sections(of, content, file).items():
        action = _find(of, f"--{key}", f"config file {file}")
        given.add(action.dest)
        if isinstance(value, bool) and action.type is str and not action.choices:
            of.set_defaults(**{action.dest: value})  # `fsdp: true`
            continue
        if isinstance(value, bool):
            words = {True: "yes", False: "no"} if "no" in (action.choices or ()) else {True: "true", False: "false"}
            value = words[value]  # YAML reads `save_strategy: no` as false
        if isinstance(value, list) and value and action.nargs == "+":
            flags += [f"--{action.dest}", *map(str, value)]
        elif value is None or isinstance(value, list | dict):
            if value is not None and not _takes_objects(of, action.dest):
                expected = "a number" if action.type in (int, float) else "one value"
                raise ConfigError(f"config file {file}: '{key}' is a {type(value).__name__}, expected {expected}")
            of.set_defaults(**{action.dest: value})
        elif action.nargs == "+":
            flags += [f"--{action.dest}", str(value)]
        else:
            flags.append(f"--{action.dest}={value}")
    try:
        of.parse_known_args(flags)
    except ConfigError as error:
        raise ConfigError(f"config file {file}: {error}") from error
    return flags


def _without_sections(of: _Parser, content: dict[str, Any], file: Path) -> dict[str, Any]:
    """The options of a file whose parser has sections, wherever they are in it."""
    found: dict[str, Any] = {}
    for key, value in content.items():
        is_section = of.has_sections and isinstance(value, dict) and f"--{key}" not in of._option_string_actions
        for name, inner in (value if is_section else {key: value}).items():
            if name in found:
                raise ConfigError(
                    f"config file {file}: '{name}' is given twice, the second time in '{key}': give it once"
                )
            found[name] = inner
    return found


def _takes_objects(of: _Parser, name: str) -> bool:
    """Whether an option may be a list or have keys, by its annotation; the parser changes the types of the fields."""
    annotations = [inspect.get_annotations(base) for of_class in of.dataclass_types for base in of_class.__mro__]
    annotation = str(next((found[name] for found in annotations if name in found), "")).lower()
    return "dict" in annotation or "list" in annotation


def _find(of: _Parser, key: str, source: str) -> argparse.Action:
    action = of._option_string_actions.get(key)
    if action is None:
        names = [name[2:] for name in of._option_string_actions if "-" not in name[2:]]
        found = similar(key[2:].replace("-", "_"), names)
        hint = "" if found is None else f"; the nearest is '{found}'"
        of.error(f"unknown option '{key[2:]}' (from {source}){hint}")
    return action
