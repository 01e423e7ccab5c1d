"""find_mask: selects the highest-scoring elements, runs or tiles, with the same result as sorting all scores."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol, TypedDict

import torch
from torch import Tensor
from tqdm import tqdm

from .. import __version__
from ..errors import MaskError
from ..masks.mask_set import MaskSet
from ..masks.patterns import PATTERNS, expand_units
from .topk import GlobalSelection, TensorSelection, UnitScores, unit_scores

Pool = Literal["global", "tensor"]
POOLS: tuple[Pool, ...] = ("global", "tensor")

_INFINITY_BITS = 0x7F800000


class ScoreSource(Protocol):
    """The scores of a model's selected tensors, computed one tensor at a time."""

    @property
    def score_name(self) -> str:
        """`momentum score`, for messages."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Name -> shape of each tensor, in the model's order."""

    def bits(self, name: str) -> Tensor:
        """Return the bits of a tensor's float32 scores >= 0: [numel] int32, the same for each call."""


@dataclass(frozen=True)
class FoundMask:
    """A mask and the threshold of its selection.

    Attributes:
        threshold: for pool global, the lowest score that counts towards the quota, floors excluded; None if the floors
            meet the quota, and for pool tensor.
    """

    mask: MaskSet
    threshold: float | None


class SelectionOptions(TypedDict, total=False):
    """Options of `find_mask`, which the functions that call it pass on."""

    min_tensor_keep: float
    pool: Pool
    pattern: str
    progress: bool


def require_arguments(sparsity: float, options: SelectionOptions) -> None:
    """Raise MaskError if an argument of `find_mask` is out of range."""
    if not 0.0 < sparsity < 100.0:
        raise MaskError(f"sparsity is {sparsity} percent, expected above 0 and below 100")
    min_tensor_keep = options.get("min_tensor_keep", 0.0)
    if not 0.0 <= min_tensor_keep <= 1.0:
        raise MaskError(f"min_tensor_keep is {min_tensor_keep}, expected a share from 0 to 1")
    pool, pattern = options.get("pool", "global"), options.get("pattern", "element")
    if pool not in POOLS:
        raise MaskError(f"pool is {pool!r}, expected {' or '.join(POOLS)}")
    if pattern not in PATTERNS:
        raise MaskError(f"pattern is {pattern!r}, expected one of {', '.join(PATTERNS)}")


def find_mask(
    source: ScoreSource,
    *,
    sparsity: float,
    min_tensor_keep: float = 0.0025,
    pool: Pool = "global",
    pattern: str = "element",
    metadata: Mapping[str, str] | None = None,
    progress: bool = False,
) -> FoundMask:
    """Find the mask of the elements with the highest scores.

    The quota is round((100 - sparsity) % of N) of the N elements of all tensors. Pool `global`: each tensor first keeps
    its own best ceil(min_tensor_keep * numel), the floor, and then the best of all other elements fill the quota. Pool
    `tensor`: each tensor keeps its own share, or its floor if that is more. The result is that of sorting all scores:
    ties go to the earlier tensor, in the source's order, and then to the lower position.

    With a pattern, whole units are ranked by the sum of their scores. A floor is covered by as few units as possible;
    quota and shares are filled until the next unit would exceed them, so that a mask may have less than the quota by
    part of a unit.

    Elements with a score of zero are never kept, neither for the quota nor for a floor, because only their position
    would distinguish them. If fewer elements than requested have a score above zero, the mask has only these, with a
    UserWarning; a tensor whose scores are all zero is listed without active elements. If all scores are zero, an error
    is raised.

    Scores are read tensor by tensor, three times (once in pool `tensor`), and not stored. In addition to the mask,
    memory holds one tensor's scores and those of its units, and a workspace of about 100 MB.

    Args:
        sparsity: percent of elements to leave out, above 0 and below 100.
        min_tensor_keep: the floor, as a fraction of each tensor, 0 to 1.
        pool: whether units are compared over all tensors or within each.
        pattern: the units that are kept or left out as a whole; see `masks.patterns`.
        metadata: strings for the mask; pool, min_tensor_keep and made_by are added.
        progress: show a bar on a terminal.

    Raises:
        MaskError: an argument is out of range, the floors alone exceed the quota, a score is NaN or below zero (names
            the tensor), all scores are zero, the quota is zero, or no unit fits into it.
    """
    require_arguments(sparsity, {"min_tensor_keep": min_tensor_keep, "pool": pool, "pattern": pattern})
    numels = {name: math.prod(shape) for name, shape in source.shapes.items()}
    # Without this rounding, 100 - 99.9 is slightly less than 0.1, and halves would not be rounded up.
    percent = round(100.0 - sparsity, 10)
    quota = _rounded(sum(numels.values()), percent)
    floors = {name: math.ceil(min_tensor_keep * numel) for name, numel in numels.items()}
    if pool == "global":
        _require_quota(sum(floors.values()), quota, min_tensor_keep, sparsity)
    shares = {name: _rounded(numel, percent) for name, numel in numels.items()}
    chosen = GlobalSelection(floors, quota) if pool == "global" else TensorSelection(floors, shares)
    indices: dict[str, Tensor] = {}
    with tqdm(
        total=(3 if pool == "global" else 1) * len(numels),
        desc=source.score_name,
        unit="tensor",
        leave=False,
        disable=None if progress else True,
    ) as bar:
        if isinstance(chosen, GlobalSelection):
            for name, scores in _scores(source, pattern, bar):
                chosen.count(name, scores)
            _require_quota(chosen.floor_total, quota, min_tensor_keep, sparsity, pattern)
            for name, scores in _scores(source, pattern, bar):
                chosen.refine(name, scores)
        for name, scores in _scores(source, pattern, bar):
            positions = expand_units(chosen.select(name, scores), source.shapes[name], pattern)
            # int32 takes half the memory.
            indices[name] = positions.to(torch.int32) if numels[name] < 2**31 else positions
    nnz = sum(positions.numel() for positions in indices.values())
    if not nnz:
        raise MaskError(_no_element(source, chosen, pattern, sparsity))
    if chosen.reachable < chosen.requested:
        warnings.warn(
            f"only {chosen.reachable} elements have a {source.score_name} above zero, {chosen.requested} were "
            "requested: "
            f"the mask keeps {nnz}",
            stacklevel=2,
        )
    made = {
        **(metadata or {}),
        "pool": pool,
        "min_tensor_keep": str(min_tensor_keep),
        "made_by": f"sparse-opt {__version__}",
    }
    mask = MaskSet(indices, source.shapes, pattern=pattern, metadata=made)
    bits = chosen.threshold
    threshold = None if bits is None else _score(bits)
    return FoundMask(mask, threshold)


