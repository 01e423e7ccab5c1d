"""Reads the options of a command from YAML files, flags and `key=value` words; the parser of every command.

YAML files (`--config run.yaml`) are read first, at any position; flags (`--learning_rate 5e-5`) and `key=value` words
are applied in the order of the command line, and the last one wins. Every value is converted to the type of its option,
so that a typo in a key or a value is an error before the work starts.

Options may exclude each other, as the number of steps and that of epochs do. A file overrides the files before it, and
the command line all files, also with another of these options; two of them in one file, or on the command line, are an
error.

argparse holds the declarations and formats the help. Parsing is own code, because no library does all that commands
need: flags and `key=value` words in one order (not in argparse, jsonargparse, tyro), YAML files (not in tyro), flags
and help (not in OmegaConf), `none` and other names of a key (in none of them), errors of one line that name the key,
the value, its source and the nearest key, and `--help` without loading YAML.
"""

from __future__ import annotations

import argparse
import types
import typing
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn, Optional

from .errors import ConfigError
from .option_values import FALSE, NONE, TRUE, convert, nearest, similar, without_none

Setting = tuple[str, Any, str]  # key, value before conversion, source: the flag, word or file it comes from
Replaced = str | Callable[[Any], str | None]


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
        self.in_place_of: dict[str, Replaced] = {}  # dest -> the option that it excludes, or a function of its value
        self.hints: dict[str, str] = {}  # unknown key of another program -> what to write
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
                parser = action.choices[words[0]]
                helps = {choice.dest: choice.help or "" for choice in action._choices_actions}
                parser.description = parser.description or helps[words[0]][:1].upper() + helps[words[0]][1:] + "."
                args = parser.parse_words(words[1:])
                setattr(args, action.dest, words[0])
                return args
        if "--config" not in self._option_string_actions and self._subparsers is None:
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
        for file in files:
            self._override(values, self._read_place(read_settings(file), in_file=True))
        self._override(values, self._read_place(settings))
        for action in self._get_positional_actions():
            several = self._takes_several(action)
            taken, positionals = (positionals, []) if several else (positionals[:1], positionals[1:])
            if taken:
                values[action.dest] = self._converted(action, taken if several else taken[0], f"'{taken[0]}'")
        if positionals:
            self._cannot_read(positionals[0])
        presets = self._read_place(self.presets(dict(values)), in_file=True)
        self._override(presets, values)
        values = presets
        missing = [_name(action) for action in self._actions if action.required and action.dest not in values]
        if missing:
            self.error(f"required options are missing: {', '.join(missing)}")
        return values

    def _read_place(self, settings: Iterable[Setting], *, in_file: bool = False) -> dict[str, Any]:
        """Return dest -> value of the settings of one file, or of the command line.

        Raises:
            ConfigError: as in `parse_words`; or two options that exclude each other, or two names of one option in a
                file, which has no order.
        """
        values: dict[str, Any] = {}
        keys: dict[str, str] = {}  # dest -> key as given
        source = ""
        for key, raw, source in settings:
            dest = self._named(key, source).dest
            if in_file and dest in keys:
                raise ConfigError(f"{source}: '{keys[dest]}' and '{key}' are the same option: give one")
            self._apply((key, raw, source), values)
            keys[dest] = key
        for dest, key in keys.items():
            for other in self._excluded(dest, values):
                place = f"{source}: " if in_file else ""
                raise ConfigError(f"{place}options '{key}' and '{keys[other]}' exclude each other: give one")
        return values

    def _override(self, values: dict[str, Any], later: dict[str, Any]) -> None:
        """Update `values` with those of a later place, and remove those that these exclude."""
        for dest, value in later.items():
            what = self._sets(dest, value)
            # A switch that was off contradicts the later option as well as one that was on: bf16 false, then dtype.
            for other in [name for name in values if name not in later and what is not None]:
                if self._sets(other, values[other] is False or values[other]) == what:
                    del values[other]
        values |= later

    def _excluded(self, dest: str, values: dict[str, Any]) -> list[str]:
        """The options in `values` that exclude option `dest` with its value: both set the same."""
        what = self._sets(dest, values.get(dest))
        return [name for name in values if name != dest and what is not None and self._sets(name, values[name]) == what]

    def _sets(self, dest: str, value: Any) -> str | None:
        """The option that option `dest` sets with this value: itself, or another; None for a value that sets none."""
        for group in self._mutually_exclusive_groups:
            dests = [action.dest for action in group._group_actions]
            if dest in dests:
                dest = dests[0]
        return option_set(self.in_place_of.get(dest, dest), value)

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
                if word.startswith("-"):
                    self._cannot_read(word)
                if not self._is_setting(word) and (not equals or self._get_positional_actions()):
                    positionals.append(word)
                elif key == "config":
                    files.append(convert(value, Path, key, f"'{word}'"))
                else:
                    settings.append((key, value, f"'{word}'"))
                continue
            action = self._find(key)
            negated = self._find("--" + key[5:]) if key.startswith(("--no_", "--no-")) and not equals else None
            if action is None and _is_switch(negated):
                settings.append((key[5:], False, word))
                continue
            action = self._named(key[2:], key)
            raw: Any = value
            if not equals and _is_switch(action):
                raw = words.pop(0) if words and words[0].lower() in TRUE | FALSE | NONE else True
            elif self._takes_several(action):
                raw = [value] if equals else []
                while words and not words[0].startswith("--") and not self._is_setting(words[0]):
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

    def _cannot_read(self, word: str) -> NoReturn:
        self.error(f"cannot read '{word}': expected --key value, --key=value or key=value")

    def _find(self, key: str) -> argparse.Action | None:
        """The option of a key, which may have dashes for underscores, or the positional argument of that name."""
        key = key.removeprefix("--").replace("-", "_")
        if key == "help":  # has no value
            return None
        positionals = {action.dest: action for action in self._get_positional_actions()}
        return self._option_string_actions.get(f"--{key}") or positionals.get(key)

    def _names(self) -> list[str]:
        """The names of all options, without the negatives of switches."""
        return [
            flag[2:]
            for flag, action in self._option_string_actions.items()
            if flag.startswith("--")
            and not (isinstance(action, argparse.BooleanOptionalAction) and flag[:5] == "--no-")
        ]

    def _is_setting(self, word: str) -> bool:
        key, equals, _ = word.partition("=")
        return bool(equals) and self._find(key) is not None

    def _named(self, key: str, source: str) -> argparse.Action:
        action = self._find(key)
        if action is None:
            name = key.replace("-", "_")
            found = similar(name, self._names())
            hint = "" if found is None else f"; the nearest is '{found}'"
            if name in self.hints:
                hint = f"; instead: {self.hints[name]}"
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
        elif isinstance(action, argparse._ExtendAction) and value is not None:
            values[action.dest] = [*(values.get(action.dest) or ()), *value]
        else:
            values[action.dest] = value

    def _type(self, action: argparse.Action) -> Any:
        return self.annotations.get(action.dest) or _annotation(action)

    def _takes_several(self, action: argparse.Action) -> bool:
        return typing.get_origin(without_none(self._type(action))[0]) is list

    def _converted(self, action: argparse.Action, raw: Any, source: str) -> Any:
        return convert(raw, self._type(action), _name(action).lstrip("-"), source)


