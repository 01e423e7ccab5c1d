"""Shards: the part of each parameter that this process stores and updates, under FSDP2 (`fully_shard`) and without it.

FSDP2 replaces every parameter by a DTensor; each rank stores a part of its rows. For the forward and backward pass of
a module it gathers the whole weights into plain parameters, the *unsharded* ones, which stay the same objects in all
iterations. Autograd accumulates gradients into these. If a hook takes such a gradient, FSDP2 does not reduce it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

if TYPE_CHECKING:
    from torch.distributed import DeviceMesh


@dataclass(frozen=True, eq=False)
class Shard:
    """The part of a parameter that this process stores. Without FSDP2 it is the whole parameter."""

    param: Parameter  # as in the optimizer's groups and in `model.parameters()`
    unsharded: Parameter  # of the whole shape; autograd accumulates gradients into it, and the ops read its size only
    local: Tensor  # what this process stores and updates: rows of the parameter, or none
    first: int  # `local` has the elements from this one on of the flattened parameter
    chunk: int  # elements in each rank's shard; the last ones have fewer
    mesh: DeviceMesh | None  # None: every rank has the whole parameter

    @property
    def is_whole(self) -> bool:
        return self.mesh is None

    @property
    def number(self) -> int:
        """The number of the shard; ranks with the same number have the same elements."""
        return 0 if self.mesh is None else self.mesh.get_local_rank(self.mesh.ndim - 1)

    def is_current(self) -> bool:
        """Whether `local` is still the parameter's memory; moving or converting a model replaces it."""
        # The public to_local() creates a tensor, and this is called for every parameter in every step.
        return self.is_whole or self.param._local_tensor.data_ptr() == self.local.data_ptr()  # type: ignore[attr-defined]

    def local_positions(self, positions: Tensor) -> tuple[Tensor, int]:
        """Return the part of sorted `positions` in this shard, relative to it, and the slot of its first element.

        Args:
            positions: on the CPU, of active elements in the flattened parameter.
        """
        ends = torch.tensor([self.first, self.first + self.local.numel()], dtype=positions.dtype, device="cpu")
        begin, end = torch.searchsorted(positions, ends).tolist()
        return positions[begin:end] - self.first, begin


def shards_of(named: Mapping[str, Parameter], model: nn.Module | None) -> dict[Parameter, Shard]:
    """Return the shard of each parameter. With FSDP2 it gathers the weights of one module after the other.

    Raises:
        ValueError: a DTensor is not sharded by `fully_shard` on its first dimension alone, names the parameter; or
            parameters have several device meshes, or a weight is stored on another device than the one that uses it, or
            a parameter is not one of the sharded model, but gathered for a forward pass.
    """
    if model is None and any(map(is_dtensor, named.values())):
        raise ValueError("the parameters are DTensors: pass the model, as params or as model=")
    unsharded = dict(_unsharded(model))
    temporary = {id(p) for p in unsharded.values()}
    shards = {}
    for name, param in named.items():
        if id(param) in temporary:
            raise ValueError(f"{name!r} is an unsharded parameter; call reshard() of the model before you list them")
        if is_dtensor(param):
            shards[param] = _shard(name, param, unsharded.get(param))
        else:
            shards[param] = Shard(param, param, param, 0, max(param.numel(), 1), None)
    if len({shard.mesh for shard in shards.values() if not shard.is_whole}) > 1:
        raise ValueError("the parameters are sharded over several device meshes, expected one")
    return shards


