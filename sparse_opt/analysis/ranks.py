"""Ranks, norms and shares of large elements of each weight matrix's update.

With singular values s_1 >= s_2 >= ... of the change W_t - W_0, taken in fp32 (fp64 weights: in fp64):

    classical rank   how many s_i are above max(m, n) eps s_1, eps that of the matrix's dtype and at most fp32's: the
                     rule of numpy.linalg.matrix_rank and torch.linalg.matrix_rank for an fp32 matrix
    effective rank   exp(-sum p_i ln p_i), p_i = s_i / sum(s): Roy and Vetterli, The effective rank, EUSIPCO 2007
    stable rank      sum(s_i^2) / s_1^2

All three are 0 for a matrix of zeros. Each has an interval that contains the exact value, from the error bounds of
the singular values.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..delta.state_log import StateLog
from ..errors import DataError
from ..masks.parameters import component_of
from ..tensors import canonical_names
from .spectrum import LOWRANK_K, Method, Spectrum, singular_values
from .states import (
    DEVICE_CPU,
    Progress,
    base_and_states,
    blocks,
    chosen_names,
    chosen_steps,
    common_dtype,
    no_progress,
    require_thresholds,
    wide_dtype,
)

TAU = 1e-6


@dataclass(frozen=True)
class Interval:
    """A computed value, and the interval that contains the exact value."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class RankStats:
    """Statistics of one update matrix.

    Attributes:
        shape: of the matrix as the model keeps it; GPT-2's Conv1D weights are [in, out], no statistic depends on it.
        rank, effective_rank, stable_rank: see the module.
        frobenius_norm, spectral_norm: in the units of the weights; the spectral norm is s_1.
        share_above: share of elements with abs(delta) > tau.
        share_large: share of elements with abs(delta) > mean + 2 * standard deviation of the abs(delta) of this matrix.
        method: how the singular values were found (`spectrum`).
    """

    shape: tuple[int, int]
    rank: Interval
    effective_rank: Interval
    stable_rank: Interval
    frobenius_norm: float
    spectral_norm: Interval
    share_above: float
    share_large: float
    method: Method

    @property
    def full_rank(self) -> int:
        """min(m, n), which classical, effective and stable rank cannot exceed."""
        return min(self.shape)


def get_rank(matrix: Tensor, tolerance: float | None = None) -> int:
    """Classical rank of a matrix [m, n]: how many singular values, computed in fp64, are above `tolerance`.

    Args:
        tolerance: absolute; max(m, n) * eps * s_1 by default, eps as in the module's text.

    Raises:
        DataError: not a matrix, no elements, or NaN or infinite elements.
    """
    return int(_rank(singular_values(matrix), _relative_tolerance(matrix), tolerance).value)


def get_effective_rank(matrix: Tensor) -> float:
    """exp(-sum p ln p), p = s / sum(s), of a matrix [m, n]. Raises DataError as `get_rank`."""
    return _effective_rank(singular_values(matrix)).value


def get_stable_rank(matrix: Tensor) -> float:
    """sum(s^2) / s_1^2 of a matrix [m, n]. Raises DataError as `get_rank`."""
    return _stable_rank(singular_values(matrix)).value


def get_layer_rank_stats(
    model_or_state: nn.Module | Mapping[str, Tensor],
    init_state: Mapping[str, Tensor],
    tolerance: float = TAU,
    *,
    method: Method = "exact",
    k: int = LOWRANK_K,
    device: torch.device | None = None,
) -> dict[str, RankStats]:
    """Return name -> statistics of the change of each weight matrix of a model, or of its state, since `init_state`.

    Weight matrices are the floating-point parameters of two dimensions and, as `name[0]`, the slices of those of three
    (experts), norms excluded. Tied ones count once, under their first name.

    Args:
        init_state: the state to compare with; must have every weight matrix, in the same shape.
        tolerance: tau of `share_above`.
        method, k: see `spectrum.singular_values`.
        device: where to compute; by default where the model's tensor is.

    Raises:
        DataError: a matrix is missing from `init_state` or has another shape there, or its change is NaN or infinite.
    """
    # A type checker does not narrow types by `is_module`.
    is_module = isinstance(model_or_state, nn.Module)
    state = dict(model_or_state.named_parameters(remove_duplicate=False) if is_module else model_or_state)  # type: ignore[union-attr,arg-type]
    firsts = canonical_names(state)
    stats: dict[str, RankStats] = {}
    for name, tensor in state.items():
        if firsts[name] != name or not tensor.is_floating_point() or not is_weight_matrix(name, tensor.ndim):
            continue
        if name not in init_state:
            raise DataError(f"init_state has no {name}")
        base = init_state[name]
        if base.shape != tensor.shape:
            raise DataError(f"{name} is {list(tensor.shape)}, {list(base.shape)} in init_state")
        stats |= _named_stats(name, base, tensor, tolerance, method, k, device or tensor.device)
    return stats


