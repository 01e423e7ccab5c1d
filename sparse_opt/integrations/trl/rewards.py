"""Reward functions of `sparse-opt train grpo`, by name or import path, and checks of what they return.

    --reward_funcs exact_match think_format_reward my_package.rewards.short_answers

`exact_match` and `number` are defined here; the other names are those of TRL's own script (`trl/scripts/grpo.py`). Any
other function is named by its import path; Python's path and the current folder are searched.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import math
import re
import reprlib
import sys
from collections.abc import Callable, Sequence
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

import torch

from ...errors import ConfigError, DataError
from ...options import nearest

TOLERANCE = 0.05  # of `number`, relative
RewardFunction = Callable[..., Any]
_TRL = ("accuracy_reward", "reasoning_accuracy_reward", "think_format_reward", "get_soft_overlong_punishment")
_NUMBER = re.compile(r"[-+]?(?:\d[\d,]*(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+)?")


def exact_match(completions: Sequence[Any], answer: Sequence[Any], **kwargs: Any) -> list[float | None]:
    """1.0 if a completion's answer equals the column `answer`, else 0.0; None if the row has no answer.

    The answer of a completion is the text after its last `</think>`. If the column has a number, the last number of
    that text is compared with it, by value; another answer is compared character by character, without outer spaces.
    """
    texts = [completion if isinstance(completion, str) else completion[-1]["content"] for completion in completions]
    return [
        None if expected is None else float(_matches(text.rpartition("</think>")[2], str(expected).strip()))
        for text, expected in zip(texts, answer, strict=True)
    ]


def _matches(text: str, expected: str) -> bool:
    number = _decimal(expected)
    if number is None:
        return text.strip() == expected
    found = _NUMBER.findall(text)
    return bool(found) and _decimal(found[-1]) == number


def _decimal(text: str) -> Decimal | None:
    try:
        return Decimal(text.replace(",", ""))
    except InvalidOperation:
        return None


def number(completions: Sequence[Any], answer: Sequence[Any], **kwargs: Any) -> list[float | None]:
    """1.0 if a completion's number is within 5 % of the column `answer`, else 0.0; None if the answer has no number.

    Both are rounded to three decimals, and an answer of 0 has no close number: the verdict of a course's exercise in
    converting units (KramCoder/ADL-3, `is_answer_valid`).
    """
    rewards: list[float | None] = []
    for completion, expected in zip(completions, map(str, answer), strict=True):
        found = number_in(completion if isinstance(completion, str) else completion[-1]["content"])
        right = number_in(expected)
        if right is None:
            rewards.append(None)
            continue
        right = round(right, 3)
        rewards.append(float(found is not None and abs(round(found, 3) - right) < TOLERANCE * abs(right)))
    return rewards


def number_in(text: str) -> float | None:
    """The first number between the last <answer> and its end, or without the tag the last number of the text."""
    _, opened, rest = text.rpartition("<answer>")
    found = _NUMBER.findall(rest.partition("</answer>")[0] if opened else text)
    if not found:
        return None
    value = float((found[0] if opened else found[-1]).replace(",", ""))
    return value if math.isfinite(value) else None


_OWN = {"exact_match": exact_match, "number": number}


def load_rewards(names: Sequence[str]) -> list[RewardFunction]:
    """The functions of these names, each with the checks of `checked`.

    Raises:
        ConfigError: a name is unknown, or its module cannot be imported or lacks the function.
    """
    return [checked(_load(name)) for name in names]


def _load(name: str) -> RewardFunction:
    if name in _OWN:
        return _OWN[name]
    if name in _TRL:
        from trl import rewards

        function: RewardFunction = getattr(rewards, name)
        # The values of TRL's script.
        made = name == "get_soft_overlong_punishment"
        return function(max_completion_len=1280, soft_punish_cache=256) if made else function
    module_name, _, function_name = name.rpartition(".")
    if not module_name:
        raise ConfigError(f"unknown reward function '{name}'{nearest(name, (*_OWN, *_TRL))}; or write module.function")
    folder = str(Path.cwd())  # not on the path of a console script; last, so that it hides no installed package
    sys.path.append(folder)
    try:
        found = getattr(importlib.import_module(module_name), function_name, None)
    except ImportError as error:
        raise ConfigError(f"reward function '{name}': cannot import {module_name}: {error}") from error
    finally:
        sys.path.remove(folder)
    if not callable(found):
        raise ConfigError(f"reward function '{name}': {module_name} has no function {function_name}")
    loaded: RewardFunction = found
    return loaded


def checked(function: RewardFunction) -> RewardFunction:
    """The function, with a DataError of one line if it returns anything but a finite number or None per completion.

    A function that leaves gradients switched off, which would stop training silently, is an error as well.
    """
    name = getattr(function, "__name__", type(function).__name__)

    def check(rewards: Any, n_completions: int) -> list[float | None]:
        if not isinstance(rewards, Sequence | torch.Tensor) or isinstance(rewards, str):
            raise DataError(f"reward function '{name}' returned {reprlib.repr(rewards)}, expected a list of numbers")
        if len(rewards) != n_completions:
            raise DataError(f"reward function '{name}' returned {len(rewards)} rewards for {n_completions} completions")
        return [_finite(name, row, reward) for row, reward in enumerate(rewards)]

    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def call_async(completions: Sequence[Any], **kwargs: Any) -> list[float | None]:
            return check(await function(completions=completions, **kwargs), len(completions))

        return call_async

    @functools.wraps(function)
    def call(completions: Sequence[Any], **kwargs: Any) -> list[float | None]:
        try:
            inspect.signature(function).bind(completions=completions, **kwargs)
        except TypeError as error:
            raise DataError(
                f"reward function '{name}': {error}; the rows give it {', '.join(['completions', *kwargs])}"
            ) from error
        enabled = torch.is_grad_enabled()
        rewards = function(completions=completions, **kwargs)
        if torch.is_grad_enabled() != enabled:
            torch.set_grad_enabled(enabled)
            raise DataError(
                f"reward function '{name}' leaves torch.is_grad_enabled() {not enabled}, expected {enabled}: use "
                "`with torch.no_grad():` in it"
            )
        return check(rewards, len(completions))

    call.__name__ = name
    return call


def _finite(name: str, row: int, reward: Any) -> float | None:
    if reward is None:
        return None
    try:
        value = math.nan if isinstance(reward, str) else float(reward)
    except (TypeError, ValueError, OverflowError):
        value = math.nan
    if not abs(value) <= torch.finfo(torch.float32).max:
        raise DataError(
            f"reward function '{name}', completion {row}: returned {reprlib.repr(reward)}, expected a finite "
            "number or None"
        )
    return value
