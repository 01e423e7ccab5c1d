"""The minimum memory traffic of each op, and its bandwidth bound: the time of this traffic at measured rates.

Everything that is read, and contiguous writes, cost their bytes at the copy rate. A copy reads as much as it writes, so
an op that hardly writes may run a few percent faster than this bound. Scattered writes are several times slower than a
copy (docs/dev/notebook.md), and cost their bytes at the rates that were measured once on an H200; these depend on the
order of the writes, and an op with a better order may be a few percent faster too. On other GPUs they are not known.

An H200 fetches memory in granules of 64 bytes: a read costs the whole granule, once for all elements in it. It
writes back sectors of 32 bytes: a scattered write costs the sector of a single element, and its own bytes if it is a
run or the row of a tile that is longer. Compact buffers are contiguous and cost their own size, but for a copy of the
weights, of which only sectors that change are written. The mask costs one index per unit of its pattern, of 4 or 2
bytes, or, of single elements of a dense tensor that is not read, the indices of those that change; the bases of 2-byte
indices, one for each 256 indices, are 0.016 bytes per active element and not counted.

The bytes are exact for a mask that takes each unit independently with probability d. Ragged edges, and rows that are
not aligned to granules, only increase the cost of a real mask.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from sparse_opt.masks.patterns import PATTERNS
from sparse_opt.ops import STEP_OPS

GRANULE_BYTES = 64  # bytes per memory fetch
SECTOR_BYTES = 32  # bytes per write to memory
# Contiguous bytes of one write -> (share of all such units that is written, GB/s) of an H200 at 4282 GB/s for a copy:
# random units of 4 GiB in ascending order, by bench/probes/scattered_access.cu of commit cfa799754.
H200_SHARES = (0.0025, 0.01, 0.025, 0.15, 0.33, 0.56, 0.81, 1.0)
H200_WRITES: dict[int, tuple[tuple[float, float], ...]] = {
    unit: tuple(zip(H200_SHARES, rates, strict=True))
    for unit, rates in {
        32: (767, 772, 808, 1046, 1572, 2447, 3207, 3477),
        64: (1428, 1498, 1484, 1776, 2114, 2641, 3296, 3632),
        128: (2465, 2553, 2519, 2954, 3134, 3330, 3544, 3833),
        256: (3074, 3210, 3086, 3708, 3806, 3918, 3993, 4033),
        1024: (3114, 3279, 3137, 3782, 3946, 4039, 4132, 4187),
    }.items()
}


class Rates(NamedTuple):
    """Rates of one device, in bytes per second."""

    copy: float  # read plus written
    write: Mapping[int, Sequence[tuple[float, float]]]  # as H200_WRITES, in GB/s; empty if they are not known

    @classmethod
    def of(cls, copy: float, device: torch.device) -> Rates:
        is_h200 = device.type == "cuda" and "H200" in torch.cuda.get_device_name(device)
        return cls(copy, H200_WRITES if is_h200 else {})

    def write_rate(self, unit: int, share: float) -> float | None:
        """The rate of writes to scattered units, or None if it is not known.

        Between measured shares the rate is interpolated linearly; outside of them it is that of the nearest one.

        Args:
            unit: contiguous bytes of one write; the rates are those of the largest measured unit that is not larger.
            share: share of all units that is written.
        """
        if not self.write:
            return None
        found = self.write[max((size for size in self.write if size <= unit), default=min(self.write))]
        shares, rates = zip(*found, strict=True)
        return 1e9 * float(np.interp(share, shares, rates))


class Traffic(NamedTuple):
    """The minimum memory traffic of some work."""

    copied: float  # bytes read, and bytes written contiguously
    scattered: float = 0.0  # bytes written at scattered places
    unit: int = SECTOR_BYTES  # contiguous bytes of one scattered write
    share: float = 0.0  # share of all such units that is written

    @property
    def bytes(self) -> float:
        return self.copied + self.scattered

    def seconds(self, rates: Rates) -> float:
        """The time of the traffic; without measured rates of scattered writes, of all bytes at the copy rate."""
        return self.copied / rates.copy + self.scattered / (rates.write_rate(self.unit, self.share) or rates.copy)


def touched_bytes(numel: int, nnz: float, itemsize: int, run: int = 1, size: int = GRANULE_BYTES) -> float:
    """Bytes of the granules (or sectors) of `size` that contain one of ``nnz`` random active elements among ``numel``.

    A granule is ``n = max(1, size / itemsize / run)`` independent choices of aligned runs of the mask (``run`` is 1 for
    single elements); it contains no active element with probability ``(1 - nnz / numel)^n``.
    """
    if not numel:
        return 0.0
    n = math.ceil(max(1.0, size / itemsize / run))
    return (1.0 - (1.0 - nnz / numel) ** n) * numel * itemsize


def scattered_writes(copied: float, numel: int, nnz: float, itemsize: int, run: int = 1) -> Traffic:
    """``copied`` bytes, and one write to each unit that contains one of ``nnz`` elements among ``numel``.

    A unit is a sector, or a run (the row of a tile) if that is longer.
    """
    unit = max(SECTOR_BYTES, run * itemsize)
    written = touched_bytes(numel, nnz, itemsize, run, unit)
    return Traffic(copied, written, unit, written / (numel * itemsize) if numel else 0.0)


def index_bytes(nnz: int, itemsize: int = 4, pattern: str = "element") -> int:
    """Bytes of one index per unit of the pattern: ``ceil(nnz / (height * width))`` indices."""
    height, width = PATTERNS[pattern]
    return -(-nnz // (height * width)) * itemsize


def step_traffic(
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
    reads_params: bool = True,
    weights_itemsize: int = 0,
    pattern: str = "element",
    changed: float = 1.0,
) -> Traffic:
    """An optimizer step: parameter, states and master weight read and written, gradient and index read.

    ``touched(p) + gradient + nnz * (2 * states * state + 2 * master + weights) + changed weights + index`` bytes are
    copied, where gradient is ``touched(g)`` if dense, else ``nnz * g``, and a state is 4 bytes or 2 (stochastic
    rounding needs no memory). ``touched(p)`` is 0 unless ``reads_params``. Changed parameters are scattered writes; of
    a copy of the weights, the sectors with a change are written. Single elements of which nothing dense is read need
    the indices of those that change.

    Args:
        states: number of states per active element, 2 for AdamW.
        weights_itemsize: bytes of an element of a copy of the active weights, 0 without one.
        changed: share of active parameters whose bits change; the others need not be written.
    """
    run = PATTERNS[pattern][1]
    param = touched_bytes(numel, nnz, param_itemsize, run) if reads_params else 0.0
    gradient = touched_bytes(numel, nnz, grad_itemsize, run) if dense_grads else float(nnz * grad_itemsize)
    index = float(index_bytes(nnz, index_itemsize, pattern))
    if not reads_params and not dense_grads and pattern == "element":
        index = touched_bytes(nnz, changed * nnz, index_itemsize)
    weights = float(nnz * weights_itemsize)
    if weights_itemsize:
        weights += touched_bytes(nnz, changed * nnz, weights_itemsize, run, SECTOR_BYTES)
    copied = param + gradient + nnz * 2 * (states * state_itemsize + master_itemsize) + weights + index
    return scattered_writes(copied, numel, changed * nnz, param_itemsize, run)


def swap_traffic(
    numel: int, nnz: int, *, itemsize: int, index_itemsize: int = 4, pattern: str = "element", changed: float = 1.0
) -> Traffic:
    """indexed_swap_: ``touched(dense) + index + nnz * (1 + changed) * itemsize``, and changed elements scattered.

    Args:
        changed: share of active elements that differ between the two; the others need not be written.
    """
    run = PATTERNS[pattern][1]
    dense = touched_bytes(numel, nnz, itemsize, run)
    copied = dense + index_bytes(nnz, index_itemsize, pattern) + nnz * (1 + changed) * itemsize
    return scattered_writes(copied, numel, changed * nnz, itemsize, run)


def replace_traffic(numel: int, nnz: int, *, itemsize: int, index_itemsize: int = 4, changed: float = 1.0) -> Traffic:
    """indexed_replace_: ``nnz * (before + after)``, the indices of changed elements, and these elements scattered."""
    copied = nnz * 2 * itemsize + touched_bytes(nnz, changed * nnz, index_itemsize)
    return scattered_writes(copied, numel, changed * nnz, itemsize)


def gather_traffic(numel: int, nnz: int, *, itemsize: int, index_itemsize: int = 4) -> Traffic:
    """masked_grad_gather_ to fp32 without accumulation: ``touched(g) + nnz * (index + 4)``; sums are negligible."""
    return Traffic(touched_bytes(numel, nnz, itemsize) + nnz * (index_itemsize + 4))


def apply_traffic(numel: int, nnz: int, *, itemsize: int, index_itemsize: int = 4) -> Traffic:
    """delta_apply_: ``changed * (index + itemsize) + sectors(dense)``, and the changes as scattered writes.

    A partly written sector is fetched first, without the other half of its granule: Nsight Compute counts 0.873 GB read
    for 2.5 % of 2^30 bf16, which are the indices, the values and a third of all sectors.
    """
    fetched = touched_bytes(numel, nnz, itemsize, size=SECTOR_BYTES)
    return scattered_writes(nnz * (index_itemsize + itemsize) + fetched, numel, nnz, itemsize)


# The same for the arguments of an op


def numel_of(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.numel() for tensor in tensors)


def of_step(arguments: Mapping[str, Any]) -> Traffic:
    """The traffic of any step op; its states are those of `STEP_OPS` that are among the arguments."""
    params, grads = arguments["params"], arguments.get("dense_grads")
    states = [arguments[name] for name in STATE_NAMES if arguments.get(name) is not None]
    master, weights = arguments.get("master"), arguments.get("weights")
    return step_traffic(
        numel_of(params),
        arguments["indices"].numel(),
        states=len(states),
        param_itemsize=params[0].element_size(),
        grad_itemsize=(arguments["grad"] if grads is None else grads[0]).element_size(),
        dense_grads=grads is not None,
        state_itemsize=states[0].element_size() if states else 0,
        index_itemsize=arguments["indices"].element_size(),
        master_itemsize=0 if master is None else master.element_size(),
        reads_params=weights is None and not arguments.get("params_hold_master"),
        weights_itemsize=0 if weights is None else weights.element_size(),
    )


STATE_NAMES = frozenset(name for op in STEP_OPS.values() for name in op.states)


def of_tiles(arguments: Mapping[str, Any]) -> Traffic:
    """tile_weight_grad_: columns of X and dY under an active tile, each read once; gradients written.

    ``tokens * (columns of each X under a tile of any matrix + rows of each matrix under one) * itemsize + nnz * out``;
    experts have equally many tokens each. The list of tiles, 32 bytes each, is not counted. With more than a few
    tokens, the ``tokens * nnz`` products take longer than these bytes.
    """
    inputs, out, offsets = arguments["inputs"], arguments["out"], arguments.get("token_offsets")
    lists = (arguments["grad_outputs"], inputs, arguments["starts"], arguments["ends"])

    def width(first: Tensor, size: int) -> int:
        """Rows or columns under tiles that begin at `first`, and are cut off at the edges of matrices of this size."""
        first = first.unique()
        return int((size - first % size).clamp(max=arguments["tile_size"]).sum())

    widths = 0
    of_inputs: dict[int, tuple[int, list[Tensor]]] = {}
    for grad_output, x, start, end in zip(*lists, strict=True):
        rows, columns = grad_output.shape[1], x.shape[1]
        first_row, first_column = arguments["tiles"][start:end, :2].unbind(1)
        widths += width(first_row, rows)
        of_inputs.setdefault(id(x), (columns, []))[1].append(first_row // rows * columns + first_column)
    widths += sum(width(torch.cat(parts), columns) for columns, parts in of_inputs.values())
    tokens = len(inputs[0]) / (1 if offsets is None else len(offsets))
    return Traffic(tokens * widths * inputs[0].element_size() + out.numel() * out.element_size())
