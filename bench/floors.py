"""The fewest bytes of memory traffic that each op needs; over the copy rate, the time that no version can beat.

Memory moves in granules of 64 bytes (measured on an H200), so an element costs its granule, and elements that share one
pay once. A granule of which some bytes are written is read first: error-correcting memory can store it whole only.
Compact buffers are contiguous and cost their own size.
"""

from __future__ import annotations

GRANULE_BYTES = 64


def hit(density: float, *, itemsize: int = 2, run: int = 1) -> float:
    """The share of granules that hold an active element, under a random mask.

    Args:
        density: share of active elements.
        itemsize: bytes of an element; a granule holds 64 / itemsize of them.
        run: length of the aligned runs that the mask takes whole (1: element by element).
    """
    independent = max(1.0, GRANULE_BYTES / itemsize / run)
    return 1.0 - (1.0 - density) ** independent


def touched_bytes(numel: int, nnz: int, itemsize: int, run: int = 1) -> float:
    """Bytes of the granules that hold one of ``nnz`` active elements among ``numel``, read or written once."""
    return hit(nnz / numel, itemsize=itemsize, run=run) * numel * itemsize if numel else 0.0


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
    run: int = 1,
) -> float:
    """indexed_adamw_: parameter, both moments and master read and written, gradient and index read."""
    compact = index_itemsize + 2 * (2 * moment_itemsize + master_itemsize)
    gradient = touched_bytes(numel, nnz, grad_itemsize, run) if dense_grads else float(nnz * grad_itemsize)
    return 2 * touched_bytes(numel, nnz, param_itemsize, run) + gradient + nnz * compact


def sgd_bytes(
    numel: int,
    nnz: int,
    *,
    param_itemsize: int,
    grad_itemsize: int,
    dense_grads: bool,
    momentum_itemsize: int = 4,
    index_itemsize: int = 4,
    run: int = 1,
) -> float:
    """indexed_sgd_: as adamw_bytes with one state, or none (``momentum_itemsize`` 0)."""
    gradient = touched_bytes(numel, nnz, grad_itemsize, run) if dense_grads else float(nnz * grad_itemsize)
    compact = index_itemsize + 2 * momentum_itemsize
    return 2 * touched_bytes(numel, nnz, param_itemsize, run) + gradient + nnz * compact


def gather_bytes(
    numel: int, nnz: int, *, grad_itemsize: int, out_itemsize: int = 4, index_itemsize: int = 4, run: int = 1
) -> float:
    """masked_grad_gather_ without accumulation: gradient and index read, the compact gradient written."""
    return touched_bytes(numel, nnz, grad_itemsize, run) + nnz * (index_itemsize + out_itemsize)


def swap_bytes(numel: int, nnz: int, *, itemsize: int, index_itemsize: int = 4, run: int = 1) -> float:
    """indexed_swap_: the dense and the compact buffer read and written, the index read."""
    return 2 * touched_bytes(numel, nnz, itemsize, run) + nnz * (index_itemsize + 2 * itemsize)


def delta_encode_bytes(numel: int, changed: int, *, itemsize: int, index_itemsize: int = 4) -> float:
    """delta_encode: both states read whole, an index and a value written for each change."""
    return 2 * numel * itemsize + changed * (index_itemsize + itemsize)


def delta_apply_bytes(numel: int, changed: int, *, itemsize: int, index_itemsize: int = 4) -> float:
    """delta_apply_: index and value read, the touched granules read and written."""
    return 2 * touched_bytes(numel, changed, itemsize) + changed * (index_itemsize + itemsize)


def dense_adamw_bytes(numel: int, *, param_itemsize: int) -> float:
    """torch.optim.AdamW with states of the parameter's dtype: four tensors read, three written."""
    return 7.0 * numel * param_itemsize


def dense_clip_bytes(numel: int, *, grad_itemsize: int) -> float:
    """torch.nn.utils.clip_grad_norm_: the gradients read for the norm, then read and written to scale them."""
    return 3.0 * numel * grad_itemsize