def measure_ranks(
    log: StateLog,
    step: int | None = None,
    *,
    tau: float = TAU,
    method: Method = "exact",
    k: int = LOWRANK_K,
    include: Sequence[str] | None = None,
    exclude: Sequence[str] | None = None,
    mlp_only: bool = False,
    device: torch.device = DEVICE_CPU,
    progress: Progress = no_progress,
) -> dict[str, RankStats]:
    """`get_layer_rank_stats` of a logged step, the last one by default, against the base; one matrix at a time.

    Args:
        include, exclude, mlp_only: which of the floating-point parameters (`masks.parameters.select_names`).
        progress: wraps the names of the matrices.

    Raises:
        DataError: tau is negative, no weight matrix is chosen, the step is not logged or is the base, or a change is
            NaN or infinite; names the tensor.
        DeltaLogError: the log is damaged.
    """
    steps = None if step is None else [step]
    chosen = chosen_steps(log, steps)[-1:]
    return measure_ranks_by_step(
        log,
        chosen,
        tau=tau,
        method=method,
        k=k,
        include=include,
        exclude=exclude,
        mlp_only=mlp_only,
        device=device,
        progress=progress,
    )[chosen[0]]


def measure_ranks_by_step(
    log: StateLog,
    steps: Sequence[int] | None = None,
    *,
    tau: float = TAU,
    method: Method = "exact",
    k: int = LOWRANK_K,
    include: Sequence[str] | None = None,
    exclude: Sequence[str] | None = None,
    mlp_only: bool = False,
    device: torch.device = DEVICE_CPU,
    progress: Progress = no_progress,
) -> dict[int, dict[str, RankStats]]:
    """Return step -> `measure_ranks` of that step, for ascending `steps`, by default all after the base.

    Every matrix is read once for all steps. Arguments and errors are those of `measure_ranks`.
    """
    require_thresholds("tau", [tau])
    dims = {spec.name: len(spec.shape) for spec in log.layout.tensors}
    names = [n for n in chosen_names(log, include, exclude, mlp_only) if is_weight_matrix(n, dims[n])]
    if not names:
        raise DataError(f"no weight matrix of {log.directory} is chosen by include, exclude and mlp_only")
    chosen = chosen_steps(log, steps)
    stats: dict[int, dict[str, RankStats]] = {step: {} for step in chosen}
    for name in progress(names):
        base, states = base_and_states(log, name, chosen)
        for step, tensor in states:
            stats[step] |= _named_stats(name, base, tensor, tau, method, k, device)
    return stats


def is_weight_matrix(name: str, dims: int) -> bool:
    """Whether a parameter is a matrix (two dimensions) or a stack of matrices (three), and not a norm's."""
    return dims in (2, 3) and component_of(name).part != "norms"


def rank_stats(delta: Tensor, tau: float = TAU, *, method: Method = "exact", k: int = LOWRANK_K) -> RankStats:
    """Compute the statistics of an update matrix [m, n] of any floating-point dtype. Raises DataError as `get_rank`."""
    spectrum = singular_values(delta, method, k=k)
    shape = (delta.shape[0], delta.shape[1])
    largest = Interval(*(float(side[0]) for side in (spectrum.values, spectrum.lower, spectrum.upper)))
    share_above, share_large = _shares(delta, tau)
    return RankStats(
        shape=shape,
        rank=_rank(spectrum, _relative_tolerance(delta), None),
        effective_rank=_effective_rank(spectrum),
        stable_rank=_stable_rank(spectrum),
        frobenius_norm=math.sqrt(spectrum.squared_norm),
        spectral_norm=largest,
        share_above=share_above,
        share_large=share_large,
        method=method,
    )


