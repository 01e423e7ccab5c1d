"""The reward `math`: compare the completion's answer with the row's as mathematics, by math-verify (extra `math`).

Answers are parsed as in TRL 1.16's `accuracy_reward`: from a `\\boxed{...}`, else from LaTeX after an announcement
("the answer is $42$"); a bare number does not count as an answer. The expected answer is the column `answer` if there
is one, else `solution`, which may be a complete worked text.

math-verify limits its time with an alarm signal, which only the main thread can set.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Sequence
from typing import Any

from sparse_opt.errors import ConfigError, DataError, SparseOptError
from sparse_opt.integrations.trl.records import Text

# TRL's.
_PARSE_SECONDS, _VERIFY_SECONDS = 10, 5
_DELIMITED = re.compile(r"(?<!\\)\$|\\\(|\\\[|\\boxed\b|\\begin\b")


def math_reward(
    completions: Sequence[Text],
    answer: Sequence[Any] | None = None,
    solution: Sequence[Any] | None = None,
    **kwargs: Any,
) -> list[float | None]:
    """1.0 if the answer is correct, 0.0 if it is wrong or cannot be parsed; None if the expected one cannot be parsed.

    Args:
        completions: texts, or one message each.
        answer: the expected answers, parsed as LaTeX formulas with or without `$`. Without this, `2\\sqrt{3}` would be
            parsed as 2.
        solution: texts that contain the expected answer, used if there is no `answer`.

    Raises:
        DataError: neither answer nor solution.
        SparseOptError: called outside the main thread.
    """
    if answer is not None:
        expected = [None if value is None else _as_formula(str(value)) for value in answer]
    elif solution is not None:
        expected = [None if value is None else str(value) for value in solution]
    else:
        raise DataError("reward function 'math' needs a column answer or solution, and the dataset has neither")
    from math_verify import parse, verify

    _require_main_thread()
    # The completions of a prompt share their expected answer.
    golds = {text: parse(text, parsing_timeout=_PARSE_SECONDS) for text in set(expected) if text is not None}
    rewards: list[float | None] = []
    for completion, text in zip(completions, expected, strict=True):
        gold = golds[text] if text is not None else []
        right = verify(gold, _parsed(completion), timeout_seconds=_VERIFY_SECONDS) if gold else None
        rewards.append(None if right is None else float(right))
    return rewards


def answered(completions: Sequence[Text]) -> list[bool]:
    """Whether math-verify can read an answer in each completion; errors as in `math_reward`."""
    _require_main_thread()
    return [bool(_parsed(completion)) for completion in completions]


def require_math_verify() -> None:
    """Raise ConfigError if math-verify cannot be imported."""
    try:
        import math_verify  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"reward function 'math' needs math-verify, which cannot be imported ({error}): "
            "pip install 'sparse-opt[math]'"
        ) from error


def _parsed(completion: Text) -> list[Any]:
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import LatexExtractionConfig, parse

    text = completion if isinstance(completion, str) else completion[-1]["content"]
    config = LatexExtractionConfig(
        normalization_config=NormalizationConfig(units=True),
        boxed_match_priority=0,
        try_extract_without_anchor=False,
    )
    parsed: list[Any] = parse(
        text, extraction_config=[config], extraction_mode="first_match", parsing_timeout=_PARSE_SECONDS
    )
    return parsed


def _as_formula(answer: str) -> str:
    return answer if _DELIMITED.search(answer) else f"${answer}$"


def _require_main_thread() -> None:
    if threading.current_thread() is not threading.main_thread():
        raise SparseOptError(
            f"reward function 'math' was called in thread {threading.current_thread().name}: math-verify bounds its "
            "time by an alarm signal, which only the main thread can set"
        )
