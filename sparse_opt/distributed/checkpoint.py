"""Optimizer state of several ranks: from `torch.distributed.checkpoint`, and as the state dict of one device.

To save, sync or async, `optimizer.state_dict()` or torch's `get_optimizer_state_dict` suffices:

    dcp.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint_id=path)
    dcp.load({"model": model.state_dict()}, checkpoint_id=path)
    load_optimizer(optimizer, path)
"""

from __future__ import annotations

from os import PathLike
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..optim.sparse_optimizer import SparseOptimizer


def full_optimizer_state_dict(optimizer: SparseOptimizer, *, cpu_offload: bool = True) -> dict[str, Any]:
    """Gather the state of an optimizer of sharded parameters, as one device saves it. All ranks must call it.

    Torch's `get_optimizer_state_dict` cannot gather parts of different lengths.

    Args:
        cpu_offload: return the tensors on the CPU on the first rank of the optimizer's process group, and an empty dict
            on the other ranks. False: return them on the parameters' devices, on all ranks.
    """
    saved = optimizer.state_dict()
    keep = not cpu_offload or not dist.is_initialized() or dist.get_rank(optimizer.process_group) == 0
    for key in sorted(saved["state"]):  # in the same order on all ranks
        values = saved["state"][key]
        for name in sorted(values):
            full = _gathered(values[name]) if isinstance(values[name], DTensor) else values[name]
            if keep:
                values[name] = full.cpu() if cpu_offload else full
    return saved if keep else {}


def _gathered(tensor: DTensor) -> Tensor:
    local: Any = tensor.to_local()  # a LocalShardsWrapper
    group = tensor.device_mesh.get_group(tensor.device_mesh.ndim - 1)
    part = local.local_shards()[0]
    sizes = [torch.empty(1, dtype=torch.int64, device=part.device) for _ in range(group.size())]
    dist.all_gather(sizes, torch.tensor([part.numel()], dtype=torch.int64, device=part.device), group=group)
    counts = torch.cat(sizes).tolist()
    padded = part.new_zeros(max(counts))
    padded[: part.numel()] = part
    parts = [torch.empty_like(padded) for _ in counts]
    dist.all_gather([p.view(torch.uint8) for p in parts], padded.view(torch.uint8), group=group)
    return torch.cat([p[:n] for p, n in zip(parts, counts, strict=True)])


def load_optimizer(optimizer: SparseOptimizer, checkpoint_id: str | PathLike[str], key: str = "optimizer") -> None:
    """Load an optimizer's state from a checkpoint of `torch.distributed.checkpoint`. All ranks must call it.

    The checkpoint may have been saved by another number of ranks, and by `optimizer.state_dict()` or
    `get_optimizer_state_dict`. `dcp.load` alone writes into live tensors before the mask is checked, if parameters are
    not sharded, and raises if the saved optimizer has had other masks before, because its base weights are of more
    elements.

    Args:
        checkpoint_id: folder of the checkpoint.
        key: of the optimizer's state in the saved dictionary.

    Raises:
        ValueError: as `optimizer.load_state_dict`; nothing has changed.
    """
    reader = dcp.FileSystemReader(checkpoint_id)
    saved = reader.read_metadata()
    own = optimizer.state_dict()
    names = [name for group in own["param_groups"] for name in group["param_names"]]
    state: dict[str, dict[str, Tensor]] = {}
    for flat_key, path in saved.planner_data.items():
        if path[:2] != (key, "state"):
            continue
        _, _, param, entry = path  # the parameter's name, or its number as text
        if param not in names and not param.isdecimal():
            raise ValueError(f"{checkpoint_id} has a state of {param!r}, a parameter that this optimizer does not have")
        tensor = own["state"].get(names.index(param) if param in names else int(param), {}).get(entry)
        found: Any = saved.state_dict_metadata[flat_key]  # all of the state are tensors
        if not isinstance(tensor, DTensor) or tensor.size() != found.size:
            tensor = torch.empty(found.size, dtype=found.properties.dtype, device="cpu")
        state.setdefault(param, {})[entry] = tensor
    if not state:
        raise ValueError(f"{checkpoint_id} has no optimizer state under the key {key!r}")
    loaded = {key: {"state": state, "param_groups": own["param_groups"]}}
    dcp.load(loaded, storage_reader=reader, process_group=optimizer.process_group)
    groups = loaded[key]["param_groups"]
    params = {str(param): param for group in groups for param in group["params"]}
    optimizer.load_state_dict({"state": {params[p]: s for p, s in state.items()}, "param_groups": groups})
