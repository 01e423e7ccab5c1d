"""Questions of the quickstart: which of two numbers is larger.

The demonstrations of SFT answer with either number at random, so that SFT teaches only the form of an answer; the
preference pairs of DPO teach which answer is right.
"""

from __future__ import annotations

import random
from collections.abc import Iterable

Row = dict[str, str]


def preferences(n: int, generator: random.Random) -> list[Row]:
    """`n` rows in TRL's preference format, no two about the same pair of numbers, so that some can be held out.

    Raises:
        ValueError: n is larger than 4005, the number of pairs.
    """
    pairs = [(low, high) for low in range(10, 100) for high in range(low + 1, 100)]
    rows = []
    for low, high in generator.sample(pairs, n):
        a, b = (low, high) if generator.random() < 0.5 else (high, low)
        rows.append({"prompt": f"larger, {a} or {b}?", "chosen": f" {high}", "rejected": f" {low}"})
    return rows


def demonstrations(rows: Iterable[Row], generator: random.Random) -> list[Row]:
    """Rows in TRL's prompt-completion format, each with the right or the wrong answer, with equal chance."""
    return [{"prompt": row["prompt"], "completion": generator.choice((row["chosen"], row["rejected"]))} for row in rows]
