"""Options as dataclasses: a field of a dataclass is an option of a command, with its type, help text and bounds.

    @dataclass(kw_only=True)
    class Options:
        learning_rate: float = option(1e-6, "peak learning rate", at_least=0)

    options = parse_config(Options, ["--config", "run.yaml", "--learning_rate", "5e-7"], prog="sparse-opt train ppo")

`option_parser` describes what a command line may contain.
"""

from __future__ import annotations

import argparse
import dataclasses
import operator
import sys
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from .errors import ConfigError, SparseOptError
from .option_parser import CommandParser, Replaced, option_set
from .option_values import type_name, without_none

ConfigT = TypeVar("ConfigT")

SEEDS = range(-(2**63), 2**64)  # that torch.manual_seed takes
_LARGEST_COUNT = 2**31 - 1
_LARGEST_FLOAT = 3.4028234663852886e38  # torch.finfo(torch.float32).max
_LOWEST_TEMPERATURE = 1e-6
_COMPARE = {"at least": operator.ge, "more than": operator.gt, "at most": operator.le, "less than": operator.lt}


def add_options(parser: CommandParser, config_class: type) -> CommandParser:
    """Add an option for each field of a dataclass; `parse_words` then leaves out those that are not given.

    The annotations are int, float, bool, str, Path, Literal, a list of one of these, or one of them or None. If the
    class has a classmethod `presets(given)`, the settings that it returns are used for options that are not given.
    """
    parser.usage = f"{parser.prog} [--config FILE] [--key value ...] [key=value ...]"
    parser.description = (config_class.__doc__ or "").strip().partition("\n")[0]
    parser.presets = getattr(config_class, "presets", parser.presets)
    parser.annotations = typing.get_type_hints(config_class)
    for field in dataclasses.fields(config_class):
        parser.in_place_of[field.name] = _replaced(config_class, field.name)
        for hints in _declared(config_class, field.name, "hints"):
            parser.hints |= hints
        value = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        required = value is dataclasses.MISSING
        kind, _ = without_none(parser.annotations[field.name])
        shown = ",".join(map(str, value)) if isinstance(value, list) else str(value).lower() if kind is bool else value
        default = "required" if required else f"default: {'none' if shown in (None, '') else shown}"
        parser.add_argument(
            *(f"--{name}" for name in (field.name, *_aliases(config_class, field.name))),
            dest=field.name,
            required=required,
            default=argparse.SUPPRESS,
            help=f"{_help(config_class, field.name)} ({default})".replace("%", "%%").strip(),
            **({"action": argparse.BooleanOptionalAction} if kind is bool else {"metavar": type_name(kind)}),
        )
    given = "".join(f" --{action.dest} {action.dest.upper()}" for action in parser._actions if action.required)
    parser.epilog = f"""YAML files are read first, then flags and key=value words in the order given; later ones win.

examples:
  {parser.prog}{given}
  {parser.prog} --config options.yaml
"""
    return parser


def parse_config(config_class: type[ConfigT], argv: Sequence[str], *, prog: str | None = None) -> ConfigT:
    """Build a dataclass from the words after a command's name; see `add_options` and `CommandParser.parse_words`.

    Raises:
        ConfigError: as in `parse_words`. Errors of the dataclass's `__post_init__` propagate.
    """
    return config_class(**vars(add_options(CommandParser(prog=prog), config_class).parse_words(argv)))


def run_module(
    config_class: type[ConfigT], work: Callable[[ConfigT], object], argv: Sequence[str] | None, *, prog: str
) -> int:
    """Print what `work` returns for the options in `argv`, by default the process's: the main of a `python -m` module.

    Returns:
        0; 1 if `work` failed, or 2 if the call was wrong (ConfigError), after the error in one line on stderr.
    """
    try:
        print(work(parse_config(config_class, sys.argv[1:] if argv is None else argv, prog=prog)))
    except SparseOptError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    return 0