@torch.no_grad()
def _named_stats(
    name: str, base: Tensor, tensor: Tensor, tau: float, method: Method, k: int, device: torch.device
) -> dict[str, RankStats]:
    stats = {}
    for label, before, after in _matrices(name, *common_dtype(base, tensor)):
        wide = wide_dtype(after)
        delta = after.detach().to(device, wide) - before.detach().to(device, wide)
        try:
            stats[label] = rank_stats(delta, tau, method=method, k=k)
        except DataError as error:
            raise DataError(f"the change of {label}: {error}") from error
    return stats


def _matrices(name: str, base: Tensor, tensor: Tensor) -> Iterator[tuple[str, Tensor, Tensor]]:
    if tensor.ndim == 2:
        yield name, base, tensor
        return
    for i, (before, after) in enumerate(zip(base, tensor, strict=True)):
        yield f"{name}[{i}]", before, after


def _relative_tolerance(matrix: Tensor) -> float:
    eps = min(torch.finfo(matrix.dtype).eps, torch.finfo(torch.float32).eps)
    return max(matrix.shape) * eps


def _rank(spectrum: Spectrum, relative: float, tolerance: float | None) -> Interval:
    # The default threshold is proportional to s_1, and has the same relative error.
    low, at, high = (
        float(side[0]) * relative if tolerance is None else tolerance
        for side in (spectrum.lower, spectrum.values, spectrum.upper)
    )
    return Interval(
        int((spectrum.values > at).count_nonzero()),
        int((spectrum.lower > high).count_nonzero()),
        int((spectrum.upper > low).count_nonzero()) if spectrum.squared_norm else 0,
    )


def _effective_rank(spectrum: Spectrum) -> Interval:
    """Value, and bounds by the continuity of the entropy in the total variation T of p.

    abs(H(p) - H(q)) <= T ln(n - 1) + h(T), h the binary entropy, for T <= 1 - 1/n: Ho and Yeung, The interplay between
    entropy and variational distance (IEEE Trans. Information Theory 56, 2010). T is at most the sum of the errors of
    the singular values over their sum.
    """
    total = float(spectrum.values.sum())
    if not total:
        return Interval(0.0, 0.0, 0.0)
    n = spectrum.values.numel()
    p = spectrum.values / total
    entropy = float(-torch.xlogy(p, p).sum())
    errors = torch.maximum(spectrum.upper - spectrum.values, spectrum.values - spectrum.lower)
    variation = float(errors.sum()) / total
    if variation >= 1 - 1 / n:
        return Interval(math.exp(entropy), 1.0, float(n))
    slack = variation * math.log(max(n - 1, 1)) + _binary_entropy(variation)
    return Interval(math.exp(entropy), max(1.0, math.exp(entropy - slack)), min(float(n), math.exp(entropy + slack)))


def _binary_entropy(share: float) -> float:
    return -sum(x * math.log(x) for x in (share, 1 - share) if x > 0)


def _stable_rank(spectrum: Spectrum) -> Interval:
    if not spectrum.squared_norm:
        return Interval(0.0, 0.0, 0.0)
    value, low, high = (
        spectrum.squared_norm / max(float(side[0]) ** 2, spectrum.squared_norm / spectrum.values.numel())
        for side in (spectrum.values, spectrum.upper, spectrum.lower)
    )
    return Interval(value, max(1.0, low), high)


def _shares(delta: Tensor, tau: float) -> tuple[float, float]:
    """Return share_above and share_large."""
    above = total = squares = 0.0
    for (piece,) in blocks(delta, device=delta.device):
        size = piece.abs()
        above += int((size > tau).count_nonzero())
        total += float(size.sum(dtype=torch.float64))
        squares += float(size.double().square().sum())
    numel = delta.numel()
    mean = total / numel
    # The sample standard deviation, as in torch.std; 0 for one element.
    deviation = math.sqrt(max(0.0, squares - numel * mean**2) / (numel - 1)) if numel > 1 else 0.0
    threshold = mean + 2 * deviation
    large = sum(int((piece.abs() > threshold).count_nonzero()) for (piece,) in blocks(delta, device=delta.device))
    return above / numel, large / numel
