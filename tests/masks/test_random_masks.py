"""MaskSet.random: exact counts, one stream per seed and name, and every choice as likely as any other."""

import math
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

from sparse_opt import MaskSet, RandomMask, SparseAdamW
from sparse_opt.errors import MaskError
from sparse_opt.masks.patterns import PATTERNS, unit_grid
from sparse_opt.optim import OPTIMIZERS


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("density", [0.0, 0.001, 0.025, 0.5, 0.9, 1.0])
def test_counts_are_exact(density: float, pattern: str) -> None:
    shapes = {"a": (257, 130), "b": (77,), "c": (), "d": (0, 5)}
    counts = {name: math.floor(density * math.prod(unit_grid(shape, pattern)) + 0.5) for name, shape in shapes.items()}
    if density and not any(counts.values()):
        with pytest.raises(MaskError, match="the random mask is empty"):
            MaskSet.random(shapes, density=density, pattern=pattern, seed=5)
        return
    mask = MaskSet.random(shapes, density=density, pattern=pattern, seed=5)
    for name, shape in shapes.items():
        height, width = PATTERNS[pattern]
        dense = mask.bool(name).reshape(math.prod(shape[:-1]), shape[-1] if shape else 1)
        corners = dense[::height, ::width]
        assert int(corners.sum()) == counts[name]
        # The pattern is claimed; that no unit is taken in part makes the corners count the units.
        MaskSet({name: mask[name]}, {name: shape}, pattern=pattern)


def test_seed_and_name_decide_and_nothing_else() -> None:
    a = MaskSet.random({"x": (40, 40), "y": (40, 40)}, density=0.1, seed=1)
    b = MaskSet.random({"y": (40, 40), "z": (3,), "x": (40, 40)}, density=0.1, seed=1)
    assert torch.equal(a["x"], b["x"])
    assert torch.equal(a["y"], b["y"])
    assert not torch.equal(a["x"], a["y"])
    assert not torch.equal(a["x"], MaskSet.random({"x": (40, 40)}, density=0.1, seed=2)["x"])


def test_the_stream_never_changes() -> None:
    """Positions written down once: a mask named by its seed in a paper must not change with a version."""
    assert MaskSet.random({"w": (10, 10)}, density=0.08, seed=0)["w"].tolist() == [24, 36, 50, 53, 70, 85, 90, 96]
    assert MaskSet.random({"w": (9,)}, density=0.75, seed=0)["w"].tolist() == [0, 1, 2, 3, 4, 6, 8]
    runs = MaskSet.random({"w": (64, 64)}, density=0.5, seed=-7, pattern="run32")
    assert runs.digest == "18c4ff7f6ad89eee28722bae980e4316"


def test_no_pair_of_positions_is_preferred() -> None:
    draws, n = 4000, 6
    pairs = Counter(tuple(MaskSet.random({"w": (n,)}, density=2 / n, seed=seed)["w"].tolist()) for seed in range(draws))
    p = 1 / math.comb(n, 2)
    assert len(pairs) == math.comb(n, 2)
    for count in pairs.values():
        # Binomial; 5 standard deviations leave one false alarm in about 10^5 runs, and the seeds are fixed.
        assert abs(count - draws * p) < 5 * math.sqrt(draws * p * (1 - p))


def test_a_modules_parameters() -> None:
    model = nn.Sequential(nn.Embedding(10, 8), nn.Linear(8, 10, bias=False), nn.BatchNorm1d(10))
    model[1].weight = model[0].weight
    model[2].register_parameter("count", nn.Parameter(torch.zeros(2, dtype=torch.int64), requires_grad=False))
    mask = MaskSet.random(model, density=0.5, seed=9)
    assert mask.names == ("0.weight", "2.weight", "2.bias")
    assert mask.metadata == {"method": "random", "sparsity": "50", "seed": "9"}
    shapes = {name: mask.shapes[name] for name in mask.names}
    assert mask == MaskSet.random(shapes, density=0.5, seed=9)
    assert mask == MaskSet.random({n: torch.zeros(s) for n, s in shapes.items()}, density=0.5, seed=9)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"density": -0.1}, "mask density is -0.1"),
        ({"density": float("nan")}, "mask density is nan"),
        ({"density": 0.5, "pattern": "tile32"}, "mask pattern is 'tile32'"),
        ({"density": 0.5, "pool": "layer"}, "pool is 'layer', expected tensor or global"),
    ],
)
def test_arguments_out_of_range(options: dict[str, Any], message: str) -> None:
    with pytest.raises(MaskError, match=message):
        MaskSet.random({"w": (3,)}, **options)


