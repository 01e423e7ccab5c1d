"""How unevenly an update is spread over the weight matrices, measured on their Frobenius norms x_1 .. x_n.

    Gini coefficient   sum_ij abs(x_i - x_j) / (2 n sum(x)): 0 if all are equal, 1 - 1/n if one matrix has all
    entropy            -sum p_i ln p_i / ln n, p_i = x_i / sum(x): 1 if all are equal, 0 if one matrix has all
    top share          the share of sum(x) that the k largest have

All are NaN if nothing changed, and the entropy if there is one matrix only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

TOP_K = 3


@dataclass(frozen=True)
class Concentration:
    """The statistics of the module's text, and the number of matrices that changed."""

    gini: float
    entropy: float
    top_share: float
    n_changed: int


def measure_concentration(norms: Sequence[float], k: int = TOP_K) -> Concentration:
    """Measure the norms of matrices, each at least 0; `k` is that of the top share."""
    n, total = len(norms), math.fsum(norms)
    n_changed = sum(norm > 0 for norm in norms)
    if not total:
        return Concentration(math.nan, math.nan, math.nan, n_changed)
    ascending = sorted(norms)
    # With the i-th smallest x_i, sum_ij abs(x_i - x_j) = 2 sum_i (2 i - n - 1) x_i.
    gini = math.fsum((2 * i - n - 1) * x for i, x in enumerate(ascending, 1)) / (n * total)
    entropy = -math.fsum(x / total * math.log(x / total) for x in norms if x) / math.log(n) if n > 1 else math.nan
    return Concentration(gini, entropy, math.fsum(ascending[-k:]) / total, n_changed)
