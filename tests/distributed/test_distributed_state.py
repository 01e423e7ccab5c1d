"""State of optimizers on several ranks: torch.distributed.checkpoint, full state dicts, and loads that change nothing."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from launch import launch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from sparse_opt import MaskSet, SparseAdamW
from sparse_opt.distributed import full_optimizer_state_dict, load_optimizer

OPTIONS: dict[str, Any] = {"master_weights": True, "state_dtype": torch.bfloat16}


class Small(nn.Module):
    """Rows that do not split evenly (7, 5, 3, 1), in two dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 6)
        self.hidden = nn.Linear(6, 5, dtype=torch.bfloat16)
        self.left = nn.Linear(5, 3, bias=False, dtype=torch.bfloat16)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return (self.scale * self.left(self.hidden(self.embedding(x).bfloat16())).float()).square().mean()


def make(seed: int = 0) -> Small:
    torch.manual_seed(seed)
    return Small()


def masks(model: nn.Module) -> tuple[MaskSet, MaskSet]:
    """Two masks of which the second has no element of `left`."""
    first, second = (MaskSet.random(model, density=0.4, seed=seed).indices for seed in (1, 2))
    scale = {"scale": torch.zeros(1, dtype=torch.int32)}
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    second = {name: positions for name, positions in second.items() if name != "left.weight"}
    return tuple(MaskSet({**m, **scale}, {n: shapes[n] for n in {**m, **scale}}) for m in (first, second))


def trained(several_masks: bool = False) -> tuple[Small, SparseAdamW]:
    """A model and its optimizer on one device, after some steps, and with `several_masks` a change of the mask."""
    model = make()
    first, second = masks(model)
    groups = [
        {"params": [(n, p) for n, p in model.named_parameters() if "hidden" in n], "lr": 0.02},
        {"params": [(n, p) for n, p in model.named_parameters() if "hidden" not in n], "weight_decay": 0.1},
    ]
    optimizer = SparseAdamW(groups, first if several_masks else second, lr=0.05, model=model, process_group=False, **OPTIONS)
    for step in range(4):
        if step == 2 and several_masks:
            optimizer.set_mask(second)
        model(torch.arange(7)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def build(model: Small, mask: MaskSet | None = None, **options: Any) -> SparseAdamW:
    """An optimizer with the same groups, but other values of their options."""
    groups = [
        {"params": [(n, p) for n, p in model.named_parameters() if "hidden" in n]},
        {"params": [(n, p) for n, p in model.named_parameters() if "hidden" not in n]},
    ]
    return SparseAdamW(groups, masks(make())[1] if mask is None else mask, lr=1.0, model=model, **OPTIONS, **options)


def sharded(mesh: DeviceMesh, mask: MaskSet | None = None) -> tuple[Small, SparseAdamW]:
    model = make()
    for part in (model.hidden, model):
        fully_shard(part, mesh=mesh)
    return model, build(model, mask)


def require_equal(found: Any, expected: Any, where: str = "") -> None:
    """Compare state dicts, tensors bit for bit."""
    if isinstance(expected, Tensor):
        assert not isinstance(found, DTensor), where
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape), where
        assert torch.equal(found.reshape(-1).view(torch.uint8), expected.reshape(-1).view(torch.uint8)), where
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys(), where
        for key, value in expected.items():
            require_equal(found[key], value, f"{where}.{key}")
    elif isinstance(expected, list):
        assert len(found) == len(expected), where
        for i, value in enumerate(expected):
            require_equal(found[i], value, f"{where}[{i}]")
    else:
        assert found == expected, where


def require_state(optimizer: SparseAdamW, expected: dict[str, Any], writes: bool) -> None:
    require_equal(full_optimizer_state_dict(optimizer), expected if writes else {})
    require_equal(full_optimizer_state_dict(optimizer, cpu_offload=False), expected)


def reshard(rank: int, folder: str) -> None:
    meshes = {n: DeviceMesh("cpu", list(range(n))) for n in (1, 2, 3, 4)}
    states = [trained(several_masks=several)[1].state_dict() for several in (False, True)]
    for n, mesh in meshes.items():
        if rank < n:
            group = mesh.get_group()
            _, optimizer = sharded(mesh)
            for state, name in zip(states, ("one", "several"), strict=True):
                optimizer.load_state_dict(state)
                require_state(optimizer, state, rank == 0)
                dcp.save({"optimizer": optimizer.state_dict()}, checkpoint_id=f"{folder}/{name}{n}", process_group=group)
        dist.barrier()
    for n in meshes:
        for m, mesh in meshes.items():
            if rank < m:
                _, optimizer = sharded(mesh)
                load_optimizer(optimizer, f"{folder}/several{n}", process_group=mesh.get_group())
                require_state(optimizer, states[1], rank == 0)
                loaded = {"optimizer": optimizer.state_dict()}
    dist.barrier()


def test_checkpoints_reshard_between_numbers_of_ranks(tmp_path: Path) -> None:
    launch(reshard, 4, str(tmp_path))
