"""`Ranks`: one of the processes that measure together, started by `harness.run_in_process` with several ranks. The
options of such benchmarks."""

from __future__ import annotations

import gc
import os
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from sparse_opt import MaskSet
from sparse_opt.options import CommandParser

from .harness import comma_separated, not_between, one_of_each
from .models import masked_shapes, model_config
from .shapes import LLAMAS

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


def add_options(parser: CommandParser, shapes: Sequence[str] = LLAMAS) -> tuple[Any, Any]:
    """Add the options of every benchmark of several processes; return their groups, for its own."""
    what, run = parser.add_argument_group("what is trained"), parser.add_argument_group("how")
    what.add_argument("--shape", choices=shapes, default="3b", help="of the Llama (%(default)s)")
    what.add_argument("--density", type=float, default=0.025, help="of the random masks (%(default)s)")
    what.add_argument("--sequence_length", type=int, default=512, help="tokens of a sequence (%(default)s)")
    what.add_argument("--learning_rate", type=float, default=1e-6, help="of the timed steps (%(default)s)")
    run.add_argument("--seed", type=int, default=0, help="of weights, masks and data (%(default)s)")
    run.add_argument("--small", action="store_true", help="a tiny shape, on the CPU")
    return what, run


def add_network_options(run: Any) -> None:
    run.add_argument("--networks", type=comma_separated, help="of default,sockets (both; on a CPU default)")
    run.add_argument("--mask_dir", type=Path, help="folder that keeps the random masks for later runs")


def problem(args: Namespace, name: str) -> str:
    """The error in these options; empty if they are valid. Fills the defaults that depend on the device and the shape.

    Args:
        name: of the benchmark, and of its results file.
    """
    on_cpu = args.device == "cpu"
    args.device = "cpu" if on_cpu else "cuda"
    if args.small:
        args.shape, args.sequence_length = "tiny", min(args.sequence_length, 32)
    if args.output is None and args.shape != "3b":
        args.output = Path(f"bench/results/{name}_{args.shape}.json")
    if hasattr(args, "networks"):
        networks = ["default"] if on_cpu else list(NETWORKS)
        args.networks = args.networks or networks
        if error := one_of_each("networks", args.networks, networks):
            return error
    return not_between(args, "sequence_length", at_least=2)


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
        self.masks: dict[str, MaskSet] = {}

    def mask(self, pattern: str) -> MaskSet:
        """A random mask of the matrices, which rank 0 draws for all ranks unless the folder has it."""
        if pattern in self.masks:
            return self.masks[pattern]
        args, path = self.args, self.mask_file(pattern)
        if self.rank == 0 and not path.is_file():
            self.print(f"drawing a random mask of {pattern}")
            shapes = masked_shapes(self.config)
            MaskSet.random(shapes, density=args.density, pattern=pattern, seed=args.seed).save(path)
        self.barrier()
        return self.masks.setdefault(pattern, MaskSet.load(path))

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
