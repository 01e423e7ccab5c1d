"""The minimum memory traffic of each op in bytes; divided by the copy rate it gives the op's bandwidth bound.

A copy reads as much as it writes, so an op that hardly writes may run a few percent faster than this bound.

An H200 fetches memory in granules of 64 bytes: an access costs the whole granule, once for all elements in it. (The
bytes that `set_l2_fetch_granularity(32)` saves are not subtracted, so that rows with and without it are comparable.) It
writes back sectors of 32 bytes, but scattered sectors so slowly (1.5 TB/s at 33 % of them, see docs/performance.md)
that rewriting whole granules takes as long, so a write counts as its granule, too. Compact buffers are contiguous and
cost their own size. The mask costs one index per unit of its pattern, of 4 or 2 bytes; the bases of 2-byte indices, one
for each 256 indices, are 0.016 bytes per active element and not counted.

The bytes are exact for a mask that takes each unit independently with probability d. Ragged edges, and rows that are
not aligned to granules, only increase the cost of a real mask.
"""

from __future__ import annotations

import math

from sparse_opt.masks.patterns import PATTERNS

GRANULE_BYTES = 64  # bytes per memory fetch
# Stored in the results: bytes counted in another way must not be compared with the current targets.
COUNTING = "reads and writes by 64-byte granule"


def hit(density: float, *, itemsize: int = 2, run: int = 1) -> float:
    """The share of granules that contain an active element, under a random mask.

    A granule has ``64 / itemsize`` elements, which are ``n = max(1, 64 / itemsize / run)`` independent choices; it
    contains no active element with probability ``(1 - d)^n``.

    Args:
        density: share of active elements.
        itemsize: bytes of an element.
        run: length of the mask's aligned runs (1 for single elements).
    """
    return 1.0 - (1.0 - density) ** math.ceil(max(1.0, GRANULE_BYTES / itemsize / run))


def touched_bytes(numel: int, nnz: float, itemsize: int, run: int = 1) -> float:
    """Bytes of the granules that contain one of ``nnz`` active elements among ``numel``, read or written once.

    ``hit(nnz / numel) * numel * itemsize``.
    """
    return hit(nnz / numel, itemsize=itemsize, run=run) * numel * itemsize if numel else 0.0


