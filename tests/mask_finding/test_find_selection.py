"""find_mask against sorting every score at once, for elements, runs and tiles."""

import itertools
import math
from collections.abc import Mapping

import numpy as np
import pytest
import torch
from torch import Tensor

from sparse_opt.errors import MaskError
from sparse_opt.mask_finding import topk
from sparse_opt.mask_finding.select import find_mask
from sparse_opt.masks.patterns import PATTERNS


class Scores:
    """A score source of tensors in memory."""

    score_name = "test score"

    def __init__(self, scores: Mapping[str, Tensor], device: torch.device | str = "cpu") -> None:
        self.scores = {name: t.to(device) for name, t in scores.items()}
        self.shapes = {name: tuple(t.shape) for name, t in scores.items()}

    def bits(self, name: str) -> Tensor:
        return self.scores[name].reshape(-1).view(torch.int32)


def quota_of(numel: int, sparsity: float) -> int:
    return math.floor(round(100 - sparsity, 10) * numel / 100 + 0.5)


def test_threshold_is_that_of_a_full_sort_of_two_million_scores_with_many_ties(device: torch.device) -> None:
    generator = np.random.default_rng(0)
    shapes = {"a": (400, 3000), "b": (300_000,), "c": (5, 99_999), "d": (5,)}
    # Some 300 different values, as rounding to bf16 leaves them, and as many zeros as elements that did not move.
    scores = {n: np.floor(300 * generator.random(s) ** 4).astype(np.float32) / 1024 for n, s in shapes.items()}
    flat = np.concatenate([t.reshape(-1) for t in scores.values()])
    assert len(flat) == 2_000_000
    kept = quota_of(len(flat), 97.5)
    order = np.argsort(-flat, kind="stable")[:kept]
    least = flat[order[-1]]
    assert (flat == least).sum() > 1000  # the quota ends in the middle of ties
    assert flat[np.argsort(-flat, kind="stable")[kept]] == least

    source = Scores({n: torch.from_numpy(t) for n, t in scores.items()}, device)
    found = find_mask(source, sparsity=97.5, min_tensor_keep=0)
    assert found.threshold == least
    starts = dict(zip(shapes, np.cumsum([0, *(t.size for t in scores.values())]), strict=False))
    positions = np.concatenate([found.mask[name].numpy() + starts[name] for name in shapes])
    assert np.array_equal(positions, np.sort(order))


def test_order_of_bits_is_order_of_numbers() -> None:
    """The ends of the range: the least subnormal, numbers one bit apart over a border of 16 bits, infinity."""
    bits = torch.tensor([1, 0, 0x7F800000, 0x3F80FFFF, 0x3F810000, 0x3F810001, 0x3F7FFFFF], dtype=torch.int32)
    source = Scores({"w": bits.view(torch.float32)})
    ranked = [2, 5, 4, 3, 6, 0]
    for kept in range(1, 7):
        mask = find_mask(source, sparsity=100 - 100 * kept / 7, min_tensor_keep=0).mask
        assert mask["w"].tolist() == sorted(ranked[:kept])


# Elements, runs and tiles


def brute_units(scores: Tensor, pattern: str) -> list[tuple[float, list[int]]]:
    """(sum, positions) of each unit, matrix by matrix, row by row, found by looking at each; it may be one element."""
    height, width = PATTERNS[pattern]
    rows, columns = (1, 1, *scores.shape)[-2:]
    matrix = scores.reshape(-1, columns).tolist()
    units = []
    for first in range(0, len(matrix), max(1, rows)):
        for top in range(first, first + rows, height):
            for left in range(0, columns, width):
                within = range(top, min(top + height, first + rows)), range(left, min(left + width, columns))
                inside = list(itertools.product(*within))
                total = math.fsum(matrix[i][j] for i, j in inside)
                units.append((float(np.float32(total)), [i * columns + j for i, j in inside]))
    return units


def brute_mask(
    scores: Mapping[str, Tensor], pattern: str, sparsity: float, keep: float, pool: str
) -> dict[str, list[int]]:
    """The definition: floors first, by as few units as cover them; then units until the next does not fit."""
    kept: dict[str, list[int]] = {}
    rest = []
    for order, (name, tensor) in enumerate(scores.items()):
        units = brute_units(tensor, pattern)
        ranked = sorted((-total, order, i) for i, (total, _) in enumerate(units) if total > 0)
        floor, share = math.ceil(keep * tensor.numel()), quota_of(tensor.numel(), sparsity)
        kept[name] = []
        for n, (negative, _, i) in enumerate(ranked):
            positions = units[i][1]
            covers_floor = len(kept[name]) < floor
            fits_share = pool == "tensor" and len(kept[name]) + len(positions) <= share
            if not covers_floor and not fits_share:
                rest += [(negative, order, i, name, units[i][1]) for negative, _, i in ranked[n:]]
                break
            kept[name] += positions
    if pool == "global":
        remaining = quota_of(sum(t.numel() for t in scores.values()), sparsity) - sum(map(len, kept.values()))
        for *_, name, positions in sorted(rest):
            if len(positions) > remaining:
                break
            kept[name] += positions
            remaining -= len(positions)
    return {name: sorted(positions) for name, positions in kept.items()}


# Ragged edges on both sides, a vector, a third dimension, a scalar, nothing at all.
SHAPES = {"up": (150, 200), "norm": (77,), "conv": (3, 50, 33), "scalar": (), "none": (0, 4), "wide": (1, 300)}


