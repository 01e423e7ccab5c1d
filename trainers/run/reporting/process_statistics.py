"""Numbers for a row of metrics: memory and GPU utilization of each process, and scalars read from tensors."""

from __future__ import annotations

import importlib
import resource
import sys
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor


def process_statistics(device: torch.device) -> dict[str, int]:
    """The process's peak memory of the host (resident).

    With a GPU also the memory that torch has allocated, now and at its peak, and reserved, and
    `gpu_utilization_percent`, if it can be read.
    """
    unit = 1 if sys.platform == "darwin" else 1024  # of ru_maxrss
    host = {"peak_host_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit}
    if device.type != "cuda":
        return host
    utilization = gpu_utilization(device)
    return {
        "memory_bytes": torch.cuda.memory_allocated(device),
        "peak_memory_bytes": torch.cuda.max_memory_allocated(device),
        "reserved_memory_bytes": torch.cuda.memory_reserved(device),
        **({} if utilization is None else {"gpu_utilization_percent": utilization}),
        **host,
    }


def gpu_utilization(device: torch.device) -> int | None:
    """Percent of the driver's last sample period, 1/6 to 1 second, in which a kernel ran on the GPU; see nvidia-smi.

    None if it cannot be read: nvidia-ml-py is not installed, or the driver does not measure it, as for a part of a GPU
    (MIG).
    """
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        return None
    try:
        return torch.cuda.utilization(device)
    except (nvml.NVMLError, RuntimeError, ModuleNotFoundError):  # the last if torch was imported without pynvml
        return None


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
