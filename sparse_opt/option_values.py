"""Converts one word of the command line or one value of a YAML file to the type of its option."""

from __future__ import annotations

import difflib
import math
import reprlib
import types
import typing
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Literal, Union

from .errors import ConfigError

TRUE = {"true", "yes", "on", "1"}
FALSE = {"false", "no", "off", "0"}
NONE = {"none", "null"}


def convert(raw: Any, annotation: Any, name: str, source: str) -> Any:
    """Convert `raw` to `annotation`.

    Args:
        raw: a word, a list of words, or a value read from YAML.
        annotation: int, float, bool, str, Path, Literal, another function of one word, a list of one of these, or one
            of them or None.
        name: the option, for the message.
        source: the flag, word or file that the value comes from, for the message.

    Raises:
        ConfigError: `raw` is of another type.
    """
    expected, optional = without_none(annotation)
    word = raw[0] if isinstance(raw, list) and len(raw) == 1 else raw
    if optional and (raw is None or (isinstance(word, str) and word.lower() in NONE)):
        return None
    try:
        return _cast(raw, expected)
    except ValueError as error:
        reason = str(error) or f"expected {type_name(annotation)}"
        raise ConfigError(f"option '{name}' (from {source}) is {_shortened(raw)}: {reason}") from error


def without_none(annotation: Any) -> tuple[Any, bool]:
    """Return the annotation without `None`, and whether `None` was allowed."""
    if typing.get_origin(annotation) in (Union, types.UnionType):
        inner = [arg for arg in typing.get_args(annotation) if arg is not type(None)]
        if len(inner) != 1:
            raise TypeError(f"expected an option of one type, or of one type and None; found {annotation}")
        return inner[0], True
    return annotation, False


def type_name(annotation: Any) -> str:
    """Return the annotation as shown in help and messages: `int`, `dense|sparse`, `path or none`."""
    expected, optional = without_none(annotation)
    if typing.get_origin(expected) is Literal:
        name = "|".join(map(str, typing.get_args(expected)))
    elif typing.get_origin(expected) is list:
        name = f"{type_name(typing.get_args(expected)[0])},..."
    else:
        name = expected.__name__.lower()
    return f"{name} or none" if optional else name


def similar(word: str, words: Iterable[str]) -> str | None:
    """The name that `word` may stand for: spelled almost alike, or with words in common."""
    names = list(words)
    alike = difflib.get_close_matches(word, names, n=1, cutoff=0.75)
    parts = set(word.split("_"))
    holding = [name for name in names if parts <= set(name.split("_"))]
    loosely = difflib.get_close_matches(word, [name for name in names if parts & set(name.split("_"))], n=1)
    return next(iter([*alike, *sorted(holding, key=len), *loosely]), None)


def nearest(word: str, words: Iterable[str], *, cutoff: float = 0.6) -> str:
    """Return `; the nearest is 'x'` for the most similar of `words`, or all of them if none is similar."""
    found = difflib.get_close_matches(word, words := list(words), n=1, cutoff=cutoff)
    return f"; the nearest is '{found[0]}'" if found else f"; expected one of {', '.join(words)}"


def _shortened(raw: Any) -> str:
    """Return a value as short text for a message, also if a YAML file's aliases make it exponentially long."""
    shortener = reprlib.Repr()
    shortener.maxstring, shortener.maxother, shortener.maxlevel = 200, 200, 2
    return shortener.repr(raw)


def _cast(raw: Any, expected: Any) -> Any:
    """Convert `raw` to `expected`, which is not optional; an empty ValueError means "of another type"."""
    origin = typing.get_origin(expected)
    if origin is Literal:
        choices = typing.get_args(expected)
        given = {str(raw)} if not isinstance(raw, bool) else TRUE if raw else FALSE  # YAML reads `no` as false
        for choice in choices:
            if str(choice) in given:
                return choice
        names = [str(choice) for choice in choices]
        close = difflib.get_close_matches(str(raw), names, n=1)
        raise ValueError(f"expected one of {', '.join(names)}" + (f"; the nearest is '{close[0]}'" if close else ""))
    if origin is list:
        (kind,) = typing.get_args(expected)
        words = raw if isinstance(raw, list) else [raw]
        if kind not in (str, Path) and len(words) == 1 and str(words[0])[:1] == "[" and str(words[0])[-1:] == "]":
            words = str(words[0])[1:-1].split(",")  # [1, 0.01], as in YAML and Hydra; patterns of names may look so
        if kind is not Path:  # names of files may have commas
            words = [part for word in words for part in (word.split(",") if isinstance(word, str) else [word])]
        return [_cast(word, kind) for word in words]
    return _SCALARS.get(expected, expected)(raw)


def _cast_bool(raw: Any) -> bool:
    if isinstance(raw, bool):
        return raw
    if isinstance(raw, str) and raw.lower() in TRUE | FALSE:
        return raw.lower() in TRUE
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
        raise ValueError("expected a finite number")
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
        raise ValueError("expected a path in UTF-8") from None
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
