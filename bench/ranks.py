"""`Ranks`: one of the processes that measure together, started by `harness.run_in_process` with several ranks."""

from __future__ import annotations

import gc
import os
import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from sparse_opt import MaskSet

from .models import masked_shapes, model_config

# Name -> environment variables that NCCL reads when the process group is made.
NETWORKS: dict[str, dict[str, str]] = {
    "default": {},
    "sockets": {
        "NCCL_P2P_DISABLE": "1",
        "NCCL_SHM_DISABLE": "1",
        "NCCL_IB_DISABLE": "1",
        "NCCL_NET": "Socket",
        "NCCL_SOCKET_IFNAME": "lo",
    },
}


class Ranks:
    """The process group, the device and the model's configuration of one process.

    Args:
        job: options of the benchmark: `device` (cpu or cuda), `shape`, `sequence_length`, `density`, `seed`, and
            `mask_dir`, a folder of masks.
    """

    def __init__(self, job: dict[str, Any]) -> None:
        self.args, self.began = Namespace(**job), time.monotonic()
        self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.on_gpu = self.args.device == "cuda"
        self.device = torch.device("cuda", self.rank) if self.on_gpu else torch.device("cpu")
        if self.on_gpu:
            torch.cuda.set_device(self.device)
        dist.init_process_group("nccl" if self.on_gpu else "gloo")
        self.config = model_config(self.args.shape, self.args.sequence_length)

    def mask(self, pattern: str) -> MaskSet:
        """A random mask of the matrices, which rank 0 draws for all ranks unless the folder has it."""
        args, path = self.args, self.mask_file(pattern)
        if self.rank == 0 and not path.is_file():
            self.print(f"drawing a random mask of {pattern}")
            shapes = masked_shapes(self.config)
            MaskSet.random(shapes, density=args.density, pattern=pattern, seed=args.seed).save(path)
        self.barrier()
        return MaskSet.load(path)

    def mask_file(self, pattern: str) -> Path:
        args = self.args
        return Path(args.mask_dir) / f"{args.shape}_{pattern}_{args.density:g}_{args.seed}.safetensors"

    def clock(self, call: Callable[[], object]) -> tuple[float, float, float]:
        """Milliseconds of a call that begins on all ranks at once: the time of the slowest rank; see `timing.Clock`."""
        self.barrier()
        self.synchronize()
        began = time.perf_counter()
        call()
        host_ms = 1e3 * (time.perf_counter() - began)
        self.synchronize()
        times = torch.tensor([1e3 * (time.perf_counter() - began), host_ms], dtype=torch.float64, device=self.device)
        dist.all_reduce(times, op=dist.ReduceOp.MAX)
        ms, host_ms = times.tolist()
        return ms, host_ms, ms

    def allocated(self) -> int:
        return torch.cuda.memory_allocated(self.device) if self.on_gpu else 0

    def reset_peak(self) -> None:
        if self.on_gpu:
            torch.cuda.reset_peak_memory_stats(self.device)

    def peak(self) -> int | None:
        """The largest peak of all ranks since the last reset; None without a GPU."""
        if not self.on_gpu:
            return None
        peak = torch.tensor(torch.cuda.max_memory_allocated(self.device), device=self.device)
        dist.all_reduce(peak, op=dist.ReduceOp.MAX)
        return int(peak.item())

    def release_memory(self) -> None:
        gc.collect()  # FSDP's modules and their states refer to each other
        if self.on_gpu:
            torch.cuda.empty_cache()

    def synchronize(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize(self.device)

    def barrier(self) -> None:
        dist.barrier(device_ids=[self.device.index] if self.on_gpu else None)

    def print(self, line: str) -> None:
        if self.rank == 0:
            print(f"[{time.monotonic() - self.began:4.0f} s] {line}", flush=True)
