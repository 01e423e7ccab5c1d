"""MaskSet: refused arguments, its statistics, and how it resolves names in a model."""

import itertools

import pytest
import torch
from torch import Tensor, nn

from sparse_opt import MaskSet
from sparse_opt.errors import MaskError
from sparse_opt.masks import PATTERNS, MaskStats, intersect, invert, union
from sparse_opt.masks import positions as position_sets


def positions(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def mask_of(**masks: list[int]) -> MaskSet:
    return MaskSet.from_bool({name: torch.tensor(bits, dtype=torch.bool) for name, bits in masks.items()})


@pytest.mark.parametrize(
    ("indices", "message"),
    [
        (positions(1, 1), r"w are not strictly ascending"),
        (positions(-1, 2), r"w run from -1 to 2, expected 0 to 5"),
        (positions(0, 6), r"w run from 0 to 6, expected 0 to 5"),
        (torch.tensor([0.0, 1.0]), r"w are torch.float32 .* expected int32 or int64"),
    ],
    ids=["repeated", "negative", "past_end", "float"],
)
def test_constructor_refuses_positions(indices: Tensor, message: str) -> None:
    with pytest.raises(MaskError, match=message):
        MaskSet({"w": indices}, {"w": (2, 3)})


def test_constructor_refuses_the_rest() -> None:
    with pytest.raises(MaskError, match=r"pattern is 'run8', expected one of element, run16"):
        MaskSet({}, {}, pattern="run8")
    with pytest.raises(MaskError, match=r"different tensors: b"):
        MaskSet({"a": positions(0)}, {"a": (1,), "b": (1,)})
    with pytest.raises(MaskError, match=r"metadata 'step' is 5, expected a string"):
        MaskSet({}, {}, metadata={"step": 5})  # type: ignore[dict-item]
    with pytest.raises(MaskError, match=r"shape of a is \[-1\]"):
        MaskSet({"a": positions()}, {"a": (-1,)})


def test_positions_are_private_int32_on_the_cpu() -> None:
    given = torch.tensor([9, 0, 9, 2, 9, 4], dtype=torch.int64)[1::2]
    mask = MaskSet({"w": given}, {"w": [2, 3]})
    given.fill_(1)
    assert mask["w"].dtype == torch.int32
    assert mask["w"].is_contiguous()
    assert mask["w"].tolist() == [0, 2, 4]
    assert mask.shapes["w"] == (2, 3)
    # Also where nothing needs converting: what was checked must not change afterwards.
    fitting = positions(1, 4)
    mask = MaskSet({"w": fitting}, {"w": (2, 3)})
    fitting.fill_(77)
    assert mask["w"].tolist() == [1, 4]


def test_tensors_of_two_to_the_31_elements_have_int64_positions() -> None:
    last = torch.tensor([0, 2**31 - 1], dtype=torch.int64)
    mask = MaskSet({"at": last, "below": last[:1]}, {"at": (2**16, 2**15), "below": (2**31 - 1,)})
    assert mask["at"].dtype == torch.int64
    assert mask["below"].dtype == torch.int32
    assert mask["at"].tolist() == [0, 2**31 - 1]


def test_figures() -> None:
    mask = MaskSet(
        {
            "layers.10.mlp.weight": positions(0, 1, 2),
            "layers.2.mlp.weight": positions(3),
            "layers.2.0.bias": positions(),
            "embed.weight": positions(7),
            "h3.weight": positions(),
        },
        {
            "layers.10.mlp.weight": (2, 3),
            "layers.2.mlp.weight": (4,),
            "layers.2.0.bias": (2,),
            "embed.weight": (8,),
            "h3.weight": (),
        },
    )
    assert (mask.nnz, mask.numel, len(mask)) == (5, 21, 5)
    assert mask.density == 5 / 21
    assert mask.sparsity == 1 - 5 / 21
    assert mask.names[0] == "layers.10.mlp.weight"
    assert mask.per_tensor()["layers.2.mlp.weight"] == MaskStats(1, 4)
    # The first integer component names the layer; h3 is no integer.
    assert list(mask.per_layer().items()) == [(2, MaskStats(1, 6)), (10, MaskStats(3, 6)), (None, MaskStats(1, 9))]
    assert mask.per_layer()[10].density == 0.5
    assert "embed.weight" in mask
    assert "embed" not in mask


def test_bool_and_from_bool_are_inverse(device: torch.device) -> None:
    generator = torch.Generator().manual_seed(0)
    dense = {
        "a": torch.rand(5, 7, generator=generator) < 0.3,
        "b": torch.tensor(True),
        "c": torch.zeros(0, 3, dtype=torch.bool),
    }
    given = {"a": dense["a"].t().contiguous().t(), "b": nn.Parameter(dense["b"], requires_grad=False), "c": dense["c"]}
    mask = MaskSet.from_bool({name: tensor.to(device) for name, tensor in given.items()})
    for name, tensor in dense.items():
        assert torch.equal(mask.bool(name), tensor)


@pytest.mark.parametrize(
    "value",
    [torch.ones(3), [True], torch.ones(3).bool().to_sparse(), torch.ones(3).bool().to("meta")],
    ids=["float", "list", "sparse", "meta"],
)
def test_from_bool_takes_dense_bool_tensors_only(value: object) -> None:
    with pytest.raises(MaskError, match="mask of w is .*, expected a (bool|dense) tensor"):
        MaskSet.from_bool({"w": value})  # type: ignore[dict-item]
    with pytest.raises(MaskError, match="a mask has the name 3, expected a parameter's name"):
        MaskSet.from_bool({3: torch.ones(3).bool()})  # type: ignore[dict-item]


def test_equality_and_digest_are_about_names_shapes_and_positions() -> None:
    a = MaskSet({"x": positions(0), "y": positions(1)}, {"x": (2,), "y": (2,)}, metadata={"step": "1"})
    same = MaskSet({"y": positions(1), "x": positions(0)}, {"x": (2,), "y": (2,)})
    others = [
        MaskSet({"x": positions(0), "y": positions(0)}, {"x": (2,), "y": (2,)}),
        MaskSet({"x": positions(0), "y": positions(1)}, {"x": (2,), "y": (2, 1)}),
        MaskSet({"x": positions(0), "z": positions(1)}, {"x": (2,), "z": (2,)}),
        MaskSet({"x": positions(0)}, {"x": (2,)}),
        MaskSet({"x": positions(1), "y": positions(0)}, {"x": (2,), "y": (2,)}),
    ]
    assert a == same
    assert a.digest == same.digest
    for other in others:
        assert a != other
        assert a.digest != other.digest
    assert len({mask.digest for mask in [a, *others]}) == 6
    assert a != {"x": [0]}


def test_jaccard() -> None:
    shapes = {"a": (31, 17), "b": (100,)}
    a, b = MaskSet.random(shapes, density=0.4, seed=1), MaskSet.random(shapes, density=0.2, seed=2)
    both = sum(int((a.bool(n) & b.bool(n)).sum()) for n in shapes)
    either = sum(int((a.bool(n) | b.bool(n)).sum()) for n in shapes)
    assert a.jaccard(b) == b.jaccard(a) == both / either
    x, other = mask_of(x=[1, 1, 0, 0], y=[1, 0]), mask_of(x=[0, 1, 1, 0], z=[1])
    assert x.jaccard(other) == 1 / 5  # of masks that list different parameters
    with pytest.raises(MaskError, match=r"x is \[4\] in one mask, \[2\] in the other"):
        x.jaccard(mask_of(x=[1, 1]))


def test_nothing_active_is_a_mask() -> None:
    mask = mask_of(a=[0, 0])
    assert (mask.nnz, mask.density, mask.jaccard(mask), mask.jaccard(mask_of(a=[0, 1]))) == (0, 0.0, 1.0, 0.0)
    nothing = MaskSet({}, {})
    assert (nothing.nnz, nothing.numel, nothing.density) == (0, 0, 0.0)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight


def test_resolve_gives_the_models_names_in_its_order() -> None:
    mask = MaskSet(
        {"norm.weight": positions(1), "head.weight": positions(3)}, {"norm.weight": (4,), "head.weight": (5, 4)}
    )
    with torch.device("meta"):
        without_storage = Tied()
    for model in (Tied(), without_storage):
        for given in (
            model,
            model.named_parameters(remove_duplicate=False),
            dict(model.named_parameters(remove_duplicate=False)),
        ):
            resolved = mask.resolve(given)
            assert resolved.names == ("embed.weight", "norm.weight")
            assert resolved["embed.weight"].tolist() == [3]
    # 20 tied once, 4 + 4 of the norm.
    assert mask.density_of(Tied()) == 2 / 28


def test_resolve_sees_ties_between_tensors_over_one_storage() -> None:
    mask = MaskSet({"head.weight": positions(3)}, {"head.weight": (5, 4)})
    assert mask.resolve(Tied().state_dict()).names == ("embed.weight",)


def test_resolve_accepts_a_mask_that_activates_no_parameter_over_shared_memory() -> None:
    """One that activates such a parameter is refused: tests/optim/test_shared_memory.py."""
    model = Tied()
    model.head.weight = nn.Parameter(model.embed.weight.detach())
    nothing = MaskSet({"head.weight": positions()}, {"head.weight": (5, 4)})
    assert nothing.resolve(model).nnz == 0


def test_resolve_requires_tied_names_to_agree() -> None:
    shapes = {"embed.weight": (5, 4), "head.weight": (5, 4)}
    same = MaskSet({"embed.weight": positions(3, 4), "head.weight": positions(3, 4)}, shapes)
    assert same.nnz == 4
    assert same.resolve(Tied()).nnz == 2
    differing = MaskSet({"embed.weight": positions(3), "head.weight": positions(4)}, shapes)
    with pytest.raises(MaskError, match=r"head.weight is tied to embed.weight in the model, but the mask differs"):
        differing.resolve(Tied())


def test_resolve_names_every_mismatch() -> None:
    shapes = {"norm.weight": (3,), "gone": (1,), "norm.bias": (4,), "embed.weight": (4, 5)}
    mask = MaskSet({name: positions() for name in shapes}, shapes)
    with pytest.raises(MaskError) as error:
        mask.resolve(Tied())
    text = str(error.value)
    assert "norm.weight is [3] in the mask, [4] in the model" in text
    assert "gone is not a parameter of the model" in text
    assert "embed.weight is [4, 5] in the mask, [5, 4] in the model" in text
    assert "norm.bias" not in text
    assert "\n" not in text

    many = {f"lost.{i}": (1,) for i in range(1000)}
    with pytest.raises(MaskError, match=r"lost.2 is not a parameter of the model; and 997 more$"):
        MaskSet({name: positions() for name in many}, many).resolve(Tied())


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
