"""Reward functions by name or as `module:function`, several with weights.

They have TRL's signature, so that TRL's functions work unchanged:

    def reward(prompts, completions, completion_ids, answer, **kwargs) -> list[float | None]

is called with keyword arguments: `prompts` and `completions` are lists of strings or, if the prompts are messages, of
message lists, where each completion is one message of the assistant; `completion_ids` are their token ids; every other
column of the dataset is passed as a list under its own name. None means that the function does not apply to the row.

| name | 1.0 if (else 0.0) |
|---|---|
| exact_match | the answer is the column `answer`, character by character |
| math | the answer equals the column `answer`, or else `solution`, according to math-verify (see `math`) |
| number | the number in `<answer>`, or else the answer's last, is within 5 % of the column `answer` (see `numbers`) |
| think_format | the completion starts with its only `<think>` and has a `</think>`; TRL's `think_format_reward` |
| boxed_format | the answer has a closed, non-empty `\\boxed{...}` |

The answer is the text after the last `</think>`, or the content of the last `\\boxed{...}` in it, if there is one.

Not supported: TRL's arguments trainer_state, log_extra and log_metric; functions that are coroutines.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import math
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparse_opt.errors import ConfigError, DataError, SparseOptError
from sparse_opt.files import one_line
from sparse_opt.integrations.trl.records import Text

from ..data.prompts import PromptExample
from . import math as math_rewards
from . import numbers as number_rewards

RewardFunction = Callable[..., Sequence[float | None]]

_THINK, _END_OF_THINK = "<think>", "</think>"


def exact_match(completions: Sequence[Text], answer: Sequence[Any], **kwargs: Any) -> list[float | None]:
    """1.0 if the completion's answer equals the row's, ignoring surrounding spaces; None if the row has no answer."""
    return [
        None if expected is None else float(answer_text(completion_text(completion)) == str(expected).strip())
        for completion, expected in zip(completions, answer, strict=True)
    ]


def number(completions: Sequence[Text], answer: Sequence[Any], **kwargs: Any) -> list[float | None]:
    """1.0 if the completion's number is within 5 % of the row's; None if the row has no number."""
    return number_rewards.close_numbers([_number_text(completion_text(text)) for text in completions], answer)


def think_format(completions: Sequence[Text], **kwargs: Any) -> list[float | None]:
    """1.0 if the completion begins with its only `<think>` and closes it."""
    texts = map(completion_text, completions)
    return [float(text.startswith(_THINK) and text.count(_THINK) == 1 and _END_OF_THINK in text) for text in texts]


def boxed_format(completions: Sequence[Text], **kwargs: Any) -> list[float | None]:
    """1.0 if the text after the thinking has a closed, non-empty `\\boxed{...}`."""
    return [float(bool(last_boxed(_after_thinking(completion_text(completion))))) for completion in completions]


def completion_text(completion: Text) -> str:
    """A completion's text, whether it is plain or a message."""
    return completion if isinstance(completion, str) else completion[-1]["content"]


def answer_text(text: str) -> str | None:
    """The answer in a completion (see the module), without surrounding spaces; None if there is none."""
    rest = _after_thinking(text)
    boxed = last_boxed(rest)
    return (rest.strip() if boxed is None else boxed) or None


def _number_text(text: str) -> str | None:
    """The part of a completion that has its number."""
    return text if "<answer>" in text else answer_text(text)


def last_boxed(text: str) -> str | None:
    """The content of the last closed `\\boxed{...}`, without surrounding spaces; None if there is none."""
    start = text.rfind(r"\boxed{")
    while start >= 0:
        first = start + len(r"\boxed{")
        depth = 1
        for end in range(first, len(text)):
            depth += {"{": 1, "}": -1}.get(text[end], 0) if text[end - 1] != "\\" else 0
            if depth == 0:
                return text[first:end].strip()
        start = text.rfind(r"\boxed{", 0, start)
    return None


