"""Optimizer state of several ranks: torch.distributed.checkpoint, full state dicts, and states that do not fit."""

import copy
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from launch import BACKENDS, device, launch, ranks
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from sparse_opt import MaskSet, SparseAdamW
from sparse_opt.distributed import full_optimizer_state_dict, load_optimizer

pytestmark = pytest.mark.dist

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
    """Two masks; the second has no element of `left`."""
    first, second = (MaskSet.random(model, density=0.4, seed=seed).indices for seed in (1, 2))
    scale = {"scale": torch.zeros(1, dtype=torch.int32)}
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    second = {name: positions for name, positions in second.items() if name != "left.weight"}
    return tuple(MaskSet({**m, **scale}, {n: shapes[n] for n in {**m, **scale}}) for m in (first, second))


def groups_of(model: Small, of_hidden: dict[str, Any], of_others: dict[str, Any]) -> list[dict[str, Any]]:
    hidden, others = ([(n, p) for n, p in model.named_parameters() if ("hidden" in n) == of] for of in (True, False))
    return [{"params": hidden, **of_hidden}, {"params": others, **of_others}]


def trained(several_masks: bool = False) -> tuple[Small, SparseAdamW]:
    """A model and its optimizer on one device, after some steps, and with `several_masks` a change of the mask."""
    model = make()
    first, second = masks(model)
    groups = groups_of(model, {"lr": 0.02}, {"weight_decay": 0.1})
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
    mask = masks(make())[1] if mask is None else mask
    return SparseAdamW(groups_of(model, {}, {}), mask, lr=1.0, model=model, **OPTIONS, **options)


def mesh_of(ranks: list[int]) -> DeviceMesh:
    return DeviceMesh(device().type, ranks)


def sharded(mesh: DeviceMesh, mask: MaskSet | None = None) -> tuple[Small, SparseAdamW]:
    model = make().to(device())
    for part in (model.hidden, model.left, model):
        fully_shard(part, mesh=mesh)
    return model, build(model, mask)


