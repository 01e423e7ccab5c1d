"""Models sharded by FSDP2 (`fully_shard`): `--parallel fsdp`.

Each rank holds a part of every weight. A decoder layer's weights are gathered for its forward and backward pass; those
outside the layers (embedding, norm, output layer) for the whole pass. Log-probabilities are computed from parts of the
model, so that a pass is not one call of it: `in_forward` makes any function one pass.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor

from sparse_opt.errors import ConfigError
from sparse_opt.optim.ranks.sharding import reshard

from .models import causal_lm, decoder_layers

ResultT = TypeVar("ResultT")


def shard(model: Any, device: torch.device) -> None:
    """Shard a model over all ranks, in place: each decoder layer, then the rest. All ranks must call it.

    The model may be on the CPU: one layer at a time is moved to the device. Of a PEFT wrapper, the transformers model
    inside is sharded, whose layers include the adapters.

    Raises:
        ConfigError: the model has several decoder layers, and they are of more than one class.
    """
    root = causal_lm(model)
    layers, n_layers = decoder_layers(root), root.config.get_text_config().num_hidden_layers
    if len(layers) < n_layers and n_layers > 1:
        raise ConfigError(
            f"option 'parallel' is fsdp: the {n_layers} decoder layers of {type(root).__name__} are of more than one "
            "class, and would be gathered all at once; expected replicate"
        )
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for module in (*layers, root):
        fully_shard(module, mesh=mesh)
    root.in_forward = types.MethodType(_call, root)
    register_fsdp_forward_method(root, "in_forward")


def _call(model: nn.Module, function: Callable[[], ResultT]) -> ResultT:
    return function()


def is_sharded(model: Any) -> bool:
    """Whether the model was sharded by `shard`."""
    return "in_forward" in vars(causal_lm(model))


def unsharded_class(model: nn.Module) -> type[nn.Module]:
    """The model's class, before `fully_shard` replaced it by a subclass."""
    kind = type(model)
    return kind.__bases__[1] if kind.__bases__[0] is FSDPModule else kind


def in_forward(model: Any, function: Callable[[], ResultT]) -> ResultT:
    """Call a function that is one forward pass through a sharded model, in which all weights can be used.

    The weights outside the decoder layers are gathered before it, and those of a layer when the layer is called. The
    function calls `forward` of the transformers model instead of the model itself. All ranks must call this, also for
    the backward pass. Tensors that are returned, alone or in a tuple, must not be views.
    """
    result: ResultT = causal_lm(model).in_forward(function)
    return result


@contextmanager
def gathered(model: Any) -> Iterator[None]:
    """A context in which every rank has all weights, so that ranks may run different numbers of forward passes.

    Entering it is a collective. It is for passes without gradient.
    """
    root = causal_lm(model)
    units = [module for module in root.modules() if isinstance(module, FSDPModule)]
    try:
        for unit in units:
            unit.unshard()
            unit.set_reshard_after_forward(False, recurse=False)
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # engines may use other streams than this one, which waits for the gathers
        yield
    finally:
        for unit in units:
            unit.set_reshard_after_forward(unit is not root, recurse=False)
        reshard(root)


def shard_of(whole: Tensor, like: DTensor) -> DTensor:
    """This rank's part of a tensor that every rank has, sharded as `like` is."""
    mesh, placements = like.device_mesh, like.placements
    return distribute_tensor(whole.detach(), mesh, placements, src_data_rank=None)
