"""Patterns: every claim about them against a loop over all units of a matrix."""

import math
from itertools import product

import pytest
import torch
from torch import Tensor

from sparse_opt import MaskSet
from sparse_opt.errors import MaskError
from sparse_opt.masks import patterns as mask_patterns
from sparse_opt.masks.patterns import PATTERNS, broken_unit

SHAPES = [(), (1,), (130,), (3, 5), (64, 64), (128, 160), (130, 70), (129, 128), (0, 4), (4, 0), (5, 1)]
# Stacks of matrices, as fused experts are: of whole tiles, cut off at the lower edge, smaller than a tile, and empty.
SHAPES += [(3, 64, 130), (2, 130, 70), (4, 3, 70), (2, 3, 5, 17), (0, 4, 5), (2, 0, 5)]


def first_broken(mask: Tensor, pattern: str) -> int | None:
    """The definition: the number of the first unit that is neither all in nor all out."""
    height, width = PATTERNS[pattern]
    rows, columns = (1, 1, *mask.shape)[-2:]
    if pattern == "element":
        return None
    stack = mask.view(math.prod(mask.shape[:-2]), rows, columns).numpy()
    corners = product(range(len(stack)), range(0, rows, height), range(0, columns, width))
    for number, (matrix, row, column) in enumerate(corners):
        unit = stack[matrix, row : row + height, column : column + width]
        if unit.any() != unit.all():
            return number
    return None


@pytest.fixture(params=[2**24, 300], ids=["one_band", "many_bands"])
def _bands(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mask_patterns, "_BAND_ELEMENTS", request.param)


@pytest.mark.usefixtures("_bands")
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_random_masks_keep_their_pattern_and_others_are_found_out(shape: tuple[int, ...], pattern: str) -> None:
    for density in (0.0, 0.6, 1.0):
        try:
            mask = MaskSet.random({"w": shape}, density=density, pattern=pattern, seed=3)
        except MaskError:  # 0.6 of one unit
            assert density == 0.6
            continue
        dense = mask.bool("w")
        for other in PATTERNS:
            assert broken_unit(mask["w"], shape, other) == first_broken(dense, other), other
        assert MaskSet(dict(mask.indices), mask.shapes, pattern=pattern) == mask
        specific = [name for name in PATTERNS if first_broken(dense, name) is None][-1]
        found = MaskSet.from_bool({"w": dense})
        assert found.pattern == specific
        assert found == mask


def test_one_element_more_or_less_breaks_a_tile() -> None:
    shape = (200, 150)
    mask = MaskSet.random({"w": shape}, density=0.5, pattern="tile64", seed=0)
    dense = mask.bool("w")
    for position in (0, 63, 64, 150 * 64, 150 * 199 + 149):
        dense.view(-1)[position] ^= True
        flipped = dense.view(-1).nonzero().view(-1).int()
        with pytest.raises(MaskError, match=r"positions of w take a part of tile64 unit \d+"):
            MaskSet({"w": flipped}, {"w": shape}, pattern="tile64")
        dense.view(-1)[position] ^= True
    assert MaskSet.from_bool({"w": dense}).pattern == "tile64"


def test_contiguous_but_unaligned_runs_are_no_runs() -> None:
    with pytest.raises(MaskError, match="run16 unit 0"):
        MaskSet({"w": torch.arange(8, 24, dtype=torch.int32)}, {"w": (64,)}, pattern="run16")
    # 16 elements that cross from one row of 24 into the next.
    with pytest.raises(MaskError, match="run16"):
        MaskSet({"w": torch.arange(16, 32, dtype=torch.int32)}, {"w": (4, 24)}, pattern="run16")


def test_from_bool_finds_what_all_tensors_keep_to() -> None:
    runs = MaskSet.random({"a": (8, 64)}, density=0.5, pattern="run32", seed=1).bool("a")
    assert MaskSet.from_bool({"a": runs}).pattern == "run32"
    assert MaskSet.from_bool({"a": runs, "b": torch.ones(3, dtype=torch.bool)}).pattern == "run32"
    assert MaskSet.from_bool({"b": torch.tensor([True, False]), "a": runs}).pattern == "element"