def _after_thinking(text: str) -> str:
    """The text after the last `</think>`; the whole text without `<think>`, nothing if `<think>` is not closed."""
    _, closed, rest = text.rpartition(_END_OF_THINK)
    return "" if not closed and _THINK in text else rest


_BY_NAME: dict[str, RewardFunction] = {
    "math": math_rewards.math_reward,
    "exact_match": exact_match,
    "number": number,
    "think_format": think_format,
    "boxed_format": boxed_format,
}


@dataclass(frozen=True)
class Scores:
    """Rewards of R completions, fp32 on the CPU."""

    total: Tensor  # [R]: the weighted sum over the functions that apply; NaN if none does
    by_function: dict[str, Tensor]  # [R] each, before weighting; NaN if the function does not apply

    @classmethod
    def concatenated(cls, parts: Sequence[Scores]) -> Scores:
        """The scores of consecutive completions, from those of parts of them."""
        by_function = {name: torch.cat([part.by_function[name] for part in parts]) for name in parts[0].by_function}
        return cls(torch.cat([part.total for part in parts]), by_function)

    def means(self) -> dict[str, float]:
        """Each function's mean over the rows that it applies to; functions that apply to no row are omitted."""
        means = {name: values.nanmean().item() for name, values in self.by_function.items()}
        return {name: mean for name, mean in means.items() if not math.isnan(mean)}


@dataclass(frozen=True)
class Rewards:
    """Reward functions with their weights, in order."""

    functions: dict[str, RewardFunction]
    weights: tuple[float, ...]

    def score_examples(
        self, examples: Sequence[PromptExample], completions: Sequence[str], completion_ids: Sequence[Sequence[int]]
    ) -> Scores:
        """`score` for R completions with the example of each."""
        columns = {name: [example.columns[name] for example in examples] for name in examples[0].columns}
        return self.score([example.prompt for example in examples], completions, completion_ids, columns)

    def score(
        self,
        prompts: Sequence[Text],
        completions: Sequence[str],
        completion_ids: Sequence[Sequence[int]],
        columns: Mapping[str, Sequence[Any]],
    ) -> Scores:
        """The rewards of R completions.

        A row to which no function applies has the reward NaN instead of 0: as in TRL, it has no advantage and is
        excluded from the mean of its group.

        Args:
            prompts: R prompts; `PromptExample.prompt` for each completion.
            completions: R texts, without EOS.
            completion_ids: R lists of token ids.
            columns: R values by column name; `PromptExample.columns` of the prompts.

        Raises:
            DataError: a function lacks an argument, raises an error, does not return R rewards, or returns a value that
                is neither a finite number nor None; the message names the function and the row.
        """
        texts: list[Text] = [
            text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]
            for prompt, text in zip(prompts, completions, strict=True)
        ]
        arguments: dict[str, list[Any]] = {
            "prompts": list(prompts),
            "completions": texts,
            "completion_ids": [list(ids) for ids in completion_ids],
            **{name: list(values) for name, values in columns.items()},
        }
        by_function = {name: _call(name, function, arguments) for name, function in self.functions.items()}
        rewards = torch.stack(list(by_function.values()), dim=1)
        total = (rewards * torch.tensor(self.weights, dtype=torch.float32, device="cpu")).nansum(dim=1)
        return Scores(total.masked_fill(rewards.isnan().all(dim=1), math.nan), by_function)

    def answered(self, completions: Sequence[str]) -> list[bool]:
        """Whether each completion has an answer; if `math` or `number` is a reward, one that it can parse."""
        if math_rewards.math_reward in self.functions.values():
            return math_rewards.answered(completions)
        if number in self.functions.values():
            return [number_rewards.number_in(_number_text(text) or "") is not None for text in completions]
        return [answer_text(text) is not None for text in completions]


