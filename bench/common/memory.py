"""`limit_memory`: the memory of a GPU that a benchmark may use, so that a large GPU can stand for a smaller one."""

from __future__ import annotations

import math

import torch


def limit_memory(device: torch.device, limit_gib: float | None) -> float:
    """Limit torch's allocator on a GPU to `limit_gib` GiB, for this process; return the usable bytes.

    Args:
        limit_gib: None for the whole GPU. On a CPU nothing is limited, and the bytes without a limit are infinite.
    """
    on_gpu = device.type == "cuda"
    total = torch.cuda.get_device_properties(device).total_memory if on_gpu else math.inf
    usable = total if limit_gib is None else min(total, limit_gib * 2**30)
    if on_gpu:
        torch.cuda.set_per_process_memory_fraction(usable / total, device)
    return usable
