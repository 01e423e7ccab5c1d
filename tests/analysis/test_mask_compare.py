"""Agreement of masks against sets and bool tensors, and its expectation by chance against the exact distribution."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

from sparse_opt import MaskSet
from sparse_opt.analysis.mask_overlap import Overlap, compare
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
    (pair,) = compare({"a": a, "b": b})
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


def test_all_pairs_in_order():
    masks = {str(seed): random_mask(seed) for seed in range(4)}
    pairs = compare(masks)
    assert [(pair.first, pair.second) for pair in pairs] == list(itertools.combinations("0123", 2))
    assert [pair.total.jaccard for pair in pairs] == [masks[p.first].jaccard(masks[p.second]) for p in pairs]


@pytest.mark.parametrize(
    "tensors",
    [
        [(20, 5, 8)],
        [(400, 90, 60)],
        [(400, 300, 350)],
        [(1000, 500, 500)],
        [(1000, 25, 25)],
        [(50, 50, 20)],
        [(60, 6, 12), (200, 150, 20), (90, 45, 45)],
        [(500, 100, 100), (500, 20, 200), (30, 0, 7)],
        [(2, 1, 1)],
        [(1, 1, 1)],
    ],
    ids=str,
)
def test_chance_is_the_exact_expectation_within_the_stated_error(tensors):
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
    assert abs(total.jaccard_chance - exact) <= total.jaccard_chance_error + 1e-12
    if total.least_either >= 90:
        assert total.jaccard_chance_error < 1e-3
        spread = math.sqrt(float(probabilities @ (jaccard - exact) ** 2))
        assert total.jaccard_chance_sd == pytest.approx(spread, rel=0.1)


def test_the_stated_error_is_small_for_a_real_tensor():
    overlap = Overlap.of_counts(3072 * 8192, 629_146, 629_146, 15_729)
    assert overlap.jaccard_chance == pytest.approx(0.025 / 1.975, rel=1e-4)
    assert 0 < overlap.jaccard_chance_error < 1e-12


@pytest.mark.parametrize("densities", [(0.05, 0.05), (0.3, 0.1), (0.9, 0.6)], ids=str)
def test_random_masks_agree_as_chance_says(densities):
    """Means of n independent pairs are within five standard errors, which 1 in 1.7 million sets of seeds would not."""
    n = 40
    totals = [
        compare({"a": random_mask(2 * i, densities[0]), "b": random_mask(2 * i + 1, densities[1])})[0].total
        for i in range(n)
    ]
    chance, sd = totals[0].jaccard_chance, totals[0].jaccard_chance_sd
    assert {t.jaccard_chance for t in totals} == {chance}
    found = [t.jaccard for t in totals]
    assert abs(np.mean(found) - chance) < 5 * sd / math.sqrt(n)
    assert max(abs(j - chance) for j in found) < 5 * sd
    # The sample standard deviation's own relative error is 1 / sqrt(2 n).
    assert np.std(found, ddof=1) == pytest.approx(sd, rel=5 / math.sqrt(2 * n))
    for figure, active in (("of_first", totals[0].first), ("of_second", totals[0].second)):
        error = 5 * math.sqrt(totals[0].both_chance_variance / n) / active
        assert abs(np.mean([getattr(t, figure) for t in totals]) - getattr(totals[0], f"{figure}_chance")) < error


def test_chance_respects_the_density_of_each_tensor():
    """Two masks that fill the same tensor agree there by chance: the same counts spread over both would not."""
    shapes = {"a": (1000,), "b": (1000,)}
    mask = MaskSet({"a": torch.arange(900), "b": torch.arange(10)}, shapes)
    other = MaskSet({"a": torch.arange(100, 1000), "b": torch.arange(500, 510)}, shapes)
    total = compare({"mask": mask, "other": other})[0].total
    assert total.both_chance == pytest.approx(900 * 900 / 1000 + 10 * 10 / 1000)
    assert total.both == 800


def test_equal_disjoint_full_and_empty_masks():
    shapes = {"w": (100,)}
    low, high = MaskSet({"w": torch.arange(50)}, shapes), MaskSet({"w": torch.arange(50, 100)}, shapes)
    full = MaskSet({"w": torch.arange(100)}, shapes)
    none = MaskSet({"w": torch.arange(0)}, shapes)
    total = {
        (p.first, p.second): p.total
        for p in compare({"low": low, "same": low, "high": high, "full": full, "again": full, "none": none, "no": none})
    }
    assert [getattr(total["low", "same"], name) for name in STATISTICS] == [1, 1, 1]
    assert [getattr(total["low", "high"], name) for name in STATISTICS] == [0, 0, 0]
    assert [getattr(total["low", "full"], name) for name in STATISTICS] == [0.5, 1, 0.5]
    # With a full mask nothing is left to chance.
    for pair in (("low", "full"), ("full", "again")):
        assert total[pair].jaccard == total[pair].jaccard_chance
        assert total[pair].jaccard_chance_sd == total[pair].jaccard_chance_error == 0
    empty = total["none", "no"]
    assert all(math.isnan(getattr(empty, f)) and math.isnan(getattr(empty, f"{f}_chance")) for f in STATISTICS)
    assert total["low", "none"].jaccard == 0 and math.isnan(total["low", "none"].of_second)


def test_an_empty_tensor_counts_for_nothing():
    overlap = Overlap.of_counts(0, 0, 0, 0)
    assert math.isnan(overlap.jaccard)
    assert overlap + Overlap.of_counts(10, 3, 4, 2) == Overlap.of_counts(10, 3, 4, 2)


def test_masks_of_different_models_are_refused_by_name():
    mask = random_mask(0)
    fewer = MaskSet.random({n: s for n, s in SHAPES.items() if n != "model.norm.weight"}, density=0.2)
    other = MaskSet.random({**SHAPES, "model.norm.weight": (64,)}, density=0.2)
    foreign = MaskSet.random({"transformer.wte.weight": (4, 4)}, density=0.5)
    for masks, said in (
        ({"mask": mask, "fewer": fewer}, "model.norm.weight is in mask and not in fewer"),
        ({"fewer": fewer, "mask": mask}, "model.norm.weight is in mask and not in fewer"),
        ({"mask": mask, "other": other}, "model.norm.weight is [32] in mask and [64] in other"),
        ({"mask": mask, "m2": random_mask(1), "other": other}, "model.norm.weight is [32] in mask and [64] in other"),
        ({"mask": mask, "foreign": foreign}, "model.embed_tokens.weight is in mask and not in foreign"),
        ({"mask": mask}, "found 1 masks"),
    ):
        with pytest.raises(MaskError) as error:
            compare(masks)
        assert said in str(error.value)
        assert "\n" not in str(error.value)


def test_common_tensors_on_request():
    mask, fewer = random_mask(0), MaskSet.random({n: s for n, s in SHAPES.items() if "mlp" in n}, density=0.2, seed=5)
    (pair,) = compare({"mask": mask, "fewer": fewer}, common=True)
    assert list(pair.tensors) == [n for n in SHAPES if "mlp" in n]
    foreign = MaskSet.random({"transformer.wte.weight": (4, 4)}, density=0.5)
    with pytest.raises(MaskError, match="mask, foreign have no parameter in common"):
        compare({"mask": mask, "foreign": foreign}, common=True)
    other = MaskSet.random({**SHAPES, "model.norm.weight": (64,)}, density=0.2)
    with pytest.raises(MaskError, match="model.norm.weight is"):
        compare({"mask": mask, "other": other}, common=True)


def test_other_model_names_are_pointed_out():
    masks = {name: random_mask(i) for i, name in enumerate("abc")}
    masks["a"].metadata["model"] = "base"
    masks["b"].metadata["model"] = "instruct"
    with pytest.warns(UserWarning, match="^a was made for the model base, b for instruct$"):
        compare(masks)


def test_positions_past_2_to_the_31():
    shapes = {"w": (2**20, 2**12)}
    a = MaskSet({"w": torch.tensor([5, 2**31 + 3, 2**32 - 1])}, shapes)
    b = MaskSet({"w": torch.tensor([2**31, 2**31 + 3, 2**32 - 1])}, shapes)
    assert compare({"a": a, "b": b})[0].total.both == 2
    assert a.jaccard(b) == 0.5
