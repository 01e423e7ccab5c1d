"""Parses command-line options and YAML files into typed dataclasses.

Values come from YAML files (`--config run.yaml`), flags (`--learning_rate 5e-5`) and `key=value` overrides. YAML is
read first, at any position of `--config`; flags and overrides are applied in the order of the command line, and the
last one wins. Every value is converted to its field's annotation, so that a typo in a key or a value is an error before
the run starts.

    @dataclass(kw_only=True)
    class Options:
        learning_rate: float = option(1e-6, "peak learning rate")

    options = parse_config(Options, ["--config", "run.yaml", "--learning_rate", "5e-7"], prog="sparse-opt train dpo")
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import math
import operator
import reprlib
import types
import typing
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, Union

import yaml

from .errors import ConfigError

ConfigT = TypeVar("ConfigT")

SEEDS = range(-(2**63), 2**64)  # that torch.manual_seed takes
_LARGEST_COUNT = 2**31 - 1
_LARGEST_FLOAT = 3.4028234663852886e38  # torch.finfo(torch.float32).max
_LOWEST_TEMPERATURE = 1e-6
_COMPARE = {"at least": operator.ge, "more than": operator.gt, "at most": operator.le, "less than": operator.lt}

_TRUE = {"true", "yes", "on", "1"}
_FALSE = {"false", "no", "off", "0"}


def option(
    default: Any = dataclasses.MISSING,
    help: str = "",
    *,
    aliases: Sequence[str] = (),
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    below: float | None = None,
) -> Any:
    """Return a dataclass field with its help text, required if it has no default; `aliases` are other names of it.

    `require_number_ranges` checks the bounds. A subclass that redefines an option keeps the bounds of its base classes.
    """
    bounds = {"at least": at_least, "more than": above, "at most": at_most, "less than": below}
    metadata = {
        "help": help,
        "aliases": tuple(aliases),
        "bounds": {words: limit for words, limit in bounds.items() if limit is not None},
    }
    if isinstance(default, list):
        return dataclasses.field(default_factory=lambda: list(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def parse_config(config_class: type[ConfigT], argv: Sequence[str], *, prog: str | None = None) -> ConfigT:
    """Build `config_class` from command-line words.

    Args:
        config_class: a dataclass whose annotations are int, float, bool, str, Path, Literal, a list of one of these, or
            one of them or None. Errors of its `__post_init__` propagate. If it has a classmethod `presets(values)`, the
            (key, value, source) that this returns are used for options that were not given.
        argv: the words after the command's name.
        prog: the command's name, for `--help` (which prints and exits with 0).

    Raises:
        ConfigError: an unknown key, a value of the wrong type, a missing required key, or an unreadable YAML file; the
            message says which flag, override or file it came from.
    """
    if any(word in ("-h", "--help") for word in argv):
        print(_help_parser(config_class, prog).format_help(), end="")
        raise SystemExit(0)
    fields = _Fields(config_class)
    files, settings = _read_words(fields, argv)
    yaml_settings = [setting for file in files for setting in _read_yaml(file)]
    values: dict[str, Any] = {}
    for key, raw, source in [*yaml_settings, *settings]:
        name = fields.resolve(key, source)
        values[name] = _convert(raw, fields.types[name], name, source)
    presets: Callable[[dict[str, Any]], list[tuple[str, Any, str]]]
    presets = getattr(config_class, "presets", lambda given: [])
    for key, raw, source in presets(dict(values)):
        name = fields.resolve(key, source)
        if name not in values:
            values[name] = _convert(raw, fields.types[name], name, source)
    missing = [f"--{name}" for name in fields.required if name not in values]
    if missing:
        raise ConfigError(f"required options are missing: {', '.join(missing)}")
    return config_class(**values)


def require_number_ranges(config: Any) -> None:
    """Raise ConfigError if a number of a dataclass is not finite, or outside the bounds of its `option`.

    Floats must fit fp32; counts must be below 2**31, so that their products do not overflow; a `seed` must be valid for
    torch; a temperature other than 0 must not be so low that logits divided by it overflow.
    """
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        for number in value if isinstance(value, list) else [value]:
            if isinstance(number, float) and not abs(number) <= _LARGEST_FLOAT:
                raise ConfigError(f"option '{field.name}' is {number}: wanted a number that fp32 can hold")
            if field.name.endswith("temperature") and isinstance(number, float) and 0 < number < _LOWEST_TEMPERATURE:
                raise ConfigError(f"option '{field.name}' is {number}: wanted at least {_LOWEST_TEMPERATURE}")
            if isinstance(number, int) and field.name != "seed":
                require_count(f"option '{field.name}'", number)
            if isinstance(number, int | float):
                _require_bounds(config, field.name, number)
    seed = getattr(config, "seed", 0)
    if seed not in SEEDS:
        raise ConfigError(f"option 'seed' is {seed}: wanted {SEEDS.start} to {SEEDS.stop - 1}")


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
        raise ConfigError(f"{what} is {number}: wanted at most {_LARGEST_COUNT}")


def to_yaml(config: Any) -> str:
    """Return the dataclass as YAML, which `--config` reads back to an equal value."""
    plain = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    return yaml.safe_dump({k: str(v) if isinstance(v, Path) else v for k, v in plain.items()}, sort_keys=False)


class _Fields:
    """Names, aliases and types of a config class."""

    def __init__(self, config_class: type):
        self.types: dict[str, Any] = typing.get_type_hints(config_class)
        self.names: dict[str, str] = {}
        self.required: list[str] = []
        for field in dataclasses.fields(config_class):
            for name in (field.name, *field.metadata.get("aliases", ())):
                self.names[name] = field.name
            if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
                self.required.append(field.name)

    def resolve(self, key: str, source: str) -> str:
        name = self.names.get(key.replace("-", "_"))
        if name is None:
            nearest = difflib.get_close_matches(key.replace("-", "_"), [*self.names, "config"], n=1, cutoff=0.0)
            raise ConfigError(f"unknown option '{key}' (from {source}); the nearest is '{nearest[0]}'")
        return name

    def is_bool(self, key: str) -> bool:
        name = self.names.get(key)
        return name is not None and _without_none(self.types[name])[0] is bool


def _read_words(fields: _Fields, argv: Sequence[str]) -> tuple[list[Path], list[tuple[str, Any, str]]]:
    """Split the command line into YAML files and (key, raw value, where it came from), in order.

    argparse would lose the order between flags and `key=value` words, which decides which value is used.
    """
    files: list[Path] = []
    settings: list[tuple[str, Any, str]] = []
    words = list(argv)
    while words:
        word = words.pop(0)
        if not word.startswith("--"):
            key, equals, value = word.partition("=")
            if not equals or word.startswith("-"):
                raise ConfigError(f"cannot read '{word}': wanted --key value, --key=value or key=value")
            settings.append((key, value, f"'{word}'"))
            continue
        flag, equals, value = word.partition("=")
        key = flag[2:].replace("-", "_")
        if not equals:
            if key not in fields.names and key.startswith("no_") and fields.is_bool(key[3:]):
                settings.append((key[3:], False, flag))
                continue
            if fields.is_bool(key) and not (words and words[0].lower() in _TRUE | _FALSE | {"none"}):
                settings.append((key, True, flag))
                continue
            if key != "config":
                fields.resolve(flag[2:], flag)  # a misspelt flag is the error to report, not its missing value
            if not words or words[0].startswith("--"):
                raise ConfigError(f"option '{flag}' wants a value")
            value = words.pop(0)
        if key == "config":
            files.append(Path(value).expanduser())
        else:
            settings.append((flag[2:], value, flag))
    return files, settings


def _read_yaml(file: Path) -> list[tuple[str, Any, str]]:
    content = read_yaml(file, "config file")
    if content is None:
        return []
    if not isinstance(content, dict):
        raise ConfigError(f"config file {file} holds a {type(content).__name__}; wanted 'key: value' lines")
    return [(str(key), value, str(file)) for key, value in content.items()]


def read_yaml(file: Path, what: str) -> Any:
    """Return the content of a YAML file. Raises a ConfigError that names `what` and the file if it is invalid YAML."""
    try:
        return yaml.safe_load(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {what} {file}: {error.strerror or error}") from error
    # PyYAML does not catch the errors of int() and date() on a value, and recurses once per level of the file.
    except (yaml.YAMLError, ValueError, TypeError, OverflowError, RecursionError) as error:
        raise ConfigError(f"{what} {file} is not valid YAML: {' '.join(str(error).split())}") from error


def _without_none(annotation: Any) -> tuple[Any, bool]:
    """Return the annotation without `None`, and whether `None` was allowed."""
    if typing.get_origin(annotation) in (Union, types.UnionType):
        inner = [arg for arg in typing.get_args(annotation) if arg is not type(None)]
        if len(inner) != 1:
            raise TypeError(f"an option is one type or None, not {annotation}")
        return inner[0], True
    return annotation, False


def _convert(raw: Any, annotation: Any, name: str, source: str) -> Any:
    wanted, optional = _without_none(annotation)
    if optional and (raw is None or (isinstance(raw, str) and raw.lower() in ("none", "null"))):
        return None
    try:
        return _cast(raw, wanted)
    except ValueError as error:
        choice = str(error) or f"wanted {_type_name(annotation)}"
        raise ConfigError(f"option '{name}' (from {source}) is {_shown(raw)}: {choice}") from error


def _shown(raw: Any) -> str:
    """Return a value as short text for a message, also if a YAML file's aliases make it exponentially long."""
    shortener = reprlib.Repr()
    shortener.maxstring, shortener.maxother, shortener.maxlevel = 200, 200, 2
    return shortener.repr(raw)


