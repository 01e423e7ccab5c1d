"""CompactWeights: the current active weights in compact memory, so that nothing reads them from the model."""

from __future__ import annotations

import torch
from torch import Tensor

from .segments import Segments, compact


class CompactWeights:
    """What some parameters hold at their active elements: a copy, or the rounded fp32 masters.

    Writes by other code are noticed by the parameters' version counters, before the next use: then the copy is taken
    again, and masters are written to the parameters, as the next step would do. Writes through `.data`, and those
    in C++ or CUDA that leave the counters as they are, are not noticed.

    Attributes:
        copy: [nnz] of the parameters' dtype; None if there are masters.
        values: `copy`, or the masters: [nnz] fp32.
    """

    def __init__(self, segments: Segments, master: Tensor | None) -> None:
        self._segments = segments
        self._versions: list[int] | None = None  # of the parameters when the two last agreed; None: unknown
        self.values = compact(segments) if master is None else master
        self.copy = self.values if master is None else None

    @property
    def nbytes(self) -> int:
        """The bytes of the copy; masters are counted as state."""
        return 0 if self.copy is None else self.copy.nbytes

    def rounded(self) -> Tensor:
        """Return what the parameters hold since the last `sync` or step: the copy itself, or the masters, rounded."""
        return self.copy if self.copy is not None else self.values.to(self._segments.params[0].dtype)

    @torch.no_grad()
    def sync(self) -> None:
        """Make the values and the parameters agree, after a write by other code."""
        segments = self._segments
        if self._versions == self._current_versions():
            return
        if [param.numel() for param in segments.params] != segments.numels:
            return  # the op that is called next raises an error
        if self.copy is not None:
            self.copy.copy_(compact(segments))
        else:
            for i, param in enumerate(segments.params):
                rounded = self.values[segments.segment(i)].to(param.dtype)
                param.view(-1)[segments.positions(i).long()] = rounded
        self.mark_synced()

    def mark_synced(self) -> None:
        """Record that the values and the parameters agree."""
        self._versions = self._current_versions()

    def forget(self) -> None:
        """Record that they may differ, as they do while a step writes both."""
        self._versions = None

    def _current_versions(self) -> list[int]:
        return [param._version for param in self._segments.params]