def _shard(name: str, param: Parameter, unsharded: Parameter | None) -> Shard:
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor import Shard as ShardPlacement

    dtensor: Any = param
    mesh, placements = dtensor.device_mesh, dtensor.placements
    local = dtensor.detach().to_local()
    if local.is_meta:
        raise ValueError(f"{name!r} is on the meta device: initialize the weights before you build the optimizer")
    *outer, last = placements
    supported = all(type(p) is Replicate for p in outer) and type(last) is ShardPlacement and last.dim == 0
    if not supported or type(unsharded) is not Parameter:
        raise ValueError(
            f"{name!r} is a DTensor with placements {placements}, {'' if unsharded is not None else 'not '}managed by "
            "fully_shard; expected fully_shard alone, with Shard(0) on the last mesh dimension and Replicate() on the "
            "others. Tensor and expert parallelism and other placements are not supported"
        )
    if local.device != unsharded.device:
        raise ValueError(
            f"{name!r} is stored on {local.device} and used on {unsharded.device}; an offload policy is not supported"
        )
    row = param.numel() // param.shape[0]
    chunk = -(-param.shape[0] // mesh.size(mesh.ndim - 1)) * row  # fully_shard divides the rows as torch.chunk does
    first = min(mesh.get_local_rank(mesh.ndim - 1) * chunk, param.numel())
    if local.numel() != min(chunk, param.numel() - first):
        raise ValueError(f"{name!r} has {local.numel()} elements here, expected {min(chunk, param.numel() - first)}")
    return Shard(param, unsharded, local, first, chunk, mesh)


def _unsharded(model: nn.Module | None) -> Iterator[tuple[Parameter, Parameter]]:
    """Yield (DTensor, unsharded parameter) for each parameter that `fully_shard` manages."""
    for module in _fsdp_modules(model):
        module.reshard()
        sharded = dict(module.named_parameters(remove_duplicate=False))
        if any(p.is_meta for p in sharded.values()):
            continue
        module.unshard()
        for name, param in module.named_parameters(remove_duplicate=False):
            if param is not sharded[name]:
                yield sharded[name], param
        module.reshard()


def reshard(model: nn.Module | None) -> None:
    """Free all unsharded parameters, so that the next pass gathers the shards again, as they are now.

    The host waits for what it has launched: `fully_shard` gathers on streams of its own. They wait for the current one
    at the beginning of a forward pass only, so that a backward pass could gather shards before a swap has written them.
    """
    modules = list(_fsdp_modules(model))
    for module in modules:
        module.reshard()
        # reshard() leaves the root's parameters as they are while its forward pass runs, and one that raised an error
        # counts as running: they would keep the weights of that pass. torch before 2.13 has one group per module.
        state = module._get_fsdp_state()
        for group in getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]:
            if group is not None:
                group._to_sharded()
        # Until all modules of a unit have run, the next pass does not gather it; see `incomplete`.
        state._modules_to_run_forward.clear()
    for device in {p.device for module in modules[:1] for p in module.parameters() if p.is_cuda}:
        torch.cuda.current_stream(device).synchronize()


def incomplete(model: nn.Module | None) -> list[tuple[Any, set[nn.Module]]]:
    """Return the modules of which a pass has gathered the weights, but has not run all that are sharded with them, and
    those that have not run.

    An example is a head in a unit with the last norm, if a loss that is computed in chunks uses its weight directly.
    torch before 2.13 gathers such a unit in the forward pass alone: the backward pass needs what that has gathered.
    """
    states = {id(state): (module, state) for module in _fsdp_modules(model) if (state := module._get_fsdp_state())}
    return [
        (module, set(state._modules_to_run_forward))
        for module, state in states.values()
        if state._modules_to_run_forward
    ]


def gather(incomplete_passes: list[tuple[Any, set[nn.Module]]]) -> None:
    """Undo `reshard` for what `incomplete` returned before it."""
    for module, modules in incomplete_passes:
        module.unshard()
        module._get_fsdp_state()._modules_to_run_forward.update(modules)


def _fsdp_modules(model: nn.Module | None) -> Iterator[Any]:
    fsdp = sys.modules.get("torch.distributed.fsdp")  # a model whose module is not imported is not sharded
    if fsdp is not None and model is not None:
        yield from (module for module in model.modules() if isinstance(module, fsdp.FSDPModule))


def is_dtensor(tensor: Tensor) -> bool:
    """Whether the tensor is a DTensor, without importing the class."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)
