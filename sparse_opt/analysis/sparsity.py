"""Sparsity of updates: counts of the elements that training changed, by tolerance, and of sign flips."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..delta.state_log import StateLog
from ..masks.parameters import PART_LABELS, group_by_layer, group_by_part, layer_label
from ..tensors import as_bits
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
    wide_dtype,
)

TOLERANCES = (0.0, 1e-8, 1e-7, 1e-6, 1e-5, 1e-4)


@dataclass(frozen=True)
class ChangeCounts:
    """Counts of the changed elements of one or several tensors.

    Attributes:
        numel: number of elements.
        changed: elements whose bits differ.
        above: for each tolerance, the changed elements that moved by more than it.
        flipped: elements that went from below zero to above it, or back.
    """

    numel: int
    changed: int
    above: tuple[int, ...]
    flipped: int = 0

    @property
    def share(self) -> float:
        """changed / numel; 0 where there are no elements."""
        return self._of(self.changed)

    @property
    def shares_above(self) -> tuple[float, ...]:
        """above / numel, in the order of the tolerances: the densities of the update. Its sparsities are 1 - these."""
        return tuple(self._of(count) for count in self.above)

    @property
    def share_flipped(self) -> float:
        """flipped / numel."""
        return self._of(self.flipped)

    def _of(self, count: int) -> float:
        return count / self.numel if self.numel else 0.0


@dataclass(frozen=True)
class StepChanges:
    """Counts of the changes between the base and one step, by tensor.

    Attributes:
        step: the logged step.
        stored: tensor name -> counts in the stored dtype.
        rounded: the same after rounding wider tensors (fp32, fp64) to bf16 on both sides, as in a bf16 checkpoint of
            the same run; None if the log has no wider tensor.
    """

    step: int
    stored: Mapping[str, ChangeCounts]
    rounded: Mapping[str, ChangeCounts] | None

    @property
    def by_precision(self) -> dict[str, Mapping[str, ChangeCounts]]:
        """Return `stored`, and `bf16` if `rounded` is not None."""
        return {"stored": self.stored} | ({} if self.rounded is None else {"bf16": self.rounded})


@torch.no_grad()
def count_changes(
    base: Tensor, tensor: Tensor, tolerances: Sequence[float], *, device: torch.device = DEVICE_CPU
) -> ChangeCounts:
    """Compare two floating-point tensors of one shape; different dtypes are promoted to their common dtype.

    Differences are taken in fp32 (fp64 tensors: in fp64). A changed element whose difference is NaN or infinite counts
    as above every tolerance. -0 and 0 differ in bits, and their distance is 0. Changes from or to a zero or a NaN are
    not sign flips.
    """
    changed = flipped = 0
    above = [0] * len(tolerances)
    for ours, theirs in blocks(*common_dtype(base, tensor), device=device):
        differ = as_bits(ours) != as_bits(theirs)
        before, after = ours[differ], theirs[differ]
        changed += before.numel()
        # torch does not compare float8 values.
        old, new = before.to(wide_dtype(before)), after.to(wide_dtype(after))
        flipped += int(((old < 0) & (new > 0) | (old > 0) & (new < 0)).count_nonzero())
        moved = distances(before, after)
        for i, tolerance in enumerate(tolerances):
            above[i] += int((moved > tolerance).count_nonzero())
    return ChangeCounts(tensor.numel(), changed, tuple(above), flipped)


def sum_changes(counts: Iterable[ChangeCounts]) -> ChangeCounts:
    """Return the counts of several tensors together, at least one."""
    columns = zip(*((count.numel, count.changed, count.above, count.flipped) for count in counts), strict=True)
    numels, changed, above, flipped = columns
    return ChangeCounts(sum(numels), sum(changed), tuple(map(sum, zip(*above, strict=True))), sum(flipped))


def changes_by_component(counts: Mapping[str, ChangeCounts]) -> dict[str, ChangeCounts]:
    """Return label of a component (`attention q`) -> counts of its tensors in all layers, in the model's order."""
    return {PART_LABELS[part]: sum_changes(of) for part, of in group_by_part(counts).items()}


def changes_by_layer(counts: Mapping[str, ChangeCounts]) -> dict[str, ChangeCounts]:
    """Return label of a layer (`parameters.layer_label`) -> counts of its tensors."""
    return {layer_label(layer): sum_changes(of) for layer, of in group_by_layer(counts).items()}


def measure_sparsity(
    log: StateLog,
    steps: Sequence[int] | None = None,
    *,
    tolerances: Sequence[float] = TOLERANCES,
    include: Sequence[str] | None = None,
    exclude: Sequence[str] | None = None,
    mlp_only: bool = False,
    device: torch.device = DEVICE_CPU,
    progress: Progress = no_progress,
) -> list[StepChanges]:
    """Count the changes between the base weights and each step. Holds two tensors at a time.

    Args:
        steps: logged ones; all after the base by default.
        tolerances: see `count_changes`.
        include, exclude, mlp_only: which of the floating-point parameters (`masks.parameters.select_names`).
        device: where elements are compared.
        progress: wraps the names of the tensors.

    Raises:
        DataError: a tolerance is below 0, no tensor is chosen, or a step is not logged or is the base.
        DeltaLogError: the log is damaged.
    """
    require_thresholds("tolerance", tolerances)
    names = chosen_names(log, include, exclude, mlp_only)
    chosen = chosen_steps(log, steps)
    any_wide = False
    stored: dict[int, dict[str, ChangeCounts]] = {step: {} for step in chosen}
    rounded: dict[int, dict[str, ChangeCounts]] = {step: {} for step in chosen}
    for name in progress(names):
        base, states = base_and_states(log, name, chosen)
        for step, tensor in states:
            stored[step][name] = rounded[step][name] = count_changes(base, tensor, tolerances, device=device)
            if max(base.element_size(), tensor.element_size()) > 2:
                any_wide = True
                both = base.to(torch.bfloat16), tensor.to(torch.bfloat16)
                rounded[step][name] = count_changes(*both, tolerances, device=device)
    return [StepChanges(step, stored[step], rounded[step] if any_wide else None) for step in chosen]
