"""Ranks, norms and shares of large elements of each weight matrix's update, and its spread over the matrices.

The change W_t - W_0 is taken in fp32 (fp64 weights: in fp64). docs/analysis.md defines each statistic. All ranks are 0
for a matrix of zeros; the statistics of the spread are NaN if nothing changed, and the entropy if there is one matrix.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..delta.state_log import StateLog
from ..errors import DataError
from ..masks.parameters import component_of
from ..progress import progress_bar
from ..tensors import canonical_names
from .changes import (
    DEVICE_CPU,
    base_and_states,
    blocks,
    chosen_names,
    chosen_steps,
    common_dtype,
    require_thresholds,
    wide_dtype,
)

TAU = 1e-6
TOP_K = 3
# Rows of a tall matrix that are widened to fp64 at a time.
_ROWS = 4096


@dataclass(frozen=True)
class RankStats:
    """Statistics of one update matrix.

    Attributes:
        shape: of the matrix as the model keeps it; GPT-2's Conv1D weights are [in, out], no statistic depends on it.
        rank, effective_rank, stable_rank: see the module.
        frobenius_norm, spectral_norm: in the units of the weights; the spectral norm is s_1.
        share_above: share of elements with abs(delta) > tau.
        share_large: share of elements with abs(delta) > mean + 2 * standard deviation of the abs(delta) of this matrix.
    """

    shape: tuple[int, int]
    rank: int
    effective_rank: float
    stable_rank: float
    frobenius_norm: float
    spectral_norm: float
    share_above: float
    share_large: float

    @property
    def full_rank(self) -> int:
        """min(m, n), which classical, effective and stable rank cannot exceed."""
        return min(self.shape)


@torch.no_grad()
def singular_values(matrix: Tensor) -> Tensor:
    """The singular values of a matrix A [m, n]: [min(m, n)], descending, fp64 on the CPU, computed on A's device.

    They are the roots of the eigenvalues of A^T A, or of A A^T if that is smaller, which take a fraction of the time of
    an SVD. The squares have an error of at most (m + n) eps norm(A)^2, which hides values below about 1e-6 of the norm
    if the matrix has thousands of rows.

    Raises:
        DataError: not a matrix, no elements, or NaN or infinite elements.
    """
    if matrix.ndim != 2 or not matrix.numel():
        raise DataError(f"matrix has the shape {list(matrix.shape)}, expected two dimensions with elements")
    odd = matrix.numel() - int(matrix.isfinite().count_nonzero())
    if odd:
        raise DataError(f"{odd} of {matrix.numel()} elements are NaN or infinite, expected numbers")
    tall = matrix if matrix.shape[0] >= matrix.shape[1] else matrix.T
    m, n = tall.shape
    gram = torch.zeros(n, n, dtype=torch.float64, device=tall.device)
    for start in range(0, m, _ROWS):
        wide = tall[start : start + _ROWS].double()
        gram.addmm_(wide.T, wide)
    return torch.linalg.eigvalsh(gram).flip(0).clamp_min_(0.0).sqrt_().cpu()


def rank_stats(delta: Tensor, tau: float = TAU) -> RankStats:
    """Compute the statistics of an update matrix [m, n] of any floating-point dtype.

    Raises:
        DataError: not a matrix, no elements, or NaN or infinite elements.
    """
    values = singular_values(delta)
    largest, total, squares = float(values[0]), float(values.sum()), float(values.square().sum())
    eps = torch.finfo(torch.float32).eps
    p = values / (total or 1.0)
    share_above, share_large = _shares(delta, tau)
    return RankStats(
        shape=(delta.shape[0], delta.shape[1]),
        rank=int((values > max(delta.shape) * eps * largest).count_nonzero()),
        effective_rank=math.exp(-float(torch.xlogy(p, p).sum())) if total else 0.0,
        stable_rank=squares / largest**2 if total else 0.0,
        frobenius_norm=math.sqrt(squares),
        spectral_norm=largest,
        share_above=share_above,
        share_large=share_large,
    )


def get_layer_rank_stats(
    model_or_state: nn.Module | Mapping[str, Tensor],
    init_state: Mapping[str, Tensor],
    tolerance: float = TAU,
) -> dict[str, RankStats]:
    """Return name -> statistics of the change of each weight matrix of a model, or of its state, since `init_state`.

    Weight matrices are the floating-point parameters of two dimensions and, as `name[0]`, the slices of those of three
    (experts), norms excluded. Tied ones count once, under their first name. Each is measured on its own device.

    Args:
        init_state: the state to compare with; must have every weight matrix, in the same shape.
        tolerance: tau of `share_above`.

    Raises:
        DataError: a matrix is missing from `init_state` or has another shape there, or its change is NaN or infinite.
    """
    is_module = isinstance(model_or_state, nn.Module)
    state = dict(model_or_state.named_parameters(remove_duplicate=False) if is_module else model_or_state)  # type: ignore[union-attr,arg-type]  # it does not narrow by `is_module`
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
        stats |= _named_stats(name, base, tensor, tolerance, tensor.device)
    return stats


def measure_ranks(
    log: StateLog,
    steps: Sequence[int] | None = None,
    *,
    tau: float = TAU,
    names: Sequence[str] | None = None,
    device: torch.device = DEVICE_CPU,
) -> dict[int, dict[str, RankStats]]:
    """Return step -> `get_layer_rank_stats` of that step against the base. Every matrix is read once for all steps.

    Args:
        steps: logged ones; the last one by default.
        names: the tensors, such as `chosen_names` returns; all floating-point parameters by default. Those that are no
            weight matrices are left out.
        device: where singular values are computed.

    Raises:
        ConfigError: tau is negative.
        DataError: there is no weight matrix, a step is the base, or a change is NaN or infinite; names the tensor.
        DeltaLogError: a step is not logged, or the log is damaged.
    """
    require_thresholds("tau", [tau])
    dims = {spec.name: len(spec.shape) for spec in log.layout.tensors}
    matrices = [n for n in (chosen_names(log) if names is None else names) if is_weight_matrix(n, dims[n])]
    if not matrices:
        raise DataError(f"no weight matrix of {log.directory} is chosen by include, exclude and mlp_only")
    chosen = chosen_steps(log, steps or log.steps[-1:])
    stats: dict[int, dict[str, RankStats]] = {step: {} for step in chosen}
    for name in progress_bar(matrices, what="ranks", unit="tensor"):
        base, states = base_and_states(log, name, chosen)
        for step, tensor in states:
            stats[step] |= _named_stats(name, base, tensor, tau, device)
    return stats


def is_weight_matrix(name: str, dims: int) -> bool:
    """Whether a parameter is a matrix (two dimensions) or a stack of matrices (three), and not a norm's."""
    return dims in (2, 3) and component_of(name).part != "norms"