def test_a_mask_that_would_be_empty_is_refused_with_the_remedy() -> None:
    model = nn.Sequential(nn.Linear(192, 192), nn.Linear(192, 192))
    with pytest.raises(MaskError, match="density 0.01 is less than one unit of tile64 in each tensor; use pool='glo"):
        SparseAdamW(model, RandomMask(0.01, "tile64"))
    with pytest.raises(MaskError, match="in all tensors together; use a larger density or a smaller pattern"):
        MaskSet.random(model, density=1e-6, pool="global")


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_an_optimizer_draws_the_mask(optimizer: Any) -> None:
    model = nn.Sequential(nn.Linear(192, 192), nn.Linear(192, 192))
    spec = RandomMask(0.1, "tile64", seed=3, pool="global")
    expected = MaskSet.random(model, density=0.1, pattern="tile64", seed=3, pool="global")
    for params in (model, model.named_parameters(), [{"params": list(model.named_parameters())}]):
        opt = optimizer(params, spec)
        assert opt.mask == expected and opt.mask.pattern == "tile64"
        opt.close()
    assert optimizer(model, 0.1).mask == MaskSet.random(model, density=0.1)
    with pytest.raises(TypeError, match="mask is a str, expected a MaskSet, a RandomMask or a density"):
        optimizer(model, "mask.safetensors")


# The layers of SmolLM2-135M: 0.1 % of most of its matrices is less than half a tile of 64 x 64.
SMALL_MATRICES = {
    "embed": (1024, 576),
    **{f"{i}.k": (192, 576) for i in range(12)},
    **{f"{i}.up": (1536, 576) for i in range(4)},
    **{f"{i}.norm": (576,) for i in range(9)},
}


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("density", [0.0, 0.005, 0.025, 0.5, 0.9, 1.0])
def test_global_counts_are_exact_to_a_unit(density: float, pattern: str) -> None:
    shapes = {"a": (257, 130), "b": (77,), "c": (), "d": (0, 5), **SMALL_MATRICES}
    mask = MaskSet.random(shapes, density=density, pattern=pattern, seed=5, pool="global")
    assert mask.names == tuple(shapes) and mask.metadata["pool"] == "global"
    missing = math.floor(density * mask.numel + 0.5) - mask.nnz
    assert 0 <= missing < math.prod(PATTERNS[pattern])
    MaskSet(mask.indices, shapes, pattern=pattern)


def test_a_global_mask_does_not_depend_on_the_order_of_tensors() -> None:
    first = MaskSet.random(SMALL_MATRICES, density=0.01, pattern="run16", seed=1, pool="global")
    second = MaskSet.random(
        dict(reversed(SMALL_MATRICES.items())), density=0.01, pattern="run16", seed=1, pool="global"
    )
    assert first == second
    assert first != MaskSet.random(SMALL_MATRICES, density=0.01, pattern="run16", seed=2, pool="global")


@pytest.mark.parametrize("density", [0.1, 0.7])
def test_no_unit_of_any_tensor_is_preferred_globally(density: float) -> None:
    """A unit of each tensor is active as often as one of any other; all units are of one size."""
    shapes, draws = {"a": (4,), "b": (3, 2), "c": (10,)}, 1000
    counts = Counter(
        (name, i)
        for seed in range(draws)
        for name, of in MaskSet.random(shapes, density=density, seed=seed, pool="global").indices.items()
        for i in of.tolist()
    )
    # Each count is binomial; 5 standard deviations, as above.
    for name, shape in shapes.items():
        for i in range(math.prod(shape)):
            assert abs(counts[name, i] - draws * density) < 5 * math.sqrt(draws * density * (1 - density))


def test_the_global_stream_never_changes() -> None:
    mask = MaskSet.random({"v": (6,), "w": (4, 4)}, density=0.25, seed=0, pool="global")
    assert {name: of.tolist() for name, of in mask.indices.items()} == {"v": [4], "w": [0, 2, 4, 8, 14]}
