"""Agreement of masks against sets and bool tensors, and its expectation by chance against the exact distribution."""

import math

import numpy as np
import pytest
import torch

from sparse_opt import MaskSet
from sparse_opt.analysis import Overlap, compare_masks
from sparse_opt.errors import MaskError

SHAPES = {
    "model.embed_tokens.weight": (40, 32),
    "model.layers.0.self_attn.q_proj.weight": (32, 32),
    "model.layers.0.mlp.up_proj.weight": (64, 32),
    "model.layers.1.self_attn.q_proj.weight": (32, 32),
    "model.layers.1.mlp.up_proj.weight": (64, 32),
    "model.layers.1.input_layernorm.weight": (32,),
    "model.norm.weight": (32,),
}
STATISTICS = ("jaccard", "of_first", "of_second")


def random_mask(seed: int, density: float = 0.2) -> MaskSet:
    return MaskSet.random(SHAPES, density=density, seed=seed)


def distribution(numel: int, first: int, second: int) -> np.ndarray:
    """Probability of each number in both, from 0 up."""
    ways = [math.comb(first, k) * math.comb(numel - first, second - k) for k in range(second + 1)]
    return np.array([way / math.comb(numel, second) for way in ways])


def sets_of(mask: MaskSet, names: list[str]) -> set[tuple[str, int]]:
    return {(name, int(position)) for name in names for position in mask[name]}


def test_every_group_counts_what_sets_count():
    a, b = random_mask(1, 0.2), random_mask(2, 0.5)
    (pair,) = compare_masks({"a": a, "b": b})
    assert (pair.first, pair.second) == ("a", "b")
    assert list(pair.tensors) == list(SHAPES)
    layers = {0: [n for n in SHAPES if ".0." in n], 1: [n for n in SHAPES if ".1." in n]}
    layers[None] = ["model.embed_tokens.weight", "model.norm.weight"]
    assert list(pair.layers) == list(layers)
    parts = {
        "embeddings": [n for n in SHAPES if "embed" in n],
        "attention_q": [n for n in SHAPES if "q_proj" in n],
        "mlp_up": [n for n in SHAPES if "up_proj" in n],
        "norms": [n for n in SHAPES if "norm" in n],
    }
    assert list(pair.parts) == list(parts)
    groups = [(pair.total, list(SHAPES)), *((pair.tensors[name], [name]) for name in SHAPES)]
    groups += [(pair.layers[key], names) for key, names in layers.items()]
    groups += [(pair.parts[key], names) for key, names in parts.items()]
    for overlap, names in groups:
        x, y = sets_of(a, names), sets_of(b, names)
        assert (overlap.first, overlap.second, overlap.both) == (len(x), len(y), len(x & y))
        assert overlap.numel == sum(math.prod(SHAPES[name]) for name in names)
        assert overlap.jaccard == len(x & y) / len(x | y)
        assert (overlap.of_first, overlap.of_second) == (len(x & y) / len(x), len(x & y) / len(y))
    assert pair.total.jaccard == a.jaccard(b) == b.jaccard(a)