def _cast(raw: Any, wanted: Any) -> Any:
    """Convert `raw` (a command-line word or a YAML value) to `wanted`; an empty ValueError means "of another type"."""
    origin = typing.get_origin(wanted)
    if origin is Literal:
        return _cast_choice(raw, typing.get_args(wanted))
    if origin is list:
        items = raw.split(",") if isinstance(raw, str) else raw
        if not isinstance(items, list):
            raise ValueError
        return [_cast(item, typing.get_args(wanted)[0]) for item in items]
    cast = _SCALARS.get(wanted)
    if cast is None:
        raise TypeError(f"options of type {wanted} are not supported")
    return cast(raw)


def _cast_choice(raw: Any, choices: tuple[Any, ...]) -> Any:
    for choice in choices:
        if str(raw) == str(choice):
            return choice
    nearest = difflib.get_close_matches(str(raw), [str(choice) for choice in choices], n=1)
    hint = f"; the nearest is '{nearest[0]}'" if nearest else ""
    raise ValueError(f"wanted one of {', '.join(map(str, choices))}{hint}")


def _cast_bool(raw: Any) -> bool:
    if isinstance(raw, bool):
        return raw
    if isinstance(raw, str) and raw.lower() in _TRUE | _FALSE:
        return raw.lower() in _TRUE
    raise ValueError


