"""Statistics of masks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class MaskStats:
    """Statistics of a mask over some parameters: `nnz` active of `numel` elements."""

    nnz: int
    numel: int

    @classmethod
    def sum(cls, stats: Iterable[MaskStats]) -> MaskStats:
        """Return the statistics of several parameters together."""
        stats = list(stats)
        return cls(sum(s.nnz for s in stats), sum(s.numel for s in stats))

    @property
    def density(self) -> float:
        """nnz / numel; 0 if there are no elements."""
        return self.nnz / self.numel if self.numel else 0.0

    @property
    def sparsity(self) -> float:
        """1 - density."""
        return 1.0 - self.density
