"""The reward `number`: whether a completion's number is close to the row's.

The number of a completion is the first one between the last `<answer>` and its end, `</answer>` or that of the text;
without the tag it is the last number of the completion's answer.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

_OPENED, _CLOSED = "<answer>", "</answer>"
_NUMBER = re.compile(r"[-+]?(?:\d[\d,]*\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")
# Relative; the verdict of the unit-conversion exercise of UT Austin's course on deep learning.
TOLERANCE = 0.05


def number_in(text: str) -> float | None:
    """The number that a completion's answer gives (see the module), or None."""
    _, opened, rest = text.rpartition(_OPENED)
    found = _NUMBER.findall(rest.partition(_CLOSED)[0] if opened else text)
    if not found:
        return None
    number = float((found[0] if opened else found[-1]).replace(",", ""))
    return number if math.isfinite(number) else None


def close_numbers(texts: Sequence[str | None], answers: Sequence[Any]) -> list[float | None]:
    """1.0 if the number of a text is within 5 % of the row's answer, else 0.0; None if the answer is not a number.

    As in the exercise, both are rounded to three decimals first, and an answer of 0 has no close number.
    """
    rewards: list[float | None] = []
    for text, answer in zip(texts, answers, strict=True):
        expected = number_in(str(answer)) if answer is not None else None
        if expected is None:
            rewards.append(None)
            continue
        found = None if text is None else number_in(text)
        bound = TOLERANCE * abs(round(expected, 3))
        rewards.append(float(found is not None and abs(round(found, 3) - round(expected, 3)) < bound))
    return rewards