def _cast_int(raw: Any) -> int:
    if isinstance(raw, bool) or not isinstance(raw, int | str):
        raise ValueError
    return _parsed(int, raw)


def _cast_float(raw: Any) -> float:
    # YAML reads 5e-5 (no dot) as a string, so strings are numbers here too.
    if isinstance(raw, bool) or not isinstance(raw, int | float | str):
        raise ValueError
    number: float = _parsed(float, raw)
    if not math.isfinite(number):
        raise ValueError("wanted a finite number")
    return number


def _cast_str(raw: Any) -> str:
    if isinstance(raw, list) and all(isinstance(item, int | str) and not isinstance(item, bool) for item in raw):
        return ",".join(map(str, raw))  # steps: [1, 5, 10] in YAML is the "1,5,10" of the command line
    if isinstance(raw, bool) or not isinstance(raw, str | int | float):
        raise ValueError
    return str(raw)


def _cast_path(raw: Any) -> Path:
    if not isinstance(raw, str) or not raw or "\0" in raw:
        raise ValueError
    try:
        raw.encode()
    except UnicodeEncodeError:  # safetensors takes no other paths
        raise ValueError("wanted a path in UTF-8") from None
    return Path(raw).expanduser()


def _parsed(cast: Callable[[Any], Any], raw: Any) -> Any:
    try:
        return cast(raw)
    except (ValueError, OverflowError):  # float() of an integer that is too large
        raise ValueError from None


_SCALARS: dict[Any, Callable[[Any], Any]] = {
    bool: _cast_bool,
    int: _cast_int,
    float: _cast_float,
    str: _cast_str,
    Path: _cast_path,
}


def _type_name(annotation: Any) -> str:
    wanted, optional = _without_none(annotation)
    if typing.get_origin(wanted) is Literal:
        name = "|".join(map(str, typing.get_args(wanted)))
    elif typing.get_origin(wanted) is list:
        name = f"{_type_name(typing.get_args(wanted)[0])},..."
    else:
        name = wanted.__name__.lower()
    return f"{name} or none" if optional else name


def _help_parser(config_class: type, prog: str | None) -> argparse.ArgumentParser:
    summary = (config_class.__doc__ or "").strip().splitlines()
    parser = argparse.ArgumentParser(
        prog=prog,
        usage=f"{prog or '%(prog)s'} [--config FILE] [--key value ...] [key=value ...]",
        description=summary[0] if summary else None,
        epilog="YAML files are read first; then flags and key=value words in the order given, later ones winning.",
        allow_abbrev=False,
    )
    parser.add_argument("--config", metavar="FILE", help="YAML file of options (may be given more than once)")
    fields = _Fields(config_class)
    for field in dataclasses.fields(config_class):
        flags = [f"--{name}" for name in (field.name, *field.metadata.get("aliases", ()))]
        if field.name in fields.required:
            default = "required"
        else:
            value = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
            default = f"default: {'none' if value is None else value}"
        text = f"{field.metadata.get('help', '')} ({default})".replace("%", "%%").strip()
        if fields.is_bool(field.name):
            parser.add_argument(*flags, action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS, help=text)
        else:
            parser.add_argument(*flags, metavar=_type_name(_without_none(fields.types[field.name])[0]), help=text)
    return parser
