"""`CommandParser`: argparse with YAML files, `key=value` words, and errors of one line that name the nearest option.

Files (`--config run.yaml`) are read first, at any position; then flags and words in the order of the command line.
Later ones win. A file's values are those of flags: a list is several values, `true` sets a switch, `null` is the
default None. The parser of `sparse-opt train`, whose options are the fields of TRL's dataclasses, derives from it.
"""

from __future__ import annotations

import argparse
import difflib
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from .errors import ConfigError

TRUE = {"true", "yes", "on", "1"}
FALSE = {"false", "no", "off", "0"}
NONE = {"none", "null"}
_Flags = list[tuple[str, list[str]]]  # (option, the words that set it) in order


class CommandParser(argparse.ArgumentParser):
    """The parser of a command; an invalid call raises ConfigError instead of printing the usage and exiting.

    Differences in what `add_argument` declares: `--a-flag` is `--a_flag`, a switch also takes a value (`--json false`)
    and has a negative (`--no_json`), an option of several values splits them at commas unless they are paths, `none` is
    None where that is the default, and numbers are finite.

    Attributes:
        given: names of the options in files and words, after `parse_words`.
    """

    given: frozenset[str] = frozenset()

    def __init__(self, **kwargs: Any) -> None:
        kwargs.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(allow_abbrev=False, **kwargs)

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message} (see '{self.prog} --help')")

    def parse_words(self, argv: Sequence[str]) -> argparse.Namespace:
        """Return the options in the words after the command's name.

        `-h` and `--help` print the help and exit with 0.

        Raises:
            ConfigError: an unknown action or option, a value of the wrong type, a missing option, or an invalid file.
        """
        words = list(argv)
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction) and words[:1] not in (["-h"], ["--help"]):
                return self._parse_action(action, words)
        if "--config" not in self._option_string_actions and self._subparsers is None:
            text = "YAML file of options, which flags and key=value words override; may be given more than once"
            self.add_argument("--config", metavar="FILE", default=argparse.SUPPRESS, help=text)
        if "-h" in words or "--help" in words:
            self.print_help()
            raise SystemExit(0)
        files, given, positionals = self._read(words)
        for file in reversed(files):  # what a later place sets, and what that excludes, is left out
            of_file: _Flags = []
            for key, value in self.settings(file).items():
                action = self._named(key, f"config file {file}")
                if not action.option_strings:
                    positionals = positionals or [str(item) for item in (value if isinstance(value, list) else [value])]
                elif not {dest for dest, _ in given} & {action.dest, *self._excluded(action)}:
                    self._set(of_file, action, value, f"config file {file}")
            self._check(of_file, f"config file {file}")
            given = of_file + given
        self.given = frozenset(dest for dest, _ in given)
        found = self.parse_intermixed_args([*_words(given), *(["--", *positionals] if positionals else [])])
        for name, value in vars(found).items():
            if isinstance(value, float) and not math.isfinite(value):
                self.error(f"--{name} is {value}, expected a finite number")
        return found

    def _parse_action(self, action: Any, words: list[str]) -> argparse.Namespace:
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

    def _read(self, words: list[str]) -> tuple[list[Path], _Flags, list[str]]:
        """Split the words into files, options and positional arguments."""
        files: list[Path] = []
        flags: _Flags = []
        positionals: list[str] = []
        while words:
            word = words.pop(0)
            if word[:2] != "--" and word in self._option_string_actions:  # -o
                word = self._option_string_actions[word].option_strings[0]
            key, equals, text = word.partition("=")
            if not word.startswith("--"):
                if word.startswith("-"):
                    self._cannot_read(word)
                if not equals or (self._find(key) is None and self._get_positional_actions()):
                    positionals.append(word)
                    continue
            action = self._find(key)
            negated = self._find(key[5:]) if key.startswith(("--no_", "--no-")) and not equals else None
            if action is None and negated is not None and _is_switch(negated):
                self._set(flags, negated, False, word)
                continue
            action = action or self._named(key.removeprefix("--"), f"'{word}'")
            value: Any = text
            if not equals and _is_switch(action):
                takes_any = self._follows(words) and not self._get_positional_actions()
                is_value = takes_any or (words and words[0].lower() in TRUE | FALSE | NONE)
                value = words.pop(0) if is_value else True
            elif not equals and action.nargs == "?":
                value = words.pop(0) if self._follows(words) else action.const
            elif not equals and action.nargs in ("+", "*"):
                value = []
                while self._follows(words):
                    value.append(words.pop(0))
            elif not equals:
                if not words or words[0].startswith("--"):
                    self.error(f"option '{key}': expected a value")
                value = words.pop(0)
            if action.dest == "config":
                files.append(Path(value))
            else:
                self._set(flags, action, value, f"'{word}'")
        if positionals and not self._get_positional_actions():
            self._cannot_read(positionals[0])
        return files, flags, positionals

    def _cannot_read(self, word: str) -> NoReturn:
        self.error(f"cannot read '{word}': expected --key value, --key=value or key=value")

    def _set(self, flags: _Flags, action: argparse.Action, value: Any, source: str) -> None:
        """Add the words that set an option to a value: a word, or of a file a number, a bool, a list or None."""
        flag = action.option_strings[0]
        inner = value if isinstance(value, list) else []
        if isinstance(value, dict) or any(isinstance(item, list | dict) for item in inner):
            self.error(f"option '{flag}' (from {source}) has keys or lists of its own, expected a value")
        text = str(value).lower()  # ['none'] is a list of one word
        is_none = value is None or text in NONE or text in {f"['{word}']" for word in NONE}
        if not isinstance(action, argparse._ExtendAction) or is_none:
            flags[:] = [(dest, words) for dest, words in flags if dest != action.dest]
        if is_none and (action.default is None or action.nargs == 0):
            flags.append((action.dest, []))
        elif _is_switch(action):
            if text not in TRUE | FALSE:
                self.error(f"option '{flag}' (from {source}) is {value!r}, expected true or false")
            if action.nargs != 0:
                flags.append((action.dest, [f"{flag}={text in TRUE}"]))
                return
            negative = [action.option_strings[-1]] if isinstance(action, argparse.BooleanOptionalAction) else []
            flags.append((action.dest, [flag] if text in TRUE else negative))
        elif action.nargs in ("+", "*"):
            flags.append((action.dest, [flag, *self._items(action, value, flag)]))
        elif action.type is Path and value == "":
            self.error(f"option '{flag}' (from {source}): expected a path")
        else:
            if isinstance(value, bool) and action.choices is not None:  # YAML reads `no` as false
                same = TRUE if value else FALSE
                value = next((choice for choice in action.choices if str(choice) in same), value)
            value = ",".join(map(str, value)) if isinstance(value, list) else value
            flags.append((action.dest, [f"{flag}={value}"]))

    def _items(self, action: argparse.Action, value: Any, flag: str) -> list[str]:
        """The values of an option of several: a list's, or those of words with commas, as in `a,b` or `[1, 0.01]`."""
        items = [str(item) for item in value] if isinstance(value, list) else [str(value)]
        text = " ".join(items)
        if text[:1] == "[" and text[-1:] == "]" and (action.type in (int, float) or "," in text):  # else a pattern
            items = [text[1:-1]]
        if action.type is not Path:  # names of files may have commas
            items = [part.strip() for item in items for part in item.split(",") if part.strip()]
        if not items and action.nargs == "+":
            self.error(f"option '{flag}': expected a value")
        return items

    def _check(self, flags: _Flags, source: str) -> None:
        """Raise a ConfigError that names the file, if a value of the file is not valid."""
        required = [action for action in self._actions if action.required]
        try:
            for action in required:
                action.required = False
            self.parse_known_args(_words(flags))
        except ConfigError as error:
            raise ConfigError(f"{source}: {error}") from error
        finally:
            for action in required:
                action.required = True

    def settings(self, file: Path) -> dict[str, Any]:
        """The options in a YAML file, by name."""
        content = read_yaml(file, "config file")
        if not isinstance(content, dict | None):
            raise ConfigError(f"config file {file} holds a {type(content).__name__}; expected 'key: value' lines")
        if "config" in (content or {}):
            raise ConfigError(f"config file {file} has the key 'config', which is an option of the command line only")
        return {str(key): value for key, value in (content or {}).items()}

    def _excluded(self, action: argparse.Action) -> set[str]:
        groups = [group._group_actions for group in self._mutually_exclusive_groups]
        return {other.dest for group in groups if action in group for other in group}

    def _find(self, key: str) -> argparse.Action | None:
        """The option of a key, which may have dashes for underscores, or the positional argument of that name."""
        name = key.removeprefix("--").replace("-", "_")
        positionals = {action.dest: action for action in self._get_positional_actions()}
        return None if name == "help" else self._option_string_actions.get(f"--{name}") or positionals.get(name)

    def _follows(self, words: list[str]) -> bool:
        """Whether the next word can be the value of an option: it is none itself."""
        key, equals, _ = words[0].partition("=") if words else ("--", "", "")
        return not key.startswith("--") and not (equals and self._find(key) is not None)

    def _named(self, key: str, source: str) -> argparse.Action:
        action = self._find(key)
        if action is None:
            flags = [flag[2:] for flag in self._option_string_actions if flag.startswith("--") and flag != "--help"]
            names = [name for name in flags if "-" not in name]
            found = similar(key.replace("-", "_"), names)
            hint = "" if found is None else f"; the nearest is '{found}'"
            self.error(f"unknown option '{key}' (from {source}){hint}")
        return action


