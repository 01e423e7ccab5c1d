"""Which elements training changed: counts by tolerance and of sign flips, and when the final set became active.

An element is active at step t if abs(W_t - W_0) > tau. Differences are taken in fp32 (of fp64 tensors in fp64). An
element whose bits did not change has not moved, whatever its value; a changed one whose difference is NaN or infinite
has moved by more than every threshold.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..delta.state_log import StateLog, floating_parameters, require_logged
from ..errors import ConfigError, DataError
from ..masks.experts import experts_of, group_by_expert
from ..masks.parameters import select_names
from ..progress import progress_bar
from ..tensors import as_bits

TOLERANCES = (0.0, 1e-8, 1e-7, 1e-6, 1e-5, 1e-4)
TAUS = (0.0, 1e-7, 1e-6, 1e-5, 1e-4)
DEVICE_CPU = torch.device("cpu")
# Elements that are compared at a time, which bounds the temporary memory.
_BLOCK = 1 << 22


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
        return self.changed / max(self.numel, 1)

    @property
    def shares_above(self) -> tuple[float, ...]:
        """above / numel, in the order of the tolerances: the densities of the update. Its sparsities are 1 - these."""
        return tuple(count / max(self.numel, 1) for count in self.above)

    @property
    def share_flipped(self) -> float:
        """flipped / numel."""
        return self.flipped / max(self.numel, 1)


@dataclass(frozen=True)
class StepChanges:
    """Counts of the changes between the base and one step, by tensor.

    Attributes:
        step: the logged step.
        stored: tensor name -> counts in the stored dtype.
        rounded: the same after rounding wider tensors (fp32, fp64) to bf16 on both sides, as in a bf16 checkpoint of
            the same run; None if the log has no wider tensor.
        experts: (layer, number of the expert) -> counts in the stored dtype; empty without experts.
    """

    step: int
    stored: Mapping[str, ChangeCounts]
    rounded: Mapping[str, ChangeCounts] | None
    experts: Mapping[tuple[int | None, int], ChangeCounts]

    @property
    def by_precision(self) -> dict[str, Mapping[str, ChangeCounts]]:
        """Return `stored`, and `bf16` if `rounded` is not None."""
        return {"stored": self.stored} | ({} if self.rounded is None else {"bf16": self.rounded})


@dataclass(frozen=True)
class Coverage:
    """Counts over the chosen tensors, by tau and step.

    Attributes:
        steps: the steps after the base, ascending; the last one is the final one.
        taus: thresholds.
        numel: number of compared elements.
        active: elements by tau and step that are active.
        shared: the same, of elements that are active at the step and at the final one.
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
def count_changes(
    base: Tensor, tensor: Tensor, tolerances: Sequence[float], *, device: torch.device = DEVICE_CPU
) -> ChangeCounts:
    """Compare two floating-point tensors of one shape; different dtypes are promoted to their common dtype.

    -0 and 0 differ in bits, and their distance is 0. Changes from or to a zero or a NaN are not sign flips.
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
        moved = _distances(before, after)
        for i, tolerance in enumerate(tolerances):
            above[i] += int((moved > tolerance).count_nonzero())
    return ChangeCounts(tensor.numel(), changed, tuple(above), flipped)


def sum_changes(counts: Iterable[ChangeCounts]) -> ChangeCounts:
    """Return the counts of several tensors together, at least one."""
    columns = zip(*((count.numel, count.changed, count.above, count.flipped) for count in counts), strict=True)
    numels, changed, above, flipped = columns
    return ChangeCounts(sum(numels), sum(changed), tuple(map(sum, zip(*above, strict=True))), sum(flipped))


def measure_sparsity(
    log: StateLog,
    steps: Sequence[int] | None = None,
    *,
    tolerances: Sequence[float] = TOLERANCES,
    names: Sequence[str] | None = None,
    device: torch.device = DEVICE_CPU,
) -> list[StepChanges]:
    """Count the changes between the base weights and each step. Holds two tensors at a time.

    Args:
        steps: logged ones; all after the base by default.
        tolerances: at least 0; see `ChangeCounts.above`.
        names: the tensors, such as `chosen_names` returns; all floating-point parameters by default.
        device: where elements are compared.

    Raises:
        ConfigError: a tolerance is below 0.
        DataError: there is no tensor, or a step is the base.
        DeltaLogError: a step is not logged, or the log is damaged.
    """
    require_thresholds("tolerance", tolerances)
    chosen = chosen_steps(log, steps)
    any_wide = False
    stored: dict[int, dict[str, ChangeCounts]] = {step: {} for step in chosen}
    rounded: dict[int, dict[str, ChangeCounts]] = {step: {} for step in chosen}
    experts: dict[int, dict[str, dict[int, ChangeCounts]]] = {step: {} for step in chosen}
    for name in progress_bar(chosen_names(log) if names is None else names, what="sparsity", unit="tensor"):
        base, states = base_and_states(log, name, chosen)
        for step, tensor in states:
            # A parameter of fused experts is compared expert by expert.
            own = experts_of(name, tensor.shape)
            pairs = zip(base, tensor, strict=True) if len(own) > 1 else [(base, tensor)]
            counts = [count_changes(old, new, tolerances, device=device) for old, new in pairs]
            experts[step][name] = dict(zip(own, counts, strict=False))
            stored[step][name] = rounded[step][name] = sum_changes(counts)
            if max(base.element_size(), tensor.element_size()) > 2:
                any_wide = True
                both = base.to(torch.bfloat16), tensor.to(torch.bfloat16)
                rounded[step][name] = count_changes(*both, tolerances, device=device)
    by_expert = {
        step: {expert: sum_changes(of) for expert, of in group_by_expert(experts[step]).items()} for step in chosen
    }
    return [StepChanges(step, stored[step], rounded[step] if any_wide else None, by_expert[step]) for step in chosen]


@torch.no_grad()
def measure_coverage(
    log: StateLog,
    steps: Sequence[int] | None = None,
    *,
    taus: Sequence[float] = TAUS,
    names: Sequence[str] | None = None,
    device: torch.device = DEVICE_CPU,
) -> Coverage:
    """Coverage of the final active set and global density at each step, for each of `taus`, thresholds of at least 0.

    Reads each tensor's states twice, the final one first, and holds its base, one state and its distances. The last of
    the steps is the final one. Other arguments and errors are those of `measure_sparsity`.
    """
    require_thresholds("tau", taus)
    if not taus:
        raise ConfigError("no tau given, expected at least one")
    chosen = chosen_steps(log, steps)
    column = {step: i for i, step in enumerate(chosen)}
    active = [[0] * len(chosen) for _ in taus]
    shared = [[0] * len(chosen) for _ in taus]
    numel = 0
    for name in progress_bar(chosen_names(log) if names is None else names, what="coverage", unit="tensor"):
        base, states = base_and_states(log, name, chosen[-1:])
        tensor = next(states)[1]
        numel += tensor.numel()
        final = [_distances(*pair) for pair in blocks(*common_dtype(base, tensor), device=device)]
        for step, tensor in log.tensor_states(name, chosen):
            pairs = blocks(*common_dtype(base, tensor), device=device)
            for pair, moved_finally in zip(pairs, final, strict=True):
                moved = _distances(*pair)
                both = torch.minimum(moved, moved_finally)
                for i, tau in enumerate(taus):
                    active[i][column[step]] += int((moved > tau).count_nonzero())
                    shared[i][column[step]] += int((both > tau).count_nonzero())
    if not numel:
        raise DataError(f"{log.directory}: the chosen tensors have no elements")
    return Coverage(tuple(chosen), tuple(taus), numel, tuple(map(tuple, active)), tuple(map(tuple, shared)))


def chosen_names(
    log: StateLog,
    include: Sequence[str] | None = None,
    exclude: Sequence[str] | None = None,
    *,
    mlp_only: bool = False,
) -> list[str]:
    """The floating-point parameters of a log that `masks.parameters.select_names` chooses, in the model's order.

    Raises:
        DataError: none is left.
    """
    names = select_names(
        floating_parameters(log), include=include, exclude=exclude, mlp_only=mlp_only, tied=log.layout.aliases
    )
    if not names:
        raise DataError(f"no tensor of {log.directory} is chosen by include, exclude and mlp_only")
    return names


def require_thresholds(name: str, values: Sequence[float]) -> None:
    """Raise a ConfigError that names the argument unless all of its values are at least 0."""
    for value in values:
        if not value >= 0:
            raise ConfigError(f"{name} is {value}, expected at least 0")


def chosen_steps(log: StateLog, steps: Sequence[int] | None) -> list[int]:
    """The given steps, ascending, or all after the base.

    Raises:
        DataError: a step is the base, or no step is logged after the base.
        DeltaLogError: a step is not logged.
    """
    logged = log.steps
    if len(logged) < 2:
        raise DataError(f"{log.directory}: no step after {logged[0]} to compare with it")
    for step in steps or ():
        require_logged(log.directory, step, logged)
        if step == logged[0]:
            raise DataError(f"{log.directory}: step {step} is the base, expected a later step")
    return sorted(set(steps)) if steps else list(logged[1:])


def base_and_states(log: StateLog, name: str, steps: Sequence[int]) -> tuple[Tensor, Iterator[tuple[int, Tensor]]]:
    """Return a copy of the base tensor, and (step, tensor) for the others, each valid until the next is requested."""
    states = log.tensor_states(name, [log.steps[0], *steps])
    return next(states)[1].clone(), states


def blocks(*tensors: Tensor, device: torch.device = DEVICE_CPU) -> Iterator[tuple[Tensor, ...]]:
    """Yield matching flat pieces of tensors of one shape, on `device`."""
    flat = [tensor.contiguous().view(-1) for tensor in tensors]
    for start in range(0, flat[0].numel(), _BLOCK):
        yield tuple(piece[start : start + _BLOCK].to(device) for piece in flat)


def common_dtype(base: Tensor, tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Two tensors in the dtype that holds the values of both exactly."""
    dtype = torch.promote_types(base.dtype, tensor.dtype)
    return base.to(dtype), tensor.to(dtype)


def wide_dtype(tensor: Tensor) -> torch.dtype:
    """The dtype in which differences are taken: fp32, of fp64 tensors fp64."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def _distances(base: Tensor, tensor: Tensor) -> Tensor:
    """abs(tensor - base) of each element of two flat tensors of one dtype, in `wide_dtype`.

    0 if no bit of the element changed, also for NaN; infinite if one changed and the difference is NaN or infinite.
    """
    wide = wide_dtype(tensor)
    moved = (tensor.to(wide) - base.to(wide)).abs_().nan_to_num_(nan=torch.inf, posinf=torch.inf)
    return moved.masked_fill_(as_bits(base) == as_bits(tensor), 0.0)
