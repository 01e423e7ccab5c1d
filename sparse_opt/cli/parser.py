"""argparse with one-line errors that name the nearest option, and `--top-k` read as `--top_k`."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeVar

from ..errors import ConfigError

T = TypeVar("T")


class CommandParser(argparse.ArgumentParser):
    """The parser of a command. It raises ConfigError for a wrong call instead of printing the usage and exiting."""

    def __init__(self, **kwargs: Any):
        kwargs.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(allow_abbrev=False, **kwargs)

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message} (see '{self.prog} --help')")

    def parse_words(self, argv: Sequence[str]) -> argparse.Namespace:
        """As `parse_args`, but read `--a-flag` as `--a_flag`, and name the nearest flag to an unknown one."""
        words = [_with_underscores(word) for word in argv]
        self._check_action(words)
        parser = self._parser_for(words)
        flags = [flag for action in parser._actions for flag in action.option_strings]
        for word in words:
            flag = word.partition("=")[0]
            # Checked before argparse, which would report the argument that a misspelt flag leaves missing.
            if flag.startswith("--") and flag not in flags:
                nearest = difflib.get_close_matches(flag, flags, n=1)
                parser.error(f"unknown argument '{word}'" + (f"; the nearest is '{nearest[0]}'" if nearest else ""))
        return self.parse_args(words)

    def _check_action(self, words: Sequence[str]) -> None:
        """Raise for an unknown action before its flags are checked against those of another action."""
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction) and words and not words[0].startswith("-"):
                if words[0] not in action.choices:
                    nearest = difflib.get_close_matches(words[0], action.choices, n=1)
                    hint = f"the nearest is '{nearest[0]}'" if nearest else f"there are {', '.join(action.choices)}"
                    self.error(f"unknown action '{words[0]}'; {hint}")

    def _parser_for(self, words: Sequence[str]) -> argparse.ArgumentParser:
        """The parser of the first named subcommand, or this one."""
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                return next((action.choices[word] for word in words if word in action.choices), self)
        return self


def or_none(kind: Callable[[str], T]) -> Callable[[str], T | None]:
    """An argparse `type`: `kind`, or None for the word `none`, as in the options of `train`."""

    def convert(word: str) -> T | None:
        return None if word.lower() in ("none", "null") else kind(word)

    convert.__name__ = kind.__name__  # used in argparse's message about an invalid value
    return convert


def add_json_flag(parser: argparse.ArgumentParser) -> None:
    """Add `--json`, which all commands that produce data share."""
    parser.add_argument("--json", action="store_true", help="print JSON on stdout instead of text")


def add_tensor_choice(parser: argparse._ActionsContainer) -> None:
    """Add `--include`, `--exclude` and `--mlp_only`, the arguments of `masks.parameters.select_names`."""
    for flag, text in (("--include", "only tensors whose name matches one of these"), ("--exclude", "none of these")):
        parser.add_argument(flag, nargs="+", action="extend", metavar="PATTERN", help=f"{text}, such as '*.layers.3.*'")
    parser.add_argument("--mlp_only", action="store_true", help="only weights of feed-forward blocks")


def _with_underscores(word: str) -> str:
    if not word.startswith("--"):
        return word
    flag, equals, value = word.partition("=")
    return "--" + flag[2:].replace("-", "_") + equals + value