def index_bytes(nnz: int, itemsize: int = 4, pattern: str = "element") -> int:
    """Bytes of one index per unit of the pattern: ``ceil(nnz / (height * width))`` indices."""
    height, width = PATTERNS[pattern]
    return -(-nnz // (height * width)) * itemsize


def adamw_bytes(
    numel: int,
    nnz: int,
    *,
    param_itemsize: int,
    grad_itemsize: int,
    dense_grads: bool,
    moment_itemsize: int = 4,
    index_itemsize: int = 4,
    master_itemsize: int = 0,
    pattern: str = "element",
    changed: float = 1.0,
) -> float:
    """indexed_adamw_: parameter, both moments and master read and written, gradient and index read.

    ``touched(p) + touched(p, changed) + gradient + nnz * 2 * (2 * moment + master) + index``, where gradient is
    ``touched(g)`` if dense, else ``nnz * g``, and a moment is 4 bytes or 2 (stochastic rounding needs no memory).

    Args:
        changed: share of active parameters whose bits change; the others need not be written.
    """
    state = 2 * (2 * moment_itemsize + master_itemsize)
    return _step_bytes(numel, nnz, param_itemsize, grad_itemsize, dense_grads, state, index_itemsize, pattern, changed)


def sgd_bytes(
    numel: int,
    nnz: int,
    *,
    param_itemsize: int,
    grad_itemsize: int,
    dense_grads: bool,
    momentum_itemsize: int = 4,
    index_itemsize: int = 4,
    pattern: str = "element",
) -> float:
    """indexed_sgd_: as adamw_bytes with one state, or none (``momentum_itemsize`` 0): ``nnz * 2 * momentum``."""
    state = 2 * momentum_itemsize
    return _step_bytes(numel, nnz, param_itemsize, grad_itemsize, dense_grads, state, index_itemsize, pattern, 1.0)


def gather_bytes(
    numel: int,
    nnz: int,
    *,
    grad_itemsize: int,
    out_itemsize: int = 4,
    index_itemsize: int = 4,
    pattern: str = "element",
) -> float:
    """masked_grad_gather_ without accumulation: ``touched(g) + index + nnz * out``; the sums are negligible."""
    gradient = touched_bytes(numel, nnz, grad_itemsize, _run(pattern))
    return gradient + index_bytes(nnz, index_itemsize, pattern) + nnz * out_itemsize


def tile_weight_grad_bytes(
    tokens: int, rows: int, columns: int, nnz: int, *, tile_size: int, itemsize: int, out_itemsize: int = 4
) -> float:
    """tile_weight_grad_ of one [rows, columns] matrix: ``tokens * (rows hit + columns hit) * itemsize + nnz * out``.

    The parts of each operand that a tile needs are read once: with k tiles across and density d, the rows of a tile are
    needed with probability ``1 - (1 - d)^k``, and likewise the columns. The list of tiles, 32 bytes each, is not
    counted. With more than a few tokens, the ``tokens * nnz`` products take longer than these bytes.
    """
    if nnz == 0:
        return 0.0
    inactive = 1.0 - nnz / (rows * columns)
    rows_hit = rows * (1.0 - inactive ** math.ceil(columns / tile_size))
    columns_hit = columns * (1.0 - inactive ** math.ceil(rows / tile_size))
    return tokens * (rows_hit + columns_hit) * itemsize + nnz * out_itemsize


def swap_bytes(
    numel: int, nnz: int, *, itemsize: int, index_itemsize: int = 4, pattern: str = "element", changed: float = 1.0
) -> float:
    """indexed_swap_: ``touched(dense) + touched(dense, changed) + index + nnz * (1 + changed) * itemsize``.

    Args:
        changed: share of active elements that differ between the two; the others need not be written.
    """
    run = _run(pattern)
    dense = touched_bytes(numel, nnz, itemsize, run) + touched_bytes(numel, changed * nnz, itemsize, run)
    return dense + index_bytes(nnz, index_itemsize, pattern) + nnz * (1 + changed) * itemsize


def delta_encode_bytes(numel: int, changed: int, *, itemsize: int, index_itemsize: int = 4) -> float:
    """delta_encode: ``2 * numel * itemsize + changed * (index + itemsize)``: both states read, changes written."""
    return 2 * numel * itemsize + changed * (index_itemsize + itemsize)


def delta_apply_bytes(numel: int, changed: int, *, itemsize: int, index_itemsize: int = 4) -> float:
    """delta_apply_: ``changed * (index + itemsize) + 2 * touched(dense)``.

    A partly written granule is fetched first.
    """
    return changed * (index_itemsize + itemsize) + 2 * touched_bytes(numel, changed, itemsize)


def dense_adamw_bytes(
    numel: int, *, param_itemsize: int, state_itemsize: int | None = None, mask_itemsize: int = 0
) -> float:
    """A dense AdamW step: ``numel * (3 * param + 2 * 2 * state)``.

    The gradient is read; the parameter and both states are read and written.

    Args:
        state_itemsize: bytes of a moment; by default the parameter's, as in torch's AdamW.
        mask_itemsize: bytes per element of a mask that the gradients are first multiplied by, in place. Reading the
            mask and reading and writing the gradient adds ``numel * (mask + 2 * param)``.
    """
    state = param_itemsize if state_itemsize is None else state_itemsize
    masking = mask_itemsize + 2 * param_itemsize if mask_itemsize else 0
    return float(numel * (3 * param_itemsize + 4 * state + masking))


def dense_clip_bytes(numel: int, *, grad_itemsize: int) -> float:
    """torch.nn.utils.clip_grad_norm_: ``3 * numel * g``: read for the norm, then read and written for scaling."""
    return 3.0 * numel * grad_itemsize


def _step_bytes(
    numel: int,
    nnz: int,
    param_itemsize: int,
    grad_itemsize: int,
    dense_grads: bool,
    state_bytes: int,
    index_itemsize: int,
    pattern: str,
    changed: float,
) -> float:
    run = _run(pattern)
    param = touched_bytes(numel, nnz, param_itemsize, run) + touched_bytes(numel, changed * nnz, param_itemsize, run)
    gradient = touched_bytes(numel, nnz, grad_itemsize, run) if dense_grads else float(nnz * grad_itemsize)
    return param + gradient + nnz * state_bytes + index_bytes(nnz, index_itemsize, pattern)


def _run(pattern: str) -> int:
    return PATTERNS[pattern][1]
