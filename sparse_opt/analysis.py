"""How much of a model training changed, from the states that a delta log kept."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .delta_log import DeltaLog
from .errors import DataError
from .mask_finding import select_names
from .tensor_state import as_bits


@dataclass(frozen=True)
class ChangeCounts:
    """Of `numel` elements, those whose bits differ, and those of them that moved by more than each tolerance."""

    numel: int
    changed: int
    above: tuple[int, ...]

    @property
    def share(self) -> float:
        """changed / numel; 0 where there are no elements."""
        return self.changed / self.numel if self.numel else 0.0

    @property
    def shares_above(self) -> tuple[float, ...]:
        """above / numel, in the order of the tolerances."""
        return tuple(count / self.numel if self.numel else 0.0 for count in self.above)


def count_changes(base: Tensor, tensor: Tensor, tolerances: Sequence[float]) -> ChangeCounts:
    """Compare two contiguous floating-point tensors of one shape and dtype.

    Differences are taken in fp32 (fp64 tensors: in fp64). An element whose difference is NaN counts as above every
    tolerance if its bits changed, and so does one that became or was infinite.
    """
    changed = as_bits(base) != as_bits(tensor)
    wide = torch.float64 if tensor.dtype == torch.float64 else torch.float32
    moved = (tensor.to(wide) - base.to(wide)).abs().view(-1)[changed]
    above = tuple(int((~(moved <= tolerance)).sum()) for tolerance in tolerances)
    return ChangeCounts(tensor.numel(), moved.numel(), above)


def sum_changes(counts: Iterable[ChangeCounts]) -> ChangeCounts:
    """The counts of all tensors together, at least one."""
    numels, changed, above = zip(*((count.numel, count.changed, count.above) for count in counts), strict=True)
    return ChangeCounts(sum(numels), sum(changed), tuple(map(sum, zip(*above, strict=True))))


def changes_at(
    log: DeltaLog,
    step: int,
    *,
    tolerances: Sequence[float] = (),
    include: Sequence[str] | None = None,
    exclude: Sequence[str] | None = None,
    mlp_only: bool = False,
) -> dict[str, ChangeCounts]:
    """Tensor name -> what changed between the base weights and a logged step.

    Args:
        tolerances: see `count_changes`.
        include, exclude, mlp_only: which of the floating-point parameters (`mask_finding.select_names`).

    Raises:
        DataError: no tensor is chosen.
        DeltaLogError: the log is damaged, or the step is not logged.
    """
    layout = log.layout
    parameters = [
        spec.name
        for spec in layout.tensors
        if spec.name not in layout.buffers and getattr(torch, spec.dtype).is_floating_point
    ]
    names = select_names(parameters, include=include, exclude=exclude, mlp_only=mlp_only)
    if not names:
        raise DataError(f"no tensor of {log.directory} is chosen by include, exclude and mlp_only")
    return {name: count_changes(base, tensor, tolerances) for name, base, tensor in log.iter_delta(step, names)}
