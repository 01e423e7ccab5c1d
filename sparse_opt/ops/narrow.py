"""Compression of indices to two bytes: an offset for each active element, and a base for every 256 of them.

Frame of reference coding (Goldstein, Ramakrishnan and Shaft, "Compressing relations and indexes", ICDE 1998) of the
positions that `sparse_opt.ops` take. At 2.5 % active, 256 consecutive elements span about 10 000 positions, and an
index takes 2.02 bytes where int32 takes 4.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

FRAME = 256  # slots that share a base
_REACH = 2**16


def can_narrow(positions: Tensor) -> bool:
    """Whether sorted `positions` [n] of one tensor can be narrowed: any 256 in a row are within 65536 of each other."""
    if positions.numel() == 0:
        return True
    if int(positions[-1]) >= 2**31:
        return False
    last = positions[FRAME - 1 :] if positions.numel() >= FRAME else positions[-1:]
    return bool((last - positions[: last.numel()] < _REACH).all())


def narrow_indices(indices: Tensor, starts: Sequence[int], ends: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Compress the indices of an op's call to two bytes each.

    Slot s of segment i has the position index_bases[s // 256 + i] + offsets[s]. Indices outside of the segments are not
    kept.

    Args:
        indices: [nnz] int32 or int64, sorted within each segment, as the ops take them with `run_length` 1.
        starts, ends: n host integers each; the segments in ascending order.

    Returns:
        offsets: [nnz] uint16, the ops' `indices`.
        index_bases: [nnz // 256 + n] int32.

    Raises:
        ValueError: the slots of a segment that share a base span 65536 positions or more, a position is above
            2**31 - 1, or the segments are not in ascending order.
    """
    if any(e > s for (_, e), (s, _) in itertools.pairwise(zip(starts, ends, strict=True))):
        raise ValueError("narrow_indices: the segments are not in ascending order")
    offsets = torch.zeros(indices.numel(), dtype=torch.int32, device=indices.device)
    bases = torch.zeros(indices.numel() // FRAME + len(starts), dtype=torch.int32, device=indices.device)
    for i, (start, end) in enumerate(zip(starts, ends, strict=True)):
        if end == start:
            continue
        first, last = start // FRAME, (end - 1) // FRAME
        begins = torch.arange(first, last + 1, device=indices.device).mul_(FRAME).clamp_(min=start)
        base = indices[begins]
        bases[first + i : last + i + 1] = base.to(torch.int32)
        frame = torch.arange(start, end, device=indices.device).div_(FRAME, rounding_mode="floor").sub_(first)
        offset = indices[start:end] - base[frame]
        if int(offset.max()) >= _REACH or int(offset.min()) < 0 or int(indices[end - 1]) >= 2**31:
            raise ValueError(
                f"narrow_indices: segment {i} has positions of one 256 slots from {int(offset.min())} to "
                f"{int(offset.max())} past the first, up to {int(indices[end - 1])}; "
                f"expected 0 to {_REACH - 1}, below 2**31"
            )
        offsets[start:end] = offset.to(torch.int32)
    return offsets.to(torch.uint16), bases


def widened(offsets: Tensor, index_bases: Tensor, i: int, start: int, end: int) -> Tensor:
    """Return the positions of segment i, the slots [start, end): [end - start] int32."""
    frame = torch.arange(start, end, device=offsets.device).div_(FRAME, rounding_mode="floor").add_(i)
    return index_bases[frame] + offsets[start:end].to(torch.int32)


def bases_of(index_bases: Tensor, segments: Sequence[int], starts: Sequence[int], nnz: int) -> Tensor:
    """Return the bases for a call with some of the segments only: [nnz // 256 + len(segments)] int32.

    Args:
        segments, starts: their numbers, ascending, and their starts.
        nnz: the length of `indices`, which is passed whole.
    """
    # The bases of segment i, now the k-th, begin at starts[k] // 256 + k and end where those of the next one begin.
    cuts = [0, *(start // FRAME for start in starts[1:]), nnz // FRAME]
    parts = [index_bases[a + i : b + i + 1] for i, (a, b) in zip(segments, itertools.pairwise(cuts), strict=True)]
    return parts[0] if len(parts) == 1 else torch.cat(parts)
