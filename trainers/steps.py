"""Schedules of steps: "every:5", "1,2,10", "1-10", "last"."""

from __future__ import annotations

import re

from sparse_opt.errors import ConfigError


def parse_steps(text: str, n_steps: int) -> frozenset[int]:
    """The steps in 1..n_steps that a schedule names; step n is the state after the n-th optimizer step.

    Items are separated by commas: a step `7`, a range `1-10` (both ends included), `every:5` (5, 10, ...), `last`
    (step n_steps). Steps past n_steps are left out, so that one schedule serves runs of several lengths.

    Raises:
        ConfigError: an item of another form, or a step below 1.
    """
    steps: set[int] = set()
    for item in (part.strip() for part in text.split(",")):
        if item == "last":
            steps.add(n_steps)
        elif match := re.fullmatch(r"every:([1-9]\d*)", item):
            steps.update(range(int(match[1]), n_steps + 1, int(match[1])))
        elif match := re.fullmatch(r"([1-9]\d*)(?:-([1-9]\d*))?", item):
            first, end = int(match[1]), int(match[2] or match[1])
            if end < first:
                raise ConfigError(f"step schedule '{text}': the range '{item}' runs backwards")
            steps.update(range(first, min(end, n_steps) + 1))
        else:
            raise ConfigError(
                f"step schedule '{text}': cannot read '{item}'; wanted a step, first-last, every:k or last"
            )
    return frozenset(steps)