def measure_concentration(norms: Sequence[float], k: int = TOP_K) -> dict[str, float]:
    """The spread of the Frobenius norms of matrices, each at least 0: gini, entropy, top_share of the `k` largest.

    And `n_changed`, the number of matrices that changed.
    """
    n, total = len(norms), math.fsum(norms)
    gini = entropy = top_share = math.nan
    if total:
        ascending = sorted(norms)
        # With the i-th smallest x_i, sum_ij abs(x_i - x_j) = 2 sum_i (2 i - n - 1) x_i.
        gini = math.fsum((2 * i - n - 1) * x for i, x in enumerate(ascending, 1)) / (n * total)
        top_share = math.fsum(ascending[-k:]) / total
        if n > 1:
            entropy = -math.fsum(x / total * math.log(x / total) for x in norms if x) / math.log(n)
    return {"gini": gini, "entropy": entropy, "top_share": top_share, "n_changed": sum(norm > 0 for norm in norms)}


@torch.no_grad()
def _named_stats(name: str, base: Tensor, tensor: Tensor, tau: float, device: torch.device) -> dict[str, RankStats]:
    before, after = common_dtype(base, tensor)
    pairs = [(name, before, after)]
    if tensor.ndim == 3:
        pairs = [(f"{name}[{i}]", before[i], after[i]) for i in range(len(tensor))]
    stats = {}
    for label, old, new in pairs:
        wide = wide_dtype(new)
        try:
            stats[label] = rank_stats(new.detach().to(device, wide) - old.detach().to(device, wide), tau)
        except DataError as error:
            raise DataError(f"the change of {label}: {error}") from error
    return stats


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
