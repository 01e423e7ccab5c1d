"""Optimizer state of several ranks: torch.distributed.checkpoint, full state dicts, and states that do not fit."""

from __future__ import annotations

import copy
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
from sparse_opt.distributed import full_optimizer_state_dict, load_full_optimizer_state_dict, load_optimizer

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
    mask = first if several_masks else second
    optimizer = SparseAdamW(groups, mask, lr=0.05, model=model, process_group=False, **OPTIONS)
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
    for part in (model.hidden, model.left, model):
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
    elif isinstance(expected, (list, tuple)):  # torch makes lists of tuples
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
    states = {several: trained(several_masks=several)[1].state_dict() for several in (False, True)}
    for n, mesh in meshes.items():
        if rank < n:
            _, optimizer = sharded(mesh)
            for several, state in states.items():
                optimizer.load_state_dict(state)
                require_state(optimizer, state, rank == 0)
                saved = {"optimizer": optimizer.state_dict()}
                dcp.save(saved, checkpoint_id=f"{folder}/{several}{n}", process_group=mesh.get_group())
    dist.barrier()
    for mesh in meshes.values():
        for n in meshes if rank < mesh.size() else ():
            _, optimizer = sharded(mesh)
            load_optimizer(optimizer, f"{folder}/{True}{n}")
            require_state(optimizer, states[True], rank == 0)
            loaded = {"optimizer": optimizer.state_dict()}
            load_optimizer(optimizer, f"{folder}/{False}{n}")
            loaded = {"optimizer": optimizer.state_dict()}
            dcp.load(loaded, checkpoint_id=f"{folder}/{False}{n}", process_group=mesh.get_group())
            optimizer.load_state_dict(loaded["optimizer"])
            require_state(optimizer, states[False], rank == 0)
    dist.barrier()


def test_checkpoints_reshard_between_numbers_of_ranks(tmp_path: Path) -> None:
    launch(reshard, 4, str(tmp_path))
    model, expected = make(), trained(several_masks=True)[1].state_dict()
    for n in (1, 2, 3, 4):  # and to one device without process group
        optimizer = build(model)
        load_optimizer(optimizer, tmp_path / f"{True}{n}")
        require_equal(optimizer.state_dict(), expected)


def tools(rank: int, folder: str) -> None:
    mesh = DeviceMesh("cpu", [0, 1])
    state = trained()[1].state_dict()
    model, optimizer = sharded(mesh)
    optimizer.load_state_dict(state)
    sharded_state = get_optimizer_state_dict(model, optimizer)
    assert sharded_state["state"].keys() == {name for name, _ in model.named_parameters()} - {"left.weight"}

    model, other = sharded(mesh)
    set_optimizer_state_dict(model, other, sharded_state)
    require_state(other, state, rank == 0)

    model, other = sharded(mesh)
    whole = get_optimizer_state_dict(*trained())
    set_optimizer_state_dict(model, other, whole, options=StateDictOptions(full_state_dict=True))
    require_state(other, state, rank == 0)

    model, other = sharded(mesh)
    load_full_optimizer_state_dict(other, state if rank == 0 else {})
    require_state(other, state, rank == 0)

    background = dist.new_group()
    saved = {"optimizer": optimizer.state_dict()}
    saving = dcp.async_save(saved, checkpoint_id=f"{folder}/async", process_group=background)
    optimizer.load_state_dict(build(make(), process_group=False).state_dict())  # staged before
    saving.result()
    load_optimizer(optimizer, f"{folder}/async")
    require_state(optimizer, state, rank == 0)

    dcp.save({"optimizer": sharded_state}, checkpoint_id=f"{folder}/by_name")
    _, other = sharded(mesh)
    load_optimizer(other, f"{folder}/by_name")
    require_state(other, state, rank == 0)


def test_torchs_functions_and_async_saves(tmp_path: Path) -> None:
    launch(tools, 2, str(tmp_path))
