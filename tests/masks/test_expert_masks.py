"""Masks of whole experts, and what masks know about experts and routers."""

import json

import pytest
import torch
from moe_models import FAMILIES, moe_model
from torch import nn

from sparse_opt import MaskSet
from sparse_opt.errors import MaskError
from sparse_opt.masks import MaskStats, union
from sparse_opt.masks.parameters import router_names, select_names


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest) -> nn.Module:
    made: nn.Module = moe_model(request.param)
    return made


def test_an_expert_is_all_of_its_weights_and_no_others(model: nn.Module) -> None:
    mask = MaskSet.experts(model, {1: [4, 0]})
    experts = {name: p for name, p in model.named_parameters() if ".experts." in name}
    assert set(mask.names) == set(experts)
    for name, parameter in experts.items():
        expected = torch.zeros(parameter.shape, dtype=torch.bool)
        if ".layers.1." in name:
            expected[[0, 4]] = True
        assert torch.equal(mask.bool(name), expected)
    assert MaskSet(mask.indices, mask.shapes, pattern=mask.pattern) == mask
    # The biases of GPT-OSS, rows of a matrix, are no tiles.
    has_biases = any(p.dim() == 2 for p in experts.values())
    assert mask.pattern == ("run32" if has_biases else "tile128")
    size = sum(p[0].numel() for name, p in experts.items() if ".layers.1." in name)
    assert {expert for expert, stats in mask.per_expert().items() if stats == MaskStats(size, size)} == {(1, 0), (1, 4)}
    assert sum(stats.nnz for stats in mask.per_expert().values()) == mask.nnz == 2 * size


def test_experts_as_esft_writes_them(model: nn.Module) -> None:
    assert MaskSet.experts(model, json.loads('{"1": [0, 4]}')) == MaskSet.experts(model, {1: [0, 4]})
    mask = MaskSet.experts(model, {1: [2]}, routers=True)
    routers = {name for name in router_names(mask.names) if mask[name].numel()}
    assert routers and all(".layers.1." in name and mask.per_tensor()[name].density == 1.0 for name in routers)


def test_what_a_model_does_not_have() -> None:
    model = moe_model("deepseek")
    with pytest.raises(MaskError, match=r"layer 0 has no experts; the layers with experts are 1"):
        MaskSet.experts(model, {0: [1]})
    with pytest.raises(MaskError, match=r"layer 1 has no expert 6, expected 0 to 5"):
        MaskSet.experts(model, {1: [0, 6]})
    with pytest.raises(MaskError, match=r"by the number of their layer"):
        MaskSet.experts(model, {"model.layers.1": [0]})
    with pytest.raises(MaskError, match="no parameter of experts"):
        MaskSet.experts(nn.Linear(4, 4), {0: [0]})
    towers = {f"{tower}.layers.0.mlp.experts.down_proj": (2, 4, 4) for tower in ("talker", "thinker")}
    with pytest.raises(MaskError, match="layer 0 is ambiguous: talker.layers.0.mlp.experts and thinker"):
        MaskSet.experts(towers, {0: [1]})


def test_experts_of_a_checkpoint_have_a_parameter_each() -> None:
    shapes = {f"layers.3.mlp.experts.{e}.down_proj.weight": (4, 6) for e in range(3)}
    mask = MaskSet.experts(shapes, {3: [1]})
    assert {name for name in mask.names if mask[name].numel()} == {"layers.3.mlp.experts.1.down_proj.weight"}
    assert mask.per_expert() == {(3, 0): MaskStats(0, 24), (3, 1): MaskStats(24, 24), (3, 2): MaskStats(0, 24)}


@pytest.mark.parametrize("pattern", ["element", "run32", "tile64"])
def test_random_masks_leave_routers_out(model: nn.Module, pattern: str) -> None:
    names = [name for name, _ in model.named_parameters()]
    routers = {name for name in names if "mlp.gate." in name or ".router." in name}
    mask = MaskSet.random(model, density=0.5, pattern=pattern, seed=1)
    assert set(mask.names) == set(names) - routers
    assert set(MaskSet.random(model, density=0.5, pattern=pattern, routers=True).names) == set(names)
    # No tile crosses from one expert to the next: each is whole tiles of its own.
    for name in (name for name in mask.names if mask.bool(name).dim() == 3):
        for expert in mask.bool(name):
            positions = expert.reshape(-1).nonzero().view(-1)
            MaskSet({"expert": positions}, {"expert": tuple(expert.shape)}, pattern=pattern)


def test_experts_are_feed_forward_blocks(model: nn.Module) -> None:
    names = [name for name, _ in model.named_parameters()]
    assert select_names(names, mlp_only=True) == [name for name in names if ".mlp." in name]


def test_a_gate_without_experts_is_no_router() -> None:
    shapes = {"layers.0.mlp.gate.weight": (4, 4), "layers.0.mlp.up.weight": (4, 4)}
    assert set(MaskSet.random(shapes, density=1.0).names) == set(shapes)


def test_experts_and_a_random_mask_of_the_rest(model: nn.Module) -> None:
    attention = {name: p for name, p in model.named_parameters() if "self_attn" in name}
    mask = union([MaskSet.experts(model, {1: [1]}), MaskSet.random(attention, density=0.1)])
    assert mask.resolve(model).nnz == MaskSet.experts(model, {1: [1]}).nnz + sum(
        mask[name].numel() for name in attention
    )
