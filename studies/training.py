"""What the studies share: training by `sparse-opt train`, sampled answers and their rewards, and learning rates."""

from __future__ import annotations

from collections.abc import Sequence


def rounded(rate: float) -> float:
    """A learning rate with six digits, because 3e-5 * 0.3 has seventeen."""
    return float(f"{rate:.6g}")


def beyond(tried: Sequence[float], best: float) -> list[float]:
    """The next learning rate if the best one is the lowest or highest; empty if it is inside.

    The steps repeat those of the decade before: after 0.1, 0.3, 1, 3 come 10 and 30. A single rate has no steps.
    """
    if len(tried) < 2 or min(tried) < best < max(tried):
        return []
    if best >= max(tried):
        return [rounded(min(10 * rate for rate in tried if 10 * rate > 1.01 * best))]
    return [rounded(max(rate / 10 for rate in tried if 1.01 * rate / 10 < best))]
