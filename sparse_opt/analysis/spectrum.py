"""Singular values of a matrix with error intervals, by three methods.

    exact    all, by SVD in fp64
    gram     all, as roots of the eigenvalues of A^T A (or A A^T, the smaller) in fp64: a fraction of the time. The
             squares have an error of at most (m + n) eps norm(A)^2, which hides values below about 1e-6 of the norm
             if the matrix has thousands of rows
    lowrank  the largest k, by a randomised projection to a k-dimensional range Q (`torch.svd_lowrank`). The squared
             norm outside of the range, e^2 = norm(A)^2 - norm(Q^T A)^2, bounds every error: the square of a computed
             value is at most e^2 too small, and a value that was not computed is at most e

The bounds of `exact` and `gram` are the usual a-priori ones of backward stable algorithms with the constant max(m, n),
which is generous; that of `lowrank` is a-posteriori: Halko, Martinsson and Tropp, Finding structure with randomness
(SIAM Review 53, 2011, https://arxiv.org/abs/0909.4061), and Weyl's inequality for
A^T A = A^T Q Q^T A + A^T (I - Q Q^T) A.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from ..errors import DataError

Method = Literal["exact", "gram", "lowrank"]
METHODS: tuple[Method, ...] = get_args(Method)
LOWRANK_K = 64
# Power iterations of the projection: 2 are torch's default; 4 pull in spectra that decay slowly.
_POWER_ITERATIONS = 4
_EPS = torch.finfo(torch.float64).eps
# Rows of a tall matrix that are widened to fp64 at a time.
_ROWS = 4096


@dataclass(frozen=True)
class Spectrum:
    """Singular values [min(m, n)], fp64 on the CPU, descending; each is in [lower, upper]. `lowrank`: the tail is 0.

    `squared_norm` is the sum of squares of the matrix's elements.
    """

    values: Tensor
    lower: Tensor
    upper: Tensor
    squared_norm: float
    method: Method


@torch.no_grad()
def singular_values(matrix: Tensor, method: Method = "exact", *, k: int = LOWRANK_K) -> Spectrum:
    """The singular values of a matrix [m, n] of any floating-point dtype, computed in fp64 on the matrix's device.

    Args:
        method: see above.
        k: dimension of the range of `lowrank`, cut to min(m, n). The random projection has a fixed seed.

    Raises:
        DataError: not a matrix, no elements, NaN or infinite elements, an unknown method, or a k below 1.
    """
    if matrix.ndim != 2 or not matrix.numel():
        raise DataError(f"matrix has the shape {list(matrix.shape)}, expected two dimensions with elements")
    if method not in METHODS:
        raise DataError(f"method is {method!r}, expected one of {', '.join(METHODS)}")
    if k < 1:
        raise DataError(f"k is {k}, expected at least 1")
    odd = matrix.numel() - int(matrix.isfinite().count_nonzero())
    if odd:
        raise DataError(f"{odd} of {matrix.numel()} elements are NaN or infinite, expected numbers")
    tall = matrix if matrix.shape[0] >= matrix.shape[1] else matrix.T
    squared_norm = 0.0
    for start in range(0, tall.shape[0], _ROWS):
        squared_norm += float(tall[start : start + _ROWS].double().square().sum())
    if method == "exact":
        values, lower, upper = _exact(tall)
    elif method == "gram":
        values, lower, upper = _gram(tall, squared_norm)
    else:
        values, lower, upper = _lowrank(tall, squared_norm, k)
    return Spectrum(values.cpu(), lower.cpu(), upper.cpu(), squared_norm, method)


def _exact(tall: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    values = torch.linalg.svdvals(tall.double())
    error = tall.shape[0] * _EPS * values[0]
    return values, (values - error).clamp_min_(0.0), values + error


def _gram(tall: Tensor, squared_norm: float) -> tuple[Tensor, Tensor, Tensor]:
    m, n = tall.shape
    gram = torch.zeros(n, n, dtype=torch.float64, device=tall.device)
    for start in range(0, m, _ROWS):
        wide = tall[start : start + _ROWS].double()
        gram.addmm_(wide.T, wide)
    squares = torch.linalg.eigvalsh(gram).flip(0).clamp_min_(0.0)
    # Rounding of the m-term sums, m eps sum |a||a|, and of the eigenvalues, n eps norm: both at most eps norm(A)_F^2.
    error = (m + n) * _EPS * squared_norm
    return squares.sqrt(), (squares - error).clamp_min_(0.0).sqrt_(), (squares + error).sqrt_()


def _lowrank(tall: Tensor, squared_norm: float, k: int) -> tuple[Tensor, Tensor, Tensor]:
    m, n = tall.shape
    found = min(k, n)
    devices = [tall.device] if tall.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(0)
        values = torch.svd_lowrank(tall.double(), q=found, niter=_POWER_ITERATIONS)[1]
    # The squared norm outside of the range, and a bound on the rounding errors of the sums and the projection.
    missed = max(0.0, squared_norm - float(values.square().sum())) + (m + n) * _EPS * squared_norm
    error = m * _EPS * values[0]
    tail = values.new_zeros(n - found)
    lower = torch.cat([(values - error).clamp_min_(0.0), tail])
    upper = torch.cat([((values + error).square() + missed).sqrt_(), tail + missed**0.5])
    return torch.cat([values, tail]), lower, upper