def load_rewards(names: Sequence[str], weights: Sequence[float] | None = None) -> Rewards:
    """Load the functions of these names (see the module) with their weights, by default 1.

    A module is searched on Python's path, then in the current folder.

    Raises:
        ConfigError: there is no name, a name is repeated or unknown, a module cannot be imported or lacks the function,
            a function is a coroutine, the numbers of weights and names differ, a weight is not finite, or a package is
            missing.
    """
    if not names:
        raise ConfigError(f"option 'reward_functions' is empty: expected {', '.join(_BY_NAME)}, or module:function")
    twice = [name for name in names if list(names).count(name) > 1]
    if twice:
        raise ConfigError(f"option 'reward_functions' has '{twice[0]}' twice; weigh it with reward_weights")
    if weights is not None and len(weights) != len(names):
        raise ConfigError(f"option 'reward_weights' has {len(weights)} values, reward_functions {len(names)}")
    for weight in weights or ():
        if not math.isfinite(weight):
            raise ConfigError(f"option 'reward_weights' has {weight}: expected finite numbers")
    short = [name.rpartition(":")[2] for name in names]
    functions = {
        shorter if short.count(shorter) == 1 else name: _load(name) for name, shorter in zip(names, short, strict=True)
    }
    if math_rewards.math_reward in functions.values():
        math_rewards.require_math_verify()
    return Rewards(functions, tuple(weights) if weights is not None else (1.0,) * len(names))


def _load(name: str) -> RewardFunction:
    module_name, colon, function_name = name.rpartition(":")
    if not colon:
        if name not in _BY_NAME:
            nearest = difflib.get_close_matches(name, _BY_NAME, n=1, cutoff=0.0)[0]
            raise ConfigError(f"unknown reward function '{name}': the nearest is '{nearest}'; or write module:function")
        return _BY_NAME[name]
    function = getattr(_import(module_name, name), function_name, None)
    if not callable(function):
        raise ConfigError(f"reward function '{name}': {module_name} has no function {function_name}")
    # An instance is a coroutine function if its class's __call__ is one.
    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__):
        raise ConfigError(f"reward function '{name}' is a coroutine (async def): expected a plain function")
    loaded: RewardFunction = function
    return loaded


def _import(module_name: str, name: str) -> Any:
    # A console script does not search the current folder, which holds users' own rewards. It is appended to the path,
    # so that its files do not hide installed packages.
    folder = str(Path.cwd())
    sys.path.append(folder)
    try:
        return importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigError(f"reward function '{name}': cannot import {module_name}: {error}") from error
    except (Exception, SystemExit) as error:  # the module is the user's, and may raise anything
        raise ConfigError(f"reward function '{name}': cannot import {module_name}: {_described(error)}") from error
    finally:
        sys.path.remove(folder)


def _call(name: str, function: RewardFunction, arguments: dict[str, list[Any]]) -> Tensor:
    """The function's rewards: [R] fp32, NaN for None."""
    try:
        inspect.signature(function).bind(**arguments)
    except (TypeError, ValueError) as error:  # a builtin may have no signature
        raise DataError(
            f"reward function '{name}': {error}; it is called with {', '.join(arguments)} (a function that does not "
            "accept all of them takes **kwargs)"
        ) from error
    try:
        returned = list(function(**arguments))
    except (SparseOptError, torch.OutOfMemoryError):
        raise
    except (Exception, SystemExit) as error:  # the function is the user's, and may raise anything
        raise DataError(f"reward function '{name}' failed: {_described(error)}") from error
    n_rows = len(arguments["completions"])
    if len(returned) != n_rows:
        raise DataError(f"reward function '{name}' returned {len(returned)} rewards for {n_rows} completions")
    numbers = [_number(name, row, value) for row, value in enumerate(returned)]
    return torch.tensor(numbers, dtype=torch.float32, device="cpu")


def _described(error: BaseException) -> str:
    """An error of a user's code in one line, with its location."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {one_line(error)}{where}"


def _number(name: str, row: int, value: Any) -> float:
    if value is None:
        return math.nan
    try:
        number = math.nan if isinstance(value, str) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise DataError(f"reward function '{name}', row {row}: returned {value!r}; expected a finite number, or None")
    return number
