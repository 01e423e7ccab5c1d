"""CompactWeights: a bucket's current active weights in compact memory, so that nothing reads them from the model."""

from __future__ import annotations

import torch
from torch import Tensor

from .buckets import Bucket, compact


class CompactWeights:
    """What the parameters of a bucket hold at the active elements: a copy, or the bucket's fp32 masters, rounded.

    Writes by other code are noticed by the parameters' version counters, before the next use: then the copy is taken
    again, and masters are written to the parameters, as the next step would do. Writes through `.data`, and those
    in C++ or CUDA that leave the counters as they are, are not noticed.

    Attributes:
        copy: [nnz] of the parameters' dtype; None if the bucket has masters.
    """

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        self._versions: list[int] | None = None  # of the parameters when this was last true; None: unknown
        self.copy = None if "master" in bucket.state else compact(bucket)

    @property
    def values(self) -> Tensor:
        """The weights: [nnz] of the parameters' dtype, or fp32 masters."""
        return self._bucket.state["master"] if self.copy is None else self.copy

    @property
    def nbytes(self) -> int:
        """The bytes of the copy; masters are counted as state."""
        return 0 if self.copy is None else self.copy.nbytes

    @torch.no_grad()
    def sync(self) -> None:
        """Make this and the parameters agree, after a write by other code."""
        if self._versions == self._current_versions():
            return
        bucket = self._bucket
        bucket.check_params()
        if self.copy is not None:
            self.copy.copy_(compact(bucket))
        else:
            for i, param in enumerate(bucket.params):
                rounded = bucket.state["master"][bucket.segment(i)].to(param.dtype)
                param.view(-1)[bucket.positions(i).long()] = rounded
        self.mark_synced()

    def mark_synced(self) -> None:
        """Record that this and the parameters agree."""
        self._versions = self._current_versions()

    def forget(self) -> None:
        """Record that they may differ, as they do while a step writes both."""
        self._versions = None

    def _current_versions(self) -> list[int]:
        return [param._version for param in self._bucket.params]
