"""The option system of every command: typed options from YAML files, flags and `key=value` words.

YAML files (`--config run.yaml`) are read first, at any position; flags (`--learning_rate 5e-5`) and `key=value` words
are applied in the order of the command line, and the last one wins. Every value is converted to the type of its option,
so that a typo in a key or a value is an error before the work starts.

A command declares its options with `CommandParser.add_argument`, or as the fields of a dataclass:

    @dataclass(kw_only=True)
    class Options:
        learning_rate: float = option(1e-6, "peak learning rate")

    options = parse_config(Options, ["--config", "run.yaml", "--learning_rate", "5e-7"], prog="sparse-opt train dpo")

argparse holds the declarations and formats the help. Parsing is own code, because no library does all that commands
need: flags and `key=value` words in one order (not in argparse, jsonargparse, tyro), YAML files (not in tyro), flags
and help (not in OmegaConf), `none` and other names of a key (in none of them), errors of one line that name the key,
the value, its source and the nearest key, and `--help` without loading YAML.
"""

from __future__ import annotations

import argparse
import dataclasses
import operator
import types
import typing
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn, Optional, TypeVar

from .errors import ConfigError
from .option_values import FALSE, NONE, TRUE, convert, nearest, type_name, without_none

ConfigT = TypeVar("ConfigT")
Setting = tuple[str, Any, str]  # key, value before conversion, source: the flag, word or file it comes from

SEEDS = range(-(2**63), 2**64)  # that torch.manual_seed takes
_LARGEST_COUNT = 2**31 - 1
_LARGEST_FLOAT = 3.4028234663852886e38  # torch.finfo(torch.float32).max
_LOWEST_TEMPERATURE = 1e-6
_COMPARE = {"at least": operator.ge, "more than": operator.gt, "at most": operator.le, "less than": operator.lt}