def option(
    default: Any = dataclasses.MISSING,
    help: str = "",
    *,
    aliases: Sequence[str] = (),
    in_place_of: Replaced | None = None,
    hints: Mapping[str, str] | None = None,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    below: float | None = None,
) -> Any:
    """Return a dataclass field with its help text, required if it has no default.

    `require_number_ranges` checks the bounds. A subclass that redefines an option keeps all else from the base classes,
    and its help text if it has none.

    Args:
        aliases: other names of the option.
        in_place_of: the option that this one sets, other than by its name, so that the two exclude each other; or a
            function that returns it, or None, for a value of this one. None and false set nothing.
        hints: names of options of other programs that are not aliases -> what to write instead, for the error.
    """
    bounds = {"at least": at_least, "more than": above, "at most": at_most, "less than": below}
    metadata = {
        "help": help,
        "aliases": tuple(aliases),
        "in_place_of": in_place_of,
        "hints": hints,
        "bounds": {words: limit for words, limit in bounds.items() if limit is not None},
    }
    if isinstance(default, list):
        return dataclasses.field(default_factory=lambda: list(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def _declared(config_class: type, name: str, key: str) -> Iterator[Any]:
    """The metadata `key` of an option, where the class or one of its base classes gives it."""
    for base in config_class.__mro__:
        field = getattr(base, "__dataclass_fields__", {}).get(name)
        if field is not None and field.metadata.get(key):
            yield field.metadata[key]


def _aliases(config_class: type, name: str) -> list[str]:
    """The other names of an option, in the class or its base classes."""
    return list(dict.fromkeys(alias for aliases in _declared(config_class, name, "aliases") for alias in aliases))


def _help(config_class: type, name: str) -> str:
    """The help text of an option, in the class or the first base class that has one."""
    return next(_declared(config_class, name, "help"), "")


def _replaced(config_class: type, name: str) -> Replaced:
    """The option that an option is given in place of, or a function of its value; the option itself for all others."""
    return next(_declared(config_class, name, "in_place_of"), name)


def require_number_ranges(config: Any) -> None:
    """Raise ConfigError if a number of a dataclass is not finite, or outside the bounds of its `option`.

    Floats must fit fp32; counts must be below 2**31, so that their products do not overflow; a `seed` must be valid for
    torch; a temperature other than 0 must not be so low that logits divided by it overflow.
    """
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        for number in value if isinstance(value, list) else [value]:
            if isinstance(number, float) and not abs(number) <= _LARGEST_FLOAT:
                raise ConfigError(f"option '{field.name}' is {number}: expected a number that fp32 can hold")
            if field.name.endswith("temperature") and isinstance(number, float) and 0 < number < _LOWEST_TEMPERATURE:
                raise ConfigError(f"option '{field.name}' is {number}: expected at least {_LOWEST_TEMPERATURE}")
            if isinstance(number, int) and field.name != "seed":
                require_count(f"option '{field.name}'", number)
            if isinstance(number, int | float):
                _require_bounds(config, field.name, number)
    seed = getattr(config, "seed", 0)
    if seed not in SEEDS:
        raise ConfigError(f"option 'seed' is {seed}: expected {SEEDS.start} to {SEEDS.stop - 1}")


def _require_bounds(config: Any, name: str, number: float) -> None:
    for config_class in type(config).__mro__:
        field = getattr(config_class, "__dataclass_fields__", {}).get(name)
        bounds = {} if field is None else field.metadata.get("bounds", {})
        if not all(_COMPARE[words](number, limit) for words, limit in bounds.items()):
            expected = ", ".join(f"{words} {limit:g}" for words, limit in bounds.items())
            raise ConfigError(f"option '{name}' is {number}: expected {expected}")


def require_count(what: str, number: int) -> None:
    """Raise ConfigError if a count is too large."""
    if abs(number) > _LARGEST_COUNT:
        raise ConfigError(f"{what} is {number}: expected at most {_LARGEST_COUNT}")


def to_yaml(config: Any) -> str:
    """Return the dataclass as YAML, which `--config` reads back to an equal value.

    An option that another one sets is left out, as the number of steps if that of epochs is given in place of it.
    """
    import yaml

    plain = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    for name, value in list(plain.items()):
        replaced = option_set(_replaced(type(config), name), value)
        if replaced is not None and replaced != name:
            plain.pop(replaced, None)
    return yaml.safe_dump({k: str(v) if isinstance(v, Path) else v for k, v in plain.items()}, sort_keys=False)