@pytest.mark.parametrize(
    "tensors",
    [
        [(20, 5, 8)],
        [(400, 300, 350)],
        [(1000, 25, 25)],
        [(60, 6, 12), (200, 150, 20), (90, 45, 45)],
        [(500, 100, 100), (500, 20, 200), (30, 0, 7)],
        [(2, 1, 1)],
        [(1, 1, 1)],
    ],
    ids=str,
)
def test_chance_is_the_exact_expectation(tensors):
    total = sum((Overlap.of_counts(*counts, both=0) for counts in tensors[1:]), Overlap.of_counts(*tensors[0], both=0))
    probabilities = np.array([1.0])
    for counts in tensors:
        probabilities = np.convolve(probabilities, distribution(*counts))
    both = np.arange(probabilities.size)
    mean = float(probabilities @ both)
    variance = float(probabilities @ (both - mean) ** 2)
    # Sums of at most 1000 terms of relative error 1e-15 each.
    assert total.both_chance == pytest.approx(mean, rel=1e-12)
    assert total.both_chance_variance == pytest.approx(variance, rel=1e-9, abs=1e-9)
    assert total.of_first_chance == pytest.approx(mean / total.first, rel=1e-12)
    assert total.of_second_chance == pytest.approx(mean / total.second, rel=1e-12)
    jaccard = both / (total.first + total.second - both)
    exact = float(probabilities @ jaccard)
    # The third-order term of the series is at most S v / (S - m)^4, since the third central moment is at most v.
    actives, either = total.first + total.second, total.first + total.second - mean
    fourth = actives * (3 * variance**2 + variance) / sum(max(counts[1:]) for counts in tensors) ** 5
    assert abs(total.jaccard_chance - exact) <= actives * variance / either**4 + fourth + 1e-12
    if total.first >= 90:
        spread = math.sqrt(float(probabilities @ (jaccard - exact) ** 2))
        assert total.jaccard_chance_sd == pytest.approx(spread, rel=0.1)


def test_chance_respects_the_density_of_each_tensor():
    """Two masks that fill the same tensor agree there by chance: the same counts spread over both would not."""
    shapes = {"a": (1000,), "b": (1000,)}
    mask = MaskSet({"a": torch.arange(900), "b": torch.arange(10)}, shapes)
    other = MaskSet({"a": torch.arange(100, 1000), "b": torch.arange(500, 510)}, shapes)
    total = compare_masks({"mask": mask, "other": other})[0].total
    assert total.both_chance == pytest.approx(900 * 900 / 1000 + 10 * 10 / 1000)
    assert total.both == 800


def test_equal_disjoint_full_and_empty_masks():
    shapes = {"w": (100,)}
    low, high = MaskSet({"w": torch.arange(50)}, shapes), MaskSet({"w": torch.arange(50, 100)}, shapes)
    full = MaskSet({"w": torch.arange(100)}, shapes)
    none = MaskSet({"w": torch.arange(0)}, shapes)
    total = {
        (p.first, p.second): p.total
        for p in compare_masks({"low": low, "same": low, "high": high, "full": full, "none": none, "no": none})
    }
    assert [getattr(total["low", "same"], name) for name in STATISTICS] == [1, 1, 1]
    assert [getattr(total["low", "high"], name) for name in STATISTICS] == [0, 0, 0]
    # With a full mask nothing is left to chance.
    assert total["low", "full"].jaccard == total["low", "full"].jaccard_chance == 0.5
    empty = total["none", "no"]
    assert all(math.isnan(getattr(empty, f)) and math.isnan(getattr(empty, f"{f}_chance")) for f in STATISTICS)
    assert total["low", "none"].jaccard == 0 and math.isnan(total["low", "none"].of_second)


def test_masks_of_different_models_are_refused_by_name():
    mask = random_mask(0)
    fewer = MaskSet.random({n: s for n, s in SHAPES.items() if n != "model.norm.weight"}, density=0.2)
    other = MaskSet.random({**SHAPES, "model.norm.weight": (64,)}, density=0.2)
    for masks, said in (
        ({"mask": mask, "fewer": fewer}, "model.norm.weight is in mask and not in fewer"),
        ({"mask": mask, "other": other}, "model.norm.weight is [32] in mask and [64] in other"),
        ({"mask": mask}, "found 1 masks"),
    ):
        with pytest.raises(MaskError) as error:
            compare_masks(masks)
        assert said in str(error.value)
        assert "\n" not in str(error.value)


def test_positions_past_2_to_the_31():
    shapes = {"w": (2**20, 2**12)}
    a = MaskSet({"w": torch.tensor([5, 2**31 + 3, 2**32 - 1])}, shapes)
    b = MaskSet({"w": torch.tensor([2**31, 2**31 + 3, 2**32 - 1])}, shapes)
    assert compare_masks({"a": a, "b": b})[0].total.both == 2
    assert a.jaccard(b) == 0.5