class CommandParser(argparse.ArgumentParser):
    """The parser of a command; an invalid call raises ConfigError instead of printing the usage and exiting.

    `add_argument` and `add_subparsers` are argparse's. Differences in what they accept: `--a-flag` is `--a_flag`, a
    switch also takes a value (`--json false`) and has a negative (`--no_json`), and `none` is None where that is the
    default.
    """

    def __init__(self, **kwargs: Any):
        kwargs.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(allow_abbrev=False, **kwargs)
        self.annotations: dict[str, Any] = {}  # dest -> type, where add_argument cannot express it
        self.presets: Callable[[dict[str, Any]], Iterable[Setting]] = lambda given: ()

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message} (see '{self.prog} --help')")

    def parse_words(self, argv: Sequence[str]) -> argparse.Namespace:
        """Return the options in the words after the command's name.

        `-h` and `--help` print the help and exit with 0.

        Raises:
            ConfigError: an unknown action or key, a value of the wrong type, a missing option, or an invalid YAML file;
                the message names the flag, word or file.
        """
        words = list(argv)
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction) and words[:1] not in (["-h"], ["--help"]):
                if not words:
                    self.error(f"the action is missing{nearest('', action.choices)}")
                if words[0] not in action.choices:
                    self.error(f"unknown action '{words[0]}'{nearest(words[0], action.choices)}")
                args = action.choices[words[0]].parse_words(words[1:])
                setattr(args, action.dest, words[0])
                return args
        if "--config" not in self._option_string_actions:
            text = "YAML file of options, which flags and key=value words override; may be given more than once"
            self.add_argument("--config", metavar="FILE", default=argparse.SUPPRESS, help=text)
        if "-h" in words or "--help" in words:
            self.print_help()
            raise SystemExit(0)
        values = self._values(words)
        for action in self._actions:
            if action.default is not argparse.SUPPRESS and action.dest not in values:
                is_text = isinstance(action.default, str)
                values[action.dest] = self._converted(action, action.default, "default") if is_text else action.default
        return argparse.Namespace(**values)

    def _values(self, words: Sequence[str]) -> dict[str, Any]:
        """Return dest -> value of all options that are given, in files, in words or by presets."""
        files, settings, positionals = self._read_words(words)
        values: dict[str, Any] = {}
        for setting in (setting for file in files for setting in read_settings(file)):
            self._apply(setting, values)
        given: dict[str, Any] = {}
        for setting in settings:
            self._apply(setting, given)
        values |= given
        for action in self._get_positional_actions():
            several = self._takes_several(action)
            taken, positionals = (positionals, []) if several else (positionals[:1], positionals[1:])
            if taken:
                values[action.dest] = self._converted(action, taken if several else taken[0], f"'{taken[0]}'")
        if positionals:
            self.error(f"cannot read '{positionals[0]}': expected --key value, --key=value or key=value")
        for key, raw, source in self.presets(dict(values)):
            if self._named(key, source).dest not in values:
                self._apply((key, raw, source), values)
        missing = [_name(action) for action in self._actions if action.required and action.dest not in values]
        if missing:
            self.error(f"required options are missing: {', '.join(missing)}")
        for group in self._mutually_exclusive_groups:
            both = [_name(action) for action in group._group_actions if action.dest in values]
            if len(both) > 1:
                self.error(f"{' and '.join(both)} exclude each other")
        return values

    def _read_words(self, argv: Sequence[str]) -> tuple[list[Path], list[Setting], list[str]]:
        """Split the words into YAML files, settings and positional arguments, each in order."""
        files: list[Path] = []
        settings: list[Setting] = []
        positionals: list[str] = []
        words = list(argv)
        while words:
            word = words.pop(0)
            key, equals, value = word.partition("=")
            if not word.startswith("--"):
                if not equals or word.startswith("-") or (self._find(key) is None and self._get_positional_actions()):
                    positionals.append(word)
                elif key == "config":
                    files.append(convert(value, Path, key, f"'{word}'"))
                else:
                    settings.append((key, value, f"'{word}'"))
                continue
            action = self._find(key)
            if action is None and key.startswith(("--no_", "--no-")) and _is_switch(self._find("--" + key[5:])):
                settings.append((key[5:], False, word))
                continue
            action = self._named(key[2:], key)
            raw: Any = value
            if not equals and _is_switch(action):
                raw = words.pop(0) if words and words[0].lower() in TRUE | FALSE | NONE else True
            elif self._takes_several(action):
                raw = [value] if equals else []
                while words and not words[0].startswith("--") and self._find(words[0].partition("=")[0]) is None:
                    raw.append(words.pop(0))
            elif not equals:
                raw = words.pop(0) if words and not words[0].startswith("--") else None
            if raw is None or (raw == [] and action.nargs != "*"):
                raise ConfigError(f"option '{key}': expected a value")
            if action.dest == "config":
                files.append(convert(raw, Path, "config", key))
            else:
                settings.append((key[2:], raw, key))
        return files, settings, positionals

    def _find(self, key: str) -> argparse.Action | None:
        """The option of a key, which may have dashes for underscores, or the positional argument of that name."""
        key = key.removeprefix("--").replace("-", "_")
        positionals = {action.dest: action for action in self._get_positional_actions()}
        return self._option_string_actions.get(f"--{key}") or positionals.get(key)

    def _named(self, key: str, source: str) -> argparse.Action:
        action = self._find(key)
        if action is None:
            names = [flag[2:] for flag in self._option_string_actions if flag.startswith("--")]
            hint = nearest(key.replace("-", "_"), names, cutoff=0.0)
            self.error(f"unknown option '{key}' (from {source}){hint}")
        return action

    def _apply(self, setting: Setting, values: dict[str, Any]) -> None:
        """Convert a setting and put it into `values`."""
        key, raw, source = setting
        action = self._named(key, source)
        value = self._converted(action, raw, source)
        if isinstance(action, argparse._StoreConstAction) and action.const is not True:
            if value:
                values[action.dest] = action.const
        elif isinstance(action, argparse._ExtendAction):
            values[action.dest] = [*values.get(action.dest, ()), *value]
        else:
            values[action.dest] = value

    def _type(self, action: argparse.Action) -> Any:
        return self.annotations.get(action.dest) or _annotation(action)

    def _takes_several(self, action: argparse.Action) -> bool:
        return typing.get_origin(without_none(self._type(action))[0]) is list

    def _converted(self, action: argparse.Action, raw: Any, source: str) -> Any:
        return convert(raw, self._type(action), _name(action).lstrip("-"), source)