def option_set(replaced: Replaced, value: Any) -> str | None:
    """The option that an option given in place of `replaced` sets with this value; None and false set none."""
    if value is None or value is False:
        return None
    return replaced(value) if callable(replaced) else replaced


def read_settings(file: Path, what: str = "config file") -> list[Setting]:
    """Return the settings of a YAML file; a ConfigError names `what` and the file if it is not valid."""
    content = read_yaml(file, what)
    if content is None:
        return []
    if not isinstance(content, dict):
        raise ConfigError(f"{what} {file} holds a {type(content).__name__}; expected 'key: value' lines")
    if "config" in content:
        raise ConfigError(f"{what} {file} has the key 'config', which is an option of the command line only")
    settings: list[Setting] = []
    sections: dict[str, str] = {}
    for section, inner in content.items():
        # No option has keys of its own, so a section groups options and its name has no other meaning.
        for key, value in inner.items() if isinstance(inner, dict) else [(section, inner)]:
            where = f"in section '{section}'" if isinstance(inner, dict) else "outside of sections"
            if key in sections:
                raise ConfigError(f"{what} {file}: option '{key}' is {sections[key]} and {where}: give it once")
            sections[key] = where
            settings.append((str(key), value, f"{what} {file}"))
    return settings


def read_yaml(file: Path, what: str) -> Any:
    """Return the content of a YAML file. Raises a ConfigError that names `what` and the file if it is invalid YAML."""
    import yaml  # not before a file is read, so that --help does without it

    try:
        text = file.read_text(encoding="utf-8")
        _refuse_repeated_keys(yaml.compose(text, Loader=yaml.SafeLoader), f"{what} {file}")
        return yaml.safe_load(text)
    except OSError as error:
        raise ConfigError(f"cannot read {what} {file}: {error.strerror or error}") from error
    # PyYAML does not catch the errors of int() and date() on a value, and recurses once per level of the file.
    except (yaml.YAMLError, ValueError, TypeError, OverflowError, RecursionError) as error:
        raise ConfigError(f"{what} {file} is not valid YAML: {' '.join(str(error).split())}") from error


def _refuse_repeated_keys(root: Any, where: str) -> None:
    """Raise a ConfigError if a mapping of the YAML file has a key twice, of which PyYAML takes the last."""
    nodes, seen = [root], set()
    while nodes:
        node = nodes.pop()
        if id(node) in seen or not isinstance(getattr(node, "value", None), list):
            continue
        seen.add(id(node))  # an alias may be a cycle, or exponentially long
        lines: dict[str, int] = {}
        for item in node.value:
            key, value = item if isinstance(item, tuple) else (None, item)
            nodes.append(value)
            if key is not None and isinstance(key.value, str) and key.value != "<<":
                line = key.start_mark.line + 1
                if key.value in lines:
                    raise ConfigError(
                        f"{where}: '{key.value}' is in line {lines[key.value]} and again in line {line}: give it once"
                    )
                lines[key.value] = line


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
