"""Coverage: the fraction of the elements active at the end of a run that are active at each step, and the density."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..delta.state_log import StateLog
from ..errors import DataError
from .states import (
    DEVICE_CPU,
    Progress,
    base_and_states,
    blocks,
    chosen_names,
    chosen_steps,
    common_dtype,
    distances,
    no_progress,
    require_thresholds,
)

TAUS = (0.0, 1e-7, 1e-6, 1e-5, 1e-4)


@dataclass(frozen=True)
class Coverage:
    """Counts over the chosen tensors, by tau and step; an element is active where abs(W_t - W_0) > tau.

    Attributes:
        steps: the steps after the base, ascending; the last one is the final one.
        taus: thresholds.
        numel: number of compared elements.
        active: [tau][step], active elements.
        shared: [tau][step], elements that are active at the step and at the final one.
    """

    steps: tuple[int, ...]
    taus: tuple[float, ...]
    numel: int
    active: tuple[tuple[int, ...], ...]
    shared: tuple[tuple[int, ...], ...]

    def density(self, tau: int) -> tuple[float, ...]:
        """Return active(t) / numel at each step, for `taus[tau]`."""
        return tuple(count / self.numel for count in self.active[tau])

    def coverage(self, tau: int) -> tuple[float, ...]:
        """Return shared(t) / active(final) at each step, for `taus[tau]`; NaN if no element is active at the end."""
        final = self.active[tau][-1]
        return tuple(count / final if final else float("nan") for count in self.shared[tau])


@torch.no_grad()
def measure_coverage(
    log: StateLog,
    steps: Sequence[int] | None = None,
    *,
    taus: Sequence[float] = TAUS,
    include: Sequence[str] | None = None,
    exclude: Sequence[str] | None = None,
    mlp_only: bool = False,
    device: torch.device = DEVICE_CPU,
    progress: Progress = no_progress,
) -> Coverage:
    """Coverage of the final active set and global density at each step, for each tau.

    Differences are taken in fp32 (fp64 tensors: in fp64); a NaN or infinite one is active if the element's bits
    changed. Reads each tensor's states twice, the final one first, and holds its base, one state and its distances.

    Args:
        steps: logged ones; all after the base by default. The last of them is the final one.
        taus: thresholds, at least 0.
        include, exclude, mlp_only: which of the floating-point parameters (`masks.parameters.select_names`).
        device: where elements are compared.
        progress: wraps the names of the tensors.

    Raises:
        DataError: a tau is negative or none is given, no tensor is chosen or they have no elements, or a step is not
            logged or is the base.
        DeltaLogError: the log is damaged.
    """
    require_thresholds("tau", taus)
    if not taus:
        raise DataError("no tau given, expected at least one")
    names = chosen_names(log, include, exclude, mlp_only)
    chosen = chosen_steps(log, steps)
    column = {step: i for i, step in enumerate(chosen)}
    active = [[0] * len(chosen) for _ in taus]
    shared = [[0] * len(chosen) for _ in taus]
    numel = 0
    for name in progress(names):
        base, states = base_and_states(log, name, chosen[-1:])
        tensor = next(states)[1]
        numel += tensor.numel()
        final = [distances(*pair) for pair in blocks(*common_dtype(base, tensor), device=device)]
        for step, tensor in log.tensor_states(name, chosen):
            pairs = blocks(*common_dtype(base, tensor), device=device)
            for pair, moved_finally in zip(pairs, final, strict=True):
                moved = distances(*pair)
                both = torch.minimum(moved, moved_finally)
                for i, tau in enumerate(taus):
                    active[i][column[step]] += int((moved > tau).count_nonzero())
                    shared[i][column[step]] += int((both > tau).count_nonzero())
    if not numel:
        raise DataError(f"{log.directory}: the chosen tensors have no elements")
    return Coverage(tuple(chosen), tuple(taus), numel, tuple(map(tuple, active)), tuple(map(tuple, shared)))