def add_options(parser: CommandParser, config_class: type) -> CommandParser:
    """Add an option for each field of a dataclass; `parse_words` then leaves out those that are not given.

    The annotations are int, float, bool, str, Path, Literal, a list of one of these, or one of them or None. If the
    class has a classmethod `presets(given)`, the settings that it returns are used for options that are not given.
    """
    parser.usage = f"{parser.prog} [--config FILE] [--key value ...] [key=value ...]"
    parser.description = (config_class.__doc__ or "").strip().partition("\n")[0]
    parser.epilog = "YAML files are read first; then flags and key=value words in the order given, later ones winning."
    parser.presets = getattr(config_class, "presets", parser.presets)
    parser.annotations = typing.get_type_hints(config_class)
    for field in dataclasses.fields(config_class):
        value = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        required = value is dataclasses.MISSING
        kind, _ = without_none(parser.annotations[field.name])
        shown = ",".join(map(str, value)) if isinstance(value, list) else str(value).lower() if kind is bool else value
        default = "required" if required else f"default: {'none' if shown in (None, '') else shown}"
        parser.add_argument(
            *(f"--{name}" for name in (field.name, *field.metadata.get("aliases", ()))),
            dest=field.name,
            required=required,
            default=argparse.SUPPRESS,
            help=f"{field.metadata.get('help', '')} ({default})".replace("%", "%%").strip(),
            **({"action": argparse.BooleanOptionalAction} if kind is bool else {"metavar": type_name(kind)}),
        )
    return parser


def parse_config(config_class: type[ConfigT], argv: Sequence[str], *, prog: str | None = None) -> ConfigT:
    """Build a dataclass from the words after a command's name; see `add_options` and `CommandParser.parse_words`.

    Raises:
        ConfigError: as in `parse_words`. Errors of the dataclass's `__post_init__` propagate.
    """
    return config_class(**vars(add_options(CommandParser(prog=prog), config_class).parse_words(argv)))


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
    """Return the dataclass as YAML, which `--config` reads back to an equal value."""
    import yaml

    plain = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    return yaml.safe_dump({k: str(v) if isinstance(v, Path) else v for k, v in plain.items()}, sort_keys=False)


def read_settings(file: Path, what: str = "config file") -> list[Setting]:
    """Return the settings of a YAML file; a ConfigError names `what` and the file if it is not valid."""
    content = read_yaml(file, what)
    if content is None:
        return []
    if not isinstance(content, dict):
        raise ConfigError(f"{what} {file} holds a {type(content).__name__}; expected 'key: value' lines")
    if "config" in content:
        raise ConfigError(f"{what} {file} has the key 'config', which is an option of the command line only")
    return [(str(key), value, f"{what} {file}") for key, value in content.items()]


def read_yaml(file: Path, what: str) -> Any:
    """Return the content of a YAML file. Raises a ConfigError that names `what` and the file if it is invalid YAML."""
    import yaml  # not before a file is read, so that --help does without it

    try:
        return yaml.safe_load(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {what} {file}: {error.strerror or error}") from error
    # PyYAML does not catch the errors of int() and date() on a value, and recurses once per level of the file.
    except (yaml.YAMLError, ValueError, TypeError, OverflowError, RecursionError) as error:
        raise ConfigError(f"{what} {file} is not valid YAML: {' '.join(str(error).split())}") from error


def _name(action: argparse.Action) -> str:
    """`--flag`, or the name of a positional argument."""
    return action.option_strings[0] if action.option_strings else str(action.metavar or action.dest)


def _is_switch(action: argparse.Action | None) -> bool:
    return action is not None and action.nargs == 0


def _annotation(action: argparse.Action) -> Any:
    """The type of a value that `add_argument` declares."""
    if action.nargs == 0:
        return bool
    kind: Any = action.type or str
    if action.choices is not None:
        kind = Literal.__getitem__(tuple(choice for choice in action.choices if choice is not None))
    if action.nargs in ("+", "*"):
        kind = types.GenericAlias(list, (kind,))
    return Optional.__getitem__(kind) if action.default is None and not action.required else kind