def _words(flags: _Flags) -> list[str]:
    return [word for _, words in flags for word in words]


def _is_switch(action: argparse.Action) -> bool:
    """Whether an option is true or false: of argparse, or of transformers' parser, where it has a value."""
    return action.nargs == 0 or getattr(action.type, "__name__", "") == "string_to_bool"


def read_yaml(file: Path, what: str) -> Any:
    """Return the content of a YAML file. Raises a ConfigError that names `what` and the file if it is invalid YAML."""
    import yaml  # not before a file is read, so that --help does without it

    class UniqueKeys(yaml.SafeLoader):
        """PyYAML takes the last of two equal keys."""

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            lines: dict[str, int] = {}
            for key, _ in node.value:
                name, line = str(key.value), key.start_mark.line + 1
                if name != "<<" and name in lines:
                    raise ConfigError(
                        f"{what} {file}: '{name}' is in line {lines[name]} and again in line {line}: give it once"
                    )
                lines[name] = line
            return super().construct_mapping(node, deep)

    try:
        return yaml.load(file.read_text(encoding="utf-8"), Loader=UniqueKeys)
    except OSError as error:
        raise ConfigError(f"cannot read {what} {file}: {error.strerror or error}") from error
    except ConfigError:
        raise
    # PyYAML does not catch the errors of int() and date() on a value, and recurses once per level of the file.
    except (yaml.YAMLError, ValueError, TypeError, OverflowError, RecursionError) as error:
        raise ConfigError(f"{what} {file} is not valid YAML: {' '.join(str(error).split())}") from error


def similar(word: str, words: Iterable[str]) -> str | None:
    """The name that `word` may stand for: spelled almost alike, or with words in common."""
    names = list(words)
    alike = difflib.get_close_matches(word, names, n=1, cutoff=0.75)
    parts = set(word.split("_"))
    holding = [name for name in names if parts <= set(name.split("_"))]
    loosely = difflib.get_close_matches(word, [name for name in names if parts & set(name.split("_"))], n=1)
    return next(iter([*alike, *sorted(holding, key=len), *loosely]), None)


def nearest(word: str, words: Iterable[str]) -> str:
    """Return `; the nearest is 'x'` for the most similar of `words`, or all of them if none is similar."""
    found = difflib.get_close_matches(word, words := list(words), n=1)
    return f"; the nearest is '{found[0]}'" if found else f"; expected one of {', '.join(words)}"