def require_equal(found: Any, expected: Any, where: str = "") -> None:
    """Compare state dicts, tensors bit for bit."""
    if isinstance(expected, Tensor):
        assert not isinstance(found, DTensor), where
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape), where
        found, expected = (tensor.cpu().reshape(-1).view(torch.uint8) for tensor in (found, expected))
        assert torch.equal(found, expected), where
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
    meshes = {n: mesh_of(list(range(n))) for n in range(1, dist.get_world_size() + 1)}
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
    if dist.get_world_size() == 4:  # shards on two ranks, each of which another rank has too
        _, optimizer = sharded(init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
        load_optimizer(optimizer, f"{folder}/{True}3")
        require_state(optimizer, states[True], rank == 0)
        dcp.save({"optimizer": optimizer.state_dict()}, checkpoint_id=f"{folder}/{True}3")
    for mesh in meshes.values():
        more = mesh.size() % len(meshes) + 1
        for n in {more, len(meshes) + 1 - mesh.size()} if rank < mesh.size() else ():
            _, optimizer = sharded(mesh)
            if n == more:  # of each number of ranks by torch's own function on another
                loaded = {"optimizer": optimizer.state_dict()}
                dcp.load(loaded, checkpoint_id=f"{folder}/{False}{n}", process_group=mesh.get_group())
                optimizer.load_state_dict(loaded["optimizer"])
                require_state(optimizer, states[False], rank == 0)
            load_optimizer(optimizer, f"{folder}/{True}{n}")
            require_state(optimizer, states[True], rank == 0)
    dist.barrier()


@BACKENDS
def test_checkpoints_reshard_between_numbers_of_ranks(tmp_path: Path, backend: str) -> None:
    n_ranks = 4 if backend == "gloo" else 2
    launch(reshard, n_ranks, str(tmp_path), backend=backend, timeout=300)
    model, expected = make(), trained(several_masks=True)[1].state_dict()
    for n in range(1, n_ranks + 1):  # and to one device without process group
        optimizer = build(model)
        load_optimizer(optimizer, tmp_path / f"{True}{n}")
        require_equal(optimizer.state_dict(), expected)


@ranks(2)
def test_torchs_functions_and_async_saves(rank: int, tmp_path: Path) -> None:
    mesh = mesh_of([0, 1])
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

    background = dist.new_group(backend="gloo")
    saved = {"optimizer": optimizer.state_dict()}
    saving = dcp.async_save(saved, checkpoint_id=f"{tmp_path}/async", process_group=background)
    optimizer.load_state_dict(build(make(), process_group=False).state_dict())  # staged before
    saving.result()
    load_optimizer(optimizer, f"{tmp_path}/async")
    require_state(optimizer, state, rank == 0)

    state = trained(several_masks=True)[1].state_dict()
    model, optimizer = sharded(mesh)
    optimizer.load_state_dict(state)
    by_name = get_optimizer_state_dict(model, optimizer)
    dcp.save({"optimizer": by_name}, checkpoint_id=f"{tmp_path}/by_name")
    for load in (SparseAdamW.load_state_dict, lambda other, _: load_optimizer(other, f"{tmp_path}/by_name")):
        _, other = sharded(mesh)
        load(other, by_name)
        require_state(other, state, rank == 0)


def same_size(mask: MaskSet, name: str) -> MaskSet:
    """Another mask with as many elements, which differs in the last element of one parameter alone."""
    numel = torch.Size(mask.shapes[name]).numel()
    positions = mask.indices[name].clone()
    free = sorted(set(range(numel)) - set(positions.tolist()))
    positions[-1] = free[-1]
    return MaskSet({**mask.indices, name: positions.sort().values}, mask.shapes)


@ranks(2)
def test_what_does_not_fit_changes_nothing(rank: int, tmp_path: Path) -> None:
    """Loads under another mask, from an interrupted save, and of a damaged state: nothing changes on any rank."""
    mesh = mesh_of([0, 1])
    state = trained()[1].state_dict()
    model, optimizer = sharded(mesh)
    optimizer.load_state_dict(state)
    dcp.save({"optimizer": optimizer.state_dict()}, checkpoint_id=f"{tmp_path}/saved")

    mask = same_size(masks(make())[1], "embedding.weight")
    _, other = sharded(mesh, mask)
    before = full_optimizer_state_dict(other, cpu_offload=False)
    loaded = {"optimizer": other.state_dict()}
    dcp.load(loaded, checkpoint_id=f"{tmp_path}/saved")
    loads = [
        lambda: other.load_state_dict(loaded["optimizer"]),
        lambda: other.load_state_dict(state),
        lambda: load_optimizer(other, f"{tmp_path}/saved"),
    ]
    for load in loads:  # only rank 1 has the elements that differ
        with pytest.raises(
            ValueError, match=r"'embedding.weight' was saved under another mask" if rank else "rank 1: "
        ):
            load()
        require_state(other, before, rank == 0)

    with pytest.raises(ValueError, match="no optimizer state under the key 'optim'"):
        load_optimizer(optimizer, f"{tmp_path}/saved", "optim")
    with pytest.raises((NotImplementedError, IndexError)):  # torch cannot gather the parts
        get_optimizer_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))

    broken = copy.deepcopy(state)
    broken["param_groups"][0]["lr"] = -1.0
    with pytest.raises(ValueError, match="lr is -1.0"):
        optimizer.load_state_dict(broken)
    require_state(optimizer, state, rank == 0)

    optimizer.load_state_dict(build(make(), process_group=False).state_dict())
    with mock.patch.object(dcp.FileSystemWriter, "finish", side_effect=KeyboardInterrupt):  # writes the metadata
        with pytest.raises((KeyboardInterrupt, dcp.CheckpointException)):
            dcp.save({"optimizer": optimizer.state_dict()}, checkpoint_id=f"{tmp_path}/torn")
    with pytest.raises(dcp.CheckpointException, match="metadata"):
        dcp.load({"optimizer": optimizer.state_dict()}, checkpoint_id=f"{tmp_path}/torn")
    load_optimizer(optimizer, f"{tmp_path}/saved")
    require_state(optimizer, state, rank == 0)


@ranks(2)
def test_replicated_optimizers_save_the_state_of_one_device(rank: int, tmp_path: Path) -> None:
    state = trained(several_masks=True)[1].state_dict()
    optimizer = build(make().to(device()), process_group=dist.group.WORLD)
    optimizer.load_state_dict(state)
    optimizer.check_ranks()
    require_state(optimizer, state, rank == 0)
    if rank == 0:
        torch.save(optimizer.state_dict(), f"{tmp_path}/state.pt")
    dcp.save({"optimizer": optimizer.state_dict()}, checkpoint_id=f"{tmp_path}/saved")
    for load in (
        lambda other: other.load_state_dict(torch.load(f"{tmp_path}/state.pt", weights_only=True)),
        lambda other: load_optimizer(other, f"{tmp_path}/saved"),
    ):
        other = build(make().to(device()), process_group=dist.group.WORLD)
        load(other)
        other.check_ranks()
        require_state(other, state, rank == 0)

    other = build(make().to(device()), same_size(masks(make())[1], "embedding.weight"), process_group=dist.group.WORLD)
    before = copy.deepcopy(other.state_dict())
    with pytest.raises(ValueError, match=r"'embedding.weight' was saved under another mask"):
        load_optimizer(other, f"{tmp_path}/saved")
    require_equal(other.state_dict(), before)

    mesh = mesh_of([0, 1])
    _, other = sharded(mesh)
    load_optimizer(other, f"{tmp_path}/saved")
    require_state(other, state, rank == 0)


@ranks(3, nccl=False, collective_timeout=20.0)
def test_full_states_without_rank_0_and_malformed_ones(rank: int) -> None:
    """Ranks 1 and 2 have the model; the first of them saves and loads the state of one device."""
    mesh = mesh_of([1, 2])
    if rank == 0:
        return
    state = trained()[1].state_dict()
    _, optimizer = sharded(mesh)
    optimizer.load_state_dict(state)
    require_state(optimizer, state, rank == 1)
