"""The minimum memory traffic of each op in bytes; divided by the copy rate it gives the op's bandwidth bound.

A copy reads as much as it writes, so an op that hardly writes may run a few percent faster than this bound.

An H200 fetches memory in granules of 64 bytes: an access costs the whole granule, once for all elements in it. (The
bytes that `set_l2_fetch_granularity(32)` saves are not subtracted, so that rows with and without it are comparable.) It
writes back sectors of 32 bytes, but scattered sectors so slowly (1.5 TB/s at 33 % of them, see docs/notebook.md)
that rewriting whole granules takes as long, so a write counts as its granule, too. Compact buffers are contiguous and
cost their own size. The mask costs one index per unit of its pattern, of 4 or 2 bytes; the bases of 2-byte indices, one
for each 256 indices, are 0.016 bytes per active element and not counted.

The bytes are exact for a mask that takes each unit independently with probability d. Ragged edges, and rows that are
not aligned to granules, only increase the cost of a real mask.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from sparse_opt.masks.patterns import PATTERNS
from sparse_opt.ops import STEP_OPS

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


def step_bytes(
    numel: int,
    nnz: int,
    *,
    states: int,
    param_itemsize: int,
    grad_itemsize: int,
    dense_grads: bool,
    state_itemsize: int = 4,
    index_itemsize: int = 4,
    master_itemsize: int = 0,
    pattern: str = "element",
    changed: float = 1.0,
) -> float:
    """An optimizer step: parameter, states and master weight read and written, gradient and index read.

    ``touched(p) + touched(p, changed) + gradient + nnz * 2 * (states * state + master) + index``, where gradient is
    ``touched(g)`` if dense, else ``nnz * g``, and a state is 4 bytes or 2 (stochastic rounding needs no memory).

    Args:
        states: number of states per active element, 2 for AdamW.
        changed: share of active parameters whose bits change; the others need not be written.
    """
    run = _run(pattern)
    param = touched_bytes(numel, nnz, param_itemsize, run) + touched_bytes(numel, changed * nnz, param_itemsize, run)
    gradient = touched_bytes(numel, nnz, grad_itemsize, run) if dense_grads else float(nnz * grad_itemsize)
    per_active = 2 * (states * state_itemsize + master_itemsize)
    return param + gradient + nnz * per_active + index_bytes(nnz, index_itemsize, pattern)


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


def _run(pattern: str) -> int:
    return PATTERNS[pattern][1]


# The same for the arguments of an op on single elements


def numel_of(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.numel() for tensor in tensors)


def of_step(arguments: Mapping[str, Any]) -> float:
    """The bytes of any step op; its states are those of `STEP_OPS` that are among the arguments."""
    params, grads = arguments["params"], arguments.get("dense_grads")
    states = [arguments[name] for name in STATE_NAMES if arguments.get(name) is not None]
    master = arguments.get("master")
    return step_bytes(
        numel_of(params),
        arguments["indices"].numel(),
        states=len(states),
        param_itemsize=params[0].element_size(),
        grad_itemsize=(arguments["grad"] if grads is None else grads[0]).element_size(),
        dense_grads=grads is not None,
        state_itemsize=states[0].element_size() if states else 0,
        index_itemsize=arguments["indices"].element_size(),
        master_itemsize=0 if master is None else master.element_size(),
    )


STATE_NAMES = frozenset(name for op in STEP_OPS.values() for name in op.states)


def of_gather(arguments: Mapping[str, Any]) -> float:
    sizes = _itemsizes(arguments)
    return gather_bytes(
        *_sizes(arguments),
        grad_itemsize=sizes["itemsize"],
        out_itemsize=arguments["out"].element_size(),
        index_itemsize=sizes["index_itemsize"],
    )


def of_swap(arguments: Mapping[str, Any]) -> float:
    return swap_bytes(*_sizes(arguments), **_itemsizes(arguments))


def of_apply(arguments: Mapping[str, Any]) -> float:
    return delta_apply_bytes(*_sizes(arguments), **_itemsizes(arguments))


def _sizes(arguments: Mapping[str, Any]) -> tuple[int, int]:
    return numel_of(arguments["dense"]), arguments["indices"].numel()


def _itemsizes(arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "itemsize": arguments["dense"][0].element_size(),
        "index_itemsize": arguments["indices"].element_size(),
    }