def _scores(source: ScoreSource, pattern: str, bar: tqdm) -> Iterator[tuple[str, UnitScores]]:
    """Yield (name, scores of the pattern's units) in one pass over the tensors."""
    for name, shape in source.shapes.items():
        bits = source.bits(name)
        _require_numbers(bits, source.score_name, name)
        yield name, unit_scores(bits, shape, pattern)
        bar.update()


def _require_numbers(bits: Tensor, score_name: str, name: str) -> None:
    """Raise MaskError if a score is NaN or negative, by its bits."""
    if not bits.numel():
        return
    least, most = (int(end) for end in bits.aminmax())
    if least >= 0 and most <= _INFINITY_BITS:
        return
    nans = int(bits.view(torch.float32).isnan().count_nonzero())
    if nans:
        raise MaskError(f"the {score_name} of {name} is NaN at {nans} of {bits.numel()} elements, expected numbers")
    below = int((bits < 0).count_nonzero())
    raise MaskError(f"the {score_name} of {name} is negative at {below} of {bits.numel()} elements, expected 0 or more")


def _require_quota(floor_total: int, quota: int, min_tensor_keep: float, sparsity: float, pattern: str = "") -> None:
    if floor_total > quota:
        units = f" in whole units of {pattern}" if pattern not in ("", "element") else ""
        raise MaskError(
            f"min_tensor_keep {min_tensor_keep} keeps {floor_total} elements{units}, "
            f"but sparsity {sparsity} leaves {quota}: lower one of the two"
        )


def _no_element(
    source: ScoreSource, selection: GlobalSelection | TensorSelection, pattern: str, sparsity: float
) -> str:
    if not selection.requested:
        each = " of any single tensor" if isinstance(selection, TensorSelection) else ""
        numel = sum(map(math.prod, source.shapes.values()))
        return f"sparsity {sparsity} leaves none of the {numel} elements{each}"
    if selection.reachable:
        return f"no unit of {pattern} fits: sparsity {sparsity} leaves {selection.requested} elements in all"
    return f"no element of the chosen tensors has a {source.score_name} above zero"


def _score(bits: int) -> float:
    return float(torch.tensor(bits, dtype=torch.int32, device="cpu").view(torch.float32))


def _rounded(numel: int, percent: float) -> int:
    """Return `percent` of `numel`, with halves rounded up."""
    return math.floor(percent * numel / 100.0 + 0.5)