def made_scores(seed: int, kind: str) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    if kind == "ties":
        return {n: torch.randint(0, 3, s, generator=generator).float() for n, s in SHAPES.items()}
    scores = {n: torch.rand(s, generator=generator) ** 6 for n, s in SHAPES.items()}
    if kind == "blocks":  # most units do not score at all
        scores["up"][:, 40:] = 0
        scores["conv"][1:] = 0
    return scores


@pytest.mark.parametrize("pool", ["global", "tensor"])
@pytest.mark.parametrize("kind", ["spread", "ties", "blocks"])
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.filterwarnings("ignore:only .* elements have a test score")
def test_units_are_those_of_looking_at_each(pattern: str, kind: str, pool: str, device: torch.device) -> None:
    scores = made_scores(1, kind)
    for sparsity, keep in [(50.0, 0.0), (40.0, 0.01), (10.0, 0.002), *[(97.5, 0.0025)] * (pattern == "element")]:
        expected = brute_mask(scores, pattern, sparsity, keep, pool)
        source = Scores(scores, device)
        found = find_mask(source, sparsity=sparsity, min_tensor_keep=keep, pool=pool, pattern=pattern)  # type: ignore[arg-type]
        assert {name: found.mask[name].tolist() for name in found.mask.names} == expected, (sparsity, keep)
        assert found.mask.pattern == pattern


# What neither device, thread, chunk nor order may change


@pytest.mark.parametrize("pattern", ["element", "run32", "tile64"])
def test_threads_and_chunks_change_nothing(pattern: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in ("spread", "ties"):
        source = Scores(made_scores(4, kind))
        whole = find_mask(source, sparsity=40, pattern=pattern, min_tensor_keep=0).mask
        threads = torch.get_num_threads()
        with monkeypatch.context() as patched:
            patched.setattr(topk, "_CHUNK", 113)
            patched.setattr(topk, "_BLOCK", 1000)
            patched.setattr(topk, "_BLOCK_COLUMNS", 256)
            torch.set_num_threads(1)
            try:
                again = find_mask(source, sparsity=40, pattern=pattern, min_tensor_keep=0).mask
            finally:
                torch.set_num_threads(threads)
        assert (again, again.digest) == (whole, whole.digest)


# Refusals


def test_units_that_cannot_fit_are_refused() -> None:
    source = Scores({"w": torch.rand(128, 128)})
    with pytest.raises(MaskError, match="no unit of tile64 fits: sparsity 80.0 leaves 3277 elements in all"):
        find_mask(source, sparsity=80.0, min_tensor_keep=0, pattern="tile64")
    with pytest.raises(MaskError, match="keeps 4096 elements in whole units of tile64, but sparsity 80.0 leaves 3277"):
        find_mask(source, sparsity=80.0, pattern="tile64")


def test_scores_that_are_all_zero_give_no_mask() -> None:
    for pool in ("global", "tensor"):
        for pattern in ("element", "run16"):
            with pytest.raises(MaskError, match="no element of the chosen tensors has a test score above zero"):
                find_mask(Scores({"w": torch.zeros(64)}), sparsity=50, pool=pool, pattern=pattern)


@pytest.mark.parametrize("sign", [1, -1])
def test_nan_names_the_tensor(sign: int, device: torch.device) -> None:
    """Of either sign: what inf - inf gives is negative on x86 and positive on a GPU."""
    bad = torch.tensor([1.0, math.copysign(math.nan, sign), math.inf])
    assert (bad.view(torch.int32)[1] > 0) == (sign > 0)
    source = Scores({"good": torch.ones(9), "bad": bad}, device)
    with pytest.raises(MaskError, match="the test score of bad is NaN at 1 of 3 elements, expected numbers"):
        find_mask(source, sparsity=50)


def test_scores_below_zero_are_refused() -> None:
    source = Scores({"w": torch.tensor([1.0, -2.0, 3.0])})
    with pytest.raises(MaskError, match="the test score of w is negative at 1 of 3 elements, expected 0 or more"):
        find_mask(source, sparsity=50)


@pytest.mark.parametrize("pattern", ["element", "run16"])
@pytest.mark.parametrize("pool", ["global", "tensor"])
def test_a_sparsity_that_leaves_nothing_is_refused(pool: str, pattern: str) -> None:
    source = Scores({"w": torch.ones(3), "v": torch.ones(4)})
    where = " of any single tensor" if pool == "tensor" else ""
    with pytest.raises(MaskError, match=f"sparsity 97.5 leaves none of the 7 elements{where}$"):
        find_mask(source, sparsity=97.5, min_tensor_keep=0, pool=pool, pattern=pattern)  # type: ignore[arg-type]


def test_halves_of_an_element_are_rounded_up() -> None:
    """100 - 99.9 is less than 0.1 in floating point."""
    for pool in ("global", "tensor"):
        found = find_mask(Scores({"w": torch.ones(500)}), sparsity=99.9, min_tensor_keep=0, pool=pool)  # type: ignore[arg-type]
        assert found.mask.nnz == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sparsity": 0.0}, "sparsity is 0.0 percent, expected above 0 and below 100"),
        ({"pattern": "run8"}, "pattern is 'run8', expected one of element, run16"),
        ({"pool": "layer"}, "pool is 'layer', expected global or tensor"),
        ({"min_tensor_keep": -0.1}, "min_tensor_keep is -0.1"),
        ({"min_tensor_keep": 0.6}, "keeps 6 elements, but sparsity 50.0 leaves 5: lower one of the two"),
    ],
)
def test_arguments_out_of_range(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(MaskError, match=message):
        find_mask(Scores({"w": torch.ones(9)}), **{"sparsity": 50.0, **arguments})  # type: ignore[arg-type]
