"""Numbers for a row of metrics: columns of each process's memory, and scalars read from tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor


def statistics_columns(of_ranks: Sequence[Mapping[str, int]]) -> dict[str, float]:
    """Columns of a step's row: of the GPUs the largest memory (now, peak, reserved) and mean utilization; all by rank.

    The columns of a rank are `rank0/peak_memory_bytes` and so on; with one process there are none.
    """
    columns: dict[str, float] = {}
    if "peak_memory_bytes" in of_ranks[0]:
        for name in ("memory_bytes", "peak_memory_bytes", "reserved_memory_bytes"):
            columns[name] = max(found[name] for found in of_ranks)
    read = [found["gpu_utilization_percent"] for found in of_ranks if "gpu_utilization_percent" in found]
    if read:
        columns["gpu_utilization_percent"] = sum(read) / len(read)
    if len(of_ranks) > 1:
        columns |= {f"rank{rank}/{name}": n for rank, found in enumerate(of_ranks) for name, n in found.items()}
    return columns


def read_scalars(metrics: Mapping[str, Tensor | float | None]) -> dict[str, float | None]:
    """All metrics as numbers; the tensors of a device are read in one copy."""
    tensors: dict[torch.device, dict[str, Tensor]] = {}
    for name, value in metrics.items():
        if isinstance(value, Tensor):
            tensors.setdefault(value.device, {})[name] = value.detach().float().reshape(())
    read: dict[str, float] = {}
    for of_device in tensors.values():
        read.update(zip(of_device, torch.stack(list(of_device.values())).tolist(), strict=True))
    return {name: read[name] if isinstance(value, Tensor) else value for name, value in metrics.items()}
