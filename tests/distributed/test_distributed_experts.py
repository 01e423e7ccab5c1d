"""Mixtures of experts on two ranks: sharded by `fully_shard`, three experts and two (three of
DeepSeek-V3's six), and replicated."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from launch import BACKENDS, device, launch, preload
from moe_models import FAMILIES, moe_model, tokens_of
from torch import Tensor
from torch.distributed.fsdp import fully_shard

from sparse_opt import MaskSet, SparseAdamW
from sparse_opt.distributed import full_optimizer_state_dict

preload(*(f"transformers.models.{name}.modeling_{name}" for name in ("qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3")))
pytestmark = pytest.mark.dist

STEPS = 3
# With eps as large as gradients, a weight moves by lr g / eps at most, so that the roundings of sums in another order,
# of less than 2**-20 of gradients below 1, move it by less than this.
LR, EPS = 1e-2, 1e-2
TOLERANCE = STEPS * LR / EPS * 2**-20


def mask_of(model: Any, kind: str) -> MaskSet:
    if kind == "experts":
        has_first = any(".layers.0.mlp.experts." in name for name, _ in model.named_parameters())  # not DeepSeek-V3
        return MaskSet.experts(model, {**({0: [2]} if has_first else {}), 1: [0, 4]})
    return MaskSet.random(model, density=0.4, pattern=kind, seed=1)


def backward(model: Any, tokens: Tensor, scale: float = 1.0) -> None:
    tokens = tokens.to(device())
    (model(input_ids=tokens, labels=tokens).loss * scale).backward()


def train(rank: int, family: str, kind: str, sharded: bool) -> None:
    model, alone = moe_model(family).to(device()), moe_model(family).to(device())
    start = {name: p.detach().clone() for name, p in alone.named_parameters()}
    mask = mask_of(alone, kind)
    if sharded:
        for module in (*model.model.layers, model):
            fully_shard(module)
        experts = model.get_parameter("model.layers.1.mlp.experts.down_proj")
        assert experts.to_local().shape[0] == ((3, 3) if family == "deepseek" else (3, 2))[rank]
    optimizer = SparseAdamW(model, mask, lr=LR, eps=EPS, **({} if sharded else {"process_group": dist.group.WORLD}))
    single = SparseAdamW(alone, mask, lr=LR, eps=EPS, process_group=False)

    def whole(name: str) -> Tensor:
        parameter: Any = model.get_parameter(name)
        return (parameter.full_tensor() if sharded else parameter).detach()

    for step in range(STEPS):
        backward(model, tokens_of(2 * step + rank))
        for r in range(2):
            backward(alone, tokens_of(2 * step + r), 0.5)
        for each in optimizer, single:
            each.step()
            each.zero_grad()
    for name, parameter in alone.named_parameters():
        torch.testing.assert_close(whole(name), parameter.detach(), rtol=0, atol=TOLERANCE)
        active = mask.bool(name) if name in mask else torch.zeros(parameter.shape, dtype=torch.bool)
        assert ((whole(name) != start[name]).cpu() <= active).all()
    state, expected = full_optimizer_state_dict(optimizer, cpu_offload=False)["state"], single.state_dict()["state"]
    assert {number: entry["exp_avg"].shape for number, entry in state.items()} == {
        number: entry["exp_avg"].shape for number, entry in expected.items()
    }
    with optimizer.base_weights():
        for name in start:
            assert torch.equal(whole(name), start[name])


@BACKENDS
@pytest.mark.parametrize("kind", ["tile64", "experts"])
@pytest.mark.parametrize("family", FAMILIES)
def test_uneven_experts_under_fsdp2(family: str, kind: str, backend: str) -> None:
    launch(train, 2, family, kind, True, backend=backend)


@BACKENDS
@pytest.mark.parametrize("kind", ["tile64", "experts"])
@pytest.mark.parametrize("family", FAMILIES)
def test_replicated_experts(family: str, kind: str, backend: str) -> None:
    """The ranks route their tokens to different experts."""
    launch(train, 2, family, kind, False, backend=backend)
