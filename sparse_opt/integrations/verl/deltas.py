"""The active values that have changed, in the form that verl's checkpoint engine `delta_sharded` sends."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn
from verl.utils.model import convert_weight_keys
from verl.workers.engine.spec import ShardSpec, derive_dtensor_placement

from ...errors import WeightSyncError
from ...masks import MaskSet
from ...optim import SparseOptimizer
from ...optim.ranks import sharding
from ...tensors import holds_base_weights
from ...weight_sync.active_values import WeightsOf, named_weights

# verl sends whole weights in this dtype, and compares them in it.
SENT = torch.bfloat16

Entry = tuple[list[tuple[str, tuple[int, ...]]], str, Tensor, Tensor, Tensor, Any]


class ChangedValues:
    """Compares the active values of this rank's shards with those that the rollout has.

    verl's own engines compare all weights with a copy in pinned memory. Only active elements can change, so this reads
    and keeps nnz / ranks values.

    Args:
        optimizer: of the sharded model.
        model: its names are those of the rollout, where verl does not convert them.

    Raises:
        ValueError: a weight has 2^31 elements or more, which verl's int32 positions cannot address.
    """

    def __init__(self, optimizer: SparseOptimizer, model: nn.Module) -> None:
        mask = optimizer.mask
        named = cast(dict[str, nn.Parameter], named_weights(optimizer))
        self._params = {name: named[name] for name in mask.names if mask[name].numel()}
        names = {param: name for name, param in self._params.items()}
        if large := [name for name, param in self._params.items() if param.numel() >= 2**31]:
            raise ValueError(f"{large[0]!r} has {self._params[large[0]].numel()} elements, verl sends fewer than 2^31")
        self._sent_names = sent_names(model)
        self._groups = {}
        local: dict[str, Tensor] = {}
        indices: dict[str, Tensor] = {}
        self._positions: dict[str, Tensor] = {}
        # Of a parameter of which this rank sends nothing. verl takes the device of its collectives from the entries, so
        # that these are on the device of the shards, too.
        self._nothing: dict[str, tuple[Tensor, Tensor]] = {}
        for param, shard in sharding.shards_of(self._params, model).items():
            name = names[param]
            _, contributes, self._groups[name] = derive_dtensor_placement(ShardSpec.from_param(param))
            positions, _ = shard.local_positions(mask[name])
            if contributes and positions.numel():
                local[name], indices[name] = shard.local, positions
                self._positions[name] = (positions.to(torch.int64) + shard.first).to(torch.int32).to(shard.local.device)
            else:
                device = shard.local.device
                nothing = torch.empty(0, dtype=torch.int32, device=device), torch.empty(0, dtype=SENT, device=device)
                self._nothing[name] = nothing
        # Elements, since a shard may begin inside of a tile.
        shapes = {name: tensor.shape for name, tensor in local.items()}
        self._values = WeightsOf(local, MaskSet(indices, shapes), optimizer.backend) if local else None
        self._last: dict[str, Tensor] = {}

    def remember(self) -> None:
        """Take the present values as those that the rollout has."""
        self._last = self._taken()

    def entries(self) -> Iterator[Entry]:
        """Yield the changed elements of each tensor, in the same order on all ranks, and remember the values.

        An entry is verl's: slots [(name, shape)], the name of the values' dtype, counts [1] int64 on the CPU, positions
        [n] int32 in the whole tensor, values [n], and the group of the ranks that have parts of the tensor.
        """
        now = self._taken()
        for name, param in self._params.items():
            if name in now:
                changed = (now[name].view(torch.int16) != self._last[name].view(torch.int16)).nonzero().view(-1)
                positions, values = self._positions[name][changed], now[name][changed]
            else:
                positions, values = self._nothing[name]
            counts = torch.tensor([values.numel()], dtype=torch.int64, device="cpu")
            for sent in self._sent_names[name]:
                slots = [(sent, tuple(param.shape))]
                yield slots, str(SENT).removeprefix("torch."), counts, positions, values, self._groups[name]
        self._last = now

    def _taken(self) -> dict[str, Tensor]:
        """Return the active values of each tensor in this rank's shards.

        Raises:
            WeightSyncError: the model holds its base weights.
        """
        if holds_base_weights(self._params.values()):
            raise WeightSyncError("the model holds its base weights: leave base_weights() first")
        if self._values is None:
            return {}
        found = {}
        values, layout = self._values.take(), self._values.layout
        for group in layout.groups:
            members = [layout.tensors[i] for i in group.members if layout.tensors[i].nnz]
            parts = values[group.dtype].to(SENT).split([entry.nnz for entry in members])
            found.update({entry.name: part for entry, part in zip(members, parts, strict=True)})
        return found


def sent_names(model: nn.Module) -> dict[str, list[str]]:
    """Return the names under which verl sends each parameter, by its name in the model; tied weights have several."""
    by_parameter: dict[nn.Parameter, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        by_parameter.setdefault(param, []).append(name)
    sent = {}
    for names in by_parameter.values():
        converted = [
            next(iter(convert_weight_keys({name: torch.empty(0, dtype=SENT, device="cpu")}, model))) for name in names
        ]
        sent[names[0]] = converted
    return sent
