"""Union, intersection and inversion against bool tensors."""

from __future__ import annotations

import itertools

import pytest
import torch

from sparse_opt import MaskSet
from sparse_opt.errors import MaskError
from sparse_opt.masks import PATTERNS, intersect, invert, union
from sparse_opt.masks import positions as position_sets

SHAPES = {"a.0.weight": (130, 200), "a.0.bias": (77,), "empty": (0, 3), "scalar": ()}


def random_mask(seed: int, density: float = 0.3, pattern: str = "element") -> MaskSet:
    return MaskSet.random(SHAPES, density=density, pattern=pattern, seed=seed)


@pytest.mark.parametrize("densities", [(0.3, 0.1, 0.8), (0.0, 0.5, 0.5), (1.0, 0.2, 0.2), (0.0, 0.0, 0.0)], ids=str)
def test_against_bool_tensors(densities):
    masks = [random_mask(seed, density) for seed, density in enumerate(densities)]
    either, both, inverted = union(masks), intersect(masks), invert(masks[0])
    assert either.names == both.names == inverted.names == tuple(SHAPES)
    for name in SHAPES:
        x, y, z = (mask.bool(name) for mask in masks)
        assert torch.equal(either.bool(name), x | y | z)
        assert torch.equal(both.bool(name), x & y & z)
        assert torch.equal(inverted.bool(name), ~x)
        for mask in (either, both, inverted):
            assert mask[name].dtype == torch.int32
    # The pattern that is assumed without a check is correct when it is checked.
    for mask in (either, both, inverted):
        assert MaskSet(mask.indices, mask.shapes, pattern=mask.pattern) == mask


@pytest.mark.parametrize("patterns", list(itertools.combinations_with_replacement(PATTERNS, 2)), ids="-".join)
def test_results_keep_to_the_pattern_they_name(patterns):
    masks = [random_mask(seed, 0.4, pattern) for seed, pattern in enumerate(patterns)]
    for mask in (union(masks), intersect(masks), invert(masks[1])):
        assert MaskSet(mask.indices, mask.shapes, pattern=mask.pattern) == mask
    assert union(masks).pattern == intersect(masks).pattern == patterns[0]
    assert invert(masks[1]).pattern == patterns[1]


def test_masks_that_list_different_parameters():
    a, b = random_mask(1), MaskSet.random({"a.0.bias": (77,), "b": (5,)}, density=0.6)
    assert union([a, b]).names == (*SHAPES, "b")
    assert torch.equal(union([a, b])["b"], b["b"])
    assert intersect([a, b]).names == ("a.0.bias",)


def test_metadata_say_where_it_came_from(tmp_path):
    a, b = random_mask(1), random_mask(2)
    a.metadata.update(method="fisher", model="m", step="50", sparsity="97.5")
    b.metadata.update(method="momentum", model="m")
    assert union([a, b]).metadata == {
        "method": "union",
        "source_methods": "fisher, momentum",
        "source_digests": f"{a.digest}, {b.digest}",
        "model": "m",
    }
    b.metadata["model"] = "another"
    assert "model" not in intersect([a, b]).metadata
    assert invert(a).metadata["method"] == "invert"
    # The file states the sparsity of the result, not that of a source.
    written = MaskSet.load(invert(a).save(tmp_path / "m.safetensors"))
    assert float(written.metadata["sparsity"]) == pytest.approx(100 * a.density)


def test_what_does_not_fit_is_refused_by_name():
    a = random_mask(1)
    for combine in (union, intersect):
        with pytest.raises(MaskError, match=r"^a.0.bias is \[77\] in one mask, \[7, 11\] in another$"):
            combine([a, MaskSet.random({"a.0.bias": (7, 11)}, density=0.5)])
        with pytest.raises(MaskError, match="found 1 masks, expected two"):
            combine([a])
    with pytest.raises(MaskError, match="the 2 masks have no parameter in common"):
        intersect([a, MaskSet.random({"b": (7,)}, density=0.5)])


def test_positions_that_need_int64():
    shapes = {"w": (2**20, 2**12)}
    a, b = (MaskSet({"w": torch.tensor([n, 2**31 + 3])}, shapes) for n in (5, 7))
    for mask, expected in ((union([a, b]), [5, 7, 2**31 + 3]), (intersect([a, b]), [2**31 + 3])):
        assert mask["w"].dtype == torch.int64 and mask["w"].tolist() == expected


@pytest.mark.parametrize("numel", [12, 13, 24, 25])
def test_complement_across_chunks(monkeypatch, numel):
    monkeypatch.setattr(position_sets, "_CHUNK", 12)
    for given in ([], [0], [11], [12], [0, 11, 12], list(range(12)), list(range(numel))):
        kept = [position for position in given if position < numel]
        left = position_sets.complement(torch.tensor(kept, dtype=torch.int32), numel)
        assert left.tolist() == [position for position in range(numel) if position not in kept]
