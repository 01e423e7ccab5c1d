"""The options of `sparse-opt train sft | dpo | grpo`: TRL's arguments, and those of a mask.

They are read as those of the other commands (`sparse_opt.options`); a file may also have environment variables under
`env`, as TRL's. An unknown option names the nearest one, before a model or data is loaded.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import inspect
import json
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
import yaml
from trl import DPOConfig, GRPOConfig, ModelConfig, ScriptArguments, SFTConfig, TrlParser

from ...errors import ConfigError
from ...options import CommandParser
from ..rates import EXPONENT
from .mask_arguments import MaskArguments, option

CONFIGS = {"sft": SFTConfig, "dpo": DPOConfig, "grpo": GRPOConfig}
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
    reward_funcs: list[str] | None = option(  # noqa: RUF009  # `option` makes a field
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


class TrlCommandParser(CommandParser, TrlParser):
    """A `CommandParser` whose options are the fields of dataclasses, of which `parse_dict` makes objects.

    Attributes:
        has_sections: whether files have sections, keys that group options.
    """

    has_sections = False

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._variables: set[str] = set()  # of the environment, that files have set

    def settings(self, file: Path) -> dict[str, Any]:
        content = super().settings(file)
        variables = content.pop("env", None) or {}
        if not isinstance(variables, dict):
            raise ConfigError(f"config file {file}: 'env' is {variables!r}, expected variables by name")
        for name in variables.keys() - self._variables:  # later files are read first
            os.environ[name] = str(variables[name])
        self._variables |= variables.keys()
        found: dict[str, Any] = {}
        for key, value in content.items():
            is_section = self.has_sections and isinstance(value, dict) and f"--{key}" not in self._option_string_actions
            for name, inner in (value if is_section else {key: value}).items():
                if name in found:
                    raise ConfigError(
                        f"config file {file}: '{name}' is given twice, the second time in '{key}': give it once"
                    )
                found[name] = inner
        return found

    def _set(self, flags: Any, action: argparse.Action, value: Any, source: str) -> None:
        """Set an option to a value; one that has no words, such as a dictionary, becomes the default, as in TRL."""
        is_object = isinstance(value, dict) or (isinstance(value, list) and not (value and action.nargs == "+"))
        is_flag_of_text = isinstance(value, bool) and action.type is str and not action.choices  # `fsdp: true`
        if not (is_object or is_flag_of_text or value is None):
            super()._set(flags, action, value, source)
            return
        if is_object and not self._takes_objects(action.dest):
            expected = "a number" if action.type in (int, float) else "one value"
            raise ConfigError(f"{source}: '{action.dest}' is a {type(value).__name__}, expected {expected}")
        self.set_defaults(**{action.dest: value})
        flags[:] = [*((dest, words) for dest, words in flags if dest != action.dest), (action.dest, [])]

    def _takes_objects(self, name: str) -> bool:
        """Whether an option may be a list or have keys, by its annotation; the parser changes the types of fields."""
        annotations = [inspect.get_annotations(base) for made in self.dataclass_types for base in made.__mro__]
        annotation = str(next((found[name] for found in annotations if name in found), "")).lower()
        return "dict" in annotation or "list" in annotation


@dataclass(frozen=True)
class Recipe:
    """A command of its own on one of TRL's trainers: `sparse-opt train NAME`.

    Attributes:
        name: the word after `sparse-opt train`.
        options: dataclass of its own options; a field's metadata has its help, as for TRL's parser.
        defaults: TRL's options that have another default.
        description, epilog: what `--help` says.
        aliases: other names of options -> the options, in files and words.
        has_sections: see `TrlCommandParser`.
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


def parser(algorithm: str, recipe: Recipe | None = None) -> TrlCommandParser:
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


def make_parser(name: str, classes: Any, description: str, epilog: str = "") -> TrlCommandParser:
    """The parser of `sparse-opt train NAME` with the fields of these dataclasses as options."""
    return TrlCommandParser(
        dataclass_types=classes,
        prog=f"sparse-opt train {name}",
        usage=f"sparse-opt train {name} [--config FILE] [--key value ...] [key=value ...]",
        description=description,
        epilog=epilog,
        formatter_class=_HelpFormatter,
    )


class _HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Shows defaults, one spelling of each option, and no long lists of choices; keeps the epilog's line breaks."""

    def _format_action_invocation(self, action: argparse.Action) -> str:
        shown = copy.copy(action)
        shown.option_strings = [name for name in action.option_strings if "-" not in name[2:]]
        if action.choices is not None and len(list(action.choices)) > 8:
            shown.metavar = action.dest.upper()
        return super()._format_action_invocation(shown)


def _print_help(of: TrlCommandParser, recipe: Recipe | None, *, everything: bool) -> None:
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
    values, given = vars(of.parse_words(argv)), set(of.given)
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
    for name in ("delta_log_dir", "statistics_steps"):
        if model.use_peft and getattr(mask, name) is not None:
            raise ConfigError(f"--{name} is of the model's own weights, which --use_peft does not train: leave it out")
    if mask.log_margins and algorithm != "dpo":
        raise ConfigError(f"--log_margins is an option of dpo, not of {algorithm}")
    rewards = (getattr(script, "reward_funcs", None), getattr(script, "reward_model_name_or_path", None))
    if algorithm == "grpo" and recipe is None and not any(rewards):
        raise ConfigError("grpo needs --reward_funcs (such as exact_match) or --reward_model_name_or_path")
    name = algorithm if recipe is None else recipe.name
    return Options(script, training, model, mask, name, own[0] if own else None, values, frozenset(given))
