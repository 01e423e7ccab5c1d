"""A training step on several GPUs: replicate and FSDP2 with SparseAdamW, DDP and FSDP2 with torch's fused AdamW.

Measures the time of a step (forward, backward, optimizer) on one pair of sequences per GPU, the peak memory of a GPU,
and the bytes that the step's collectives reduce, counted call by call. Before a step is timed, its first update is
compared with that of one device on the pairs of all GPUs.

Consecutive steps are timed together (--steps_in_a_row): as in training, the host does not wait for the GPU between
them, nor a rank for the others, except in collectives. All ranks begin them at once, and the time is that of the
slowest. The decoder layers are compiled, under FSDP2 too, unless --eager is given: a step of eager layers has the
time in which the host launches their kernels.

Started by itself, it starts the processes of each number of GPUs and each network, every process on its own share of
the host's cores, and ends with the table and the targets. One GPU, which efficiency is measured against, is the first;
the largest number of GPUs, which the targets are on, is the second. Started by torchrun, it measures with the processes
of that torchrun, for example on several hosts, on one network; rank 0 writes the results file and the table.

The first measured rows replace the results file; with --resume they are added to it, and its rows are not measured
again. If rows have no time at the end, because --limit_s has passed or a process has failed, the file has
`completed: false`, one line on stderr names them, and the exit code is 1; the same command with --resume measures them.

Rows (--variants):
  local_PATTERN_DTYPE      SparseAdamW, every GPU for itself: the step without communication
  replicate_PATTERN_DTYPE  SparseAdamW with a process group: compact gradients are reduced
  ddp                      DistributedDataParallel and fused AdamW: all gradients are reduced
  ddp_whole_layers         the same, each layer compiled into one graph (torch._dynamo.config.optimize_ddp = False)
  fsdp2                    fully_shard of every layer and fused AdamW
  fsdp2_PATTERN_DTYPE      fully_shard of every layer and SparseAdamW
PATTERN is element or tile64, DTYPE is that of compact gradients, fp32 or bf16.

Networks (--networks): default is what NCCL chooses between the GPUs; sockets makes NCCL use TCP over the loopback
interface, as a stand-in for a network between hosts.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from sparse_opt.cli.parser import CommandParser
from sparse_opt.errors import SparseOptError

from .. import rows
from ..harness import Benchmark, comma_separated, exit_code, not_between, one_of_each
from ..rows import Run
from .models import SHAPES
from .results import checked_line, missing, missing_line
from .variants import VARIANTS
from .world import NETWORKS, measure_world

_EPILOG = """examples:
  sparse-opt bench distributed                                       # 3B shape, 1 to all GPUs, both networks
  sparse-opt bench distributed --output own.json --limit_s 540 --resume   # go on where an earlier run ended
  sparse-opt bench distributed --gpus 2 --variants ddp,replicate_tile64_bf16
  sparse-opt bench distributed --eager --output eager.json           # without torch.compile
  sparse-opt bench distributed --shape 70b --gpus 4 --networks default --variants fsdp2_tile64_bf16 \\
      --gradient_checkpointing --dpo
  sparse-opt bench distributed --small --eager --gpus 1,2            # a tiny model, on the CPU with gloo
  torchrun --nnodes 2 --nproc_per_node 8 --rdzv_endpoint HOST:29500 --rdzv_backend c10d \\
      -m sparse_opt bench distributed --variants ddp,replicate_element_bf16 --output hosts.json
"""


def options(parser: CommandParser) -> None:
    what = parser.add_argument_group("what is trained")
    what.add_argument("--shape", choices=tuple(SHAPES), default="3b", help="of the Llama (%(default)s)")
    what.add_argument("--variants", type=comma_separated, help="rows, by commas (default: bf16; no fsdp2 over sockets)")
    what.add_argument("--density", type=float, default=0.025, help="of the random masks (%(default)s)")
    what.add_argument("--sequence_length", type=int, default=512, help="tokens of a sequence (%(default)s)")
    what.add_argument("--learning_rate", type=float, default=1e-6, help="of the timed steps (%(default)s)")
    what.add_argument("--gradient_checkpointing", action="store_true", help="recompute activations in each layer")
    what.add_argument("--eager", dest="compile", action="store_false", help="do not torch.compile the decoder layers")
    what.add_argument("--dpo", action="store_true", help="with a reference, the base weights; sparse variants only")
    run = parser.add_argument_group("how")
    run.add_argument("--gpus", type=comma_separated, help="numbers of GPUs, by commas (default: 1,2,4,... to all)")
    run.add_argument(
        "--networks", type=comma_separated, help="of default,sockets (both; on a CPU and under torchrun default)"
    )
    run.add_argument("--limit_gib", type=float, help="GiB of each GPU that torch's allocator may use (default: all)")
    run.add_argument(
        "--steps_in_a_row",
        type=int,
        default=4,
        help="consecutive steps in one measurement; fewer if they are slow (%(default)s)",
    )
    run.add_argument("--n_rounds", type=int, default=100, help="measurements of each row, at most (%(default)s)")
    run.add_argument("--group_s", type=float, default=10.0, help="seconds to time rows that run in turns (%(default)s)")
    run.add_argument("--limit_s", type=float, help="end after this time, with the rows so far; --resume goes on")
    run.add_argument("--mask_dir", type=Path, help="folder that keeps the random masks for later runs")
    run.add_argument("--seed", type=int, default=0, help="of weights, masks and token ids (%(default)s)")
    run.add_argument("--small", action="store_true", help="a tiny shape, on the CPU")


def problem(args: Namespace) -> str:
    """The error in the options; empty if they are valid. Fills the defaults that depend on the machine."""
    on_cpu = args.device == "cpu"
    if args.small:
        args.shape, args.sequence_length = "tiny", min(args.sequence_length, 32)
    args.share_cores = dist.is_torchelastic_launched()  # torchrun leaves all cores to each process
    names = args.variants or []
    if error := (
        (_ranks_problem(args) if dist.is_torchelastic_launched() else _gpus_problem(args, on_cpu=on_cpu))
        or not_between(args, "sequence_length", at_least=2)
        or one_of_each("networks", args.networks, ["default"] if on_cpu else list(NETWORKS))
        or (one_of_each("variants", names, list(VARIANTS)) if names else "")
    ):
        return error
    if args.limit_gib is not None and on_cpu:
        return f"--limit_gib {args.limit_gib:g} limits the memory of GPUs, and the device is the CPU"
    if args.dpo and not (names and all(VARIANTS[name].pattern for name in names)):
        return "--dpo needs --variants with sparse variants only: their reference is the base weights"
    if args.output is None and args.shape != "3b":
        args.output = Path(f"bench/results/distributed_{args.shape}.json")
    args.device = "cpu" if on_cpu else "cuda"
    return ""


def _gpus_problem(args: Namespace, *, on_cpu: bool) -> str:
    """The error of the numbers of GPUs and the networks of this host; empty if they are valid. Fills the defaults."""
    n_gpus = 2 if on_cpu else torch.cuda.device_count()
    try:
        args.gpus = [int(n) for n in args.gpus or [2**k for k in range(n_gpus.bit_length())]]
        args.gpus.sort(key=lambda n: (n > 1, -n))  # the order of the measurements
    except ValueError:
        return f"--gpus {','.join(args.gpus)}: expected numbers"
    args.networks = args.networks or (["default"] if on_cpu else list(NETWORKS))
    if not all(1 <= n and (on_cpu or n <= n_gpus) for n in args.gpus):
        return f"--gpus {','.join(map(str, args.gpus))}: expected 1 to {n_gpus}, the GPUs of this machine"
    return ""


def _ranks_problem(args: Namespace) -> str:
    """The same under torchrun, whose processes are started already: one number of GPUs and one network."""
    size = int(os.environ["WORLD_SIZE"])
    if args.gpus not in (None, [str(size)]):
        return f"--gpus {','.join(args.gpus)}: torchrun has started {size} processes, expected {size} or no --gpus"
    args.gpus, args.networks = [size], args.networks or ["default"]
    if len(args.networks) > 1:
        return f"--networks {','.join(args.networks)}: under torchrun expected one, which its processes use to the end"
    if args.networks == ["sockets"] and size > int(os.environ["LOCAL_WORLD_SIZE"]):
        return "--networks sockets uses the loopback interface, and the processes are on several hosts"
    return ""


def measure(args: Namespace, run: Run) -> None:
    """Measure with the processes of this torchrun, or start some for each number of GPUs and network.

    The rows are in the results file as soon as they are measured.
    """
    n_before = len(run.rows)
    if dist.is_torchelastic_launched():
        measure_world(_job(args, args.networks[0], _deadline(args)), run, [args.output])
    else:
        _run_each(args, run)
    if not run.rows and not run.wrong:
        raise SparseOptError(f"no row was measured; {args.output} is as it was before")
    left = missing(run, args)
    if left and not run.wrong:
        run.note(missing_line(left))
        run.completed = False
    run.notes = [note for note in run.notes if not note.startswith("the first update is")]
    if len(run.rows) > n_before:
        run.note(checked_line(run))


def _deadline(args: Namespace) -> float | None:
    """When --limit_s has passed, by `time.time()`."""
    return None if args.limit_s is None else time.time() + args.limit_s


def _job(args: Namespace, network: str, deadline: float | None) -> Namespace:
    """The options of the processes of one number of GPUs and network."""
    options = {name: value for name, value in vars(args).items() if name not in ("plot", "resume", "strict")}
    return Namespace(**options, network=network, deadline=deadline, store="env://")


def _run_each(args: Namespace, run: Run) -> None:
    """Measure each number of GPUs and network, and add their rows to the run."""
    deadline = _deadline(args)
    with tempfile.TemporaryDirectory(prefix="sparse_opt_distributed_") as name:
        folder = Path(name)
        file = folder / "rows.json"  # what is in the results file, too, once a row has been measured
        rows.write(file, run)
        for n, network in dict.fromkeys((n, network) for n, network, _ in missing(run, args)):
            job = vars(_job(args, network, deadline)) | {"mask_dir": str(args.mask_dir or folder)}
            job |= {"output": str(args.output), "rows": str(file)}
            if (deadline is None or time.time() < deadline) and not _run_ranks(n, job, folder / "job.json"):
                run.note(f"not measured: a process failed on {n} x {network}")
                run.completed = False
        found = rows.read(file)
        run.rows, run.wrong = found.rows, found.wrong


def _run_ranks(n: int, job: dict[str, Any], file: Path) -> bool:
    """Run the job in n processes until they end or its deadline passes; whether none has failed.

    torchrun would print tracebacks when it is stopped, and leave all cores to each process.
    """
    store = file.with_name(f"store_{n}_{job['network']}")  # a port that is free now may be taken later
    file.write_text(json.dumps(job | {"store": f"file://{store}"}), encoding="utf-8")
    cores = sorted(os.sched_getaffinity(0))
    share = max(1, len(cores) // n)
    ranks = {"WORLD_SIZE": n, "LOCAL_WORLD_SIZE": n}
    command = [sys.executable, "-m", "sparse_opt.bench.distributed.world", str(file)]
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(n):
            if n <= len(cores):
                os.sched_setaffinity(0, cores[rank * share : (rank + 1) * share])  # the new process inherits it
            variables = {name: str(value) for name, value in (ranks | {"RANK": rank, "LOCAL_RANK": rank}).items()}
            environment = {"OMP_NUM_THREADS": str(share), **os.environ, **variables}
            processes.append(subprocess.Popen(command, env=environment, stdout=sys.__stderr__))
        while None in (codes := [process.poll() for process in processes]) and not any(codes):
            if job["deadline"] is not None and time.time() >= job["deadline"]:
                return True
            time.sleep(0.1)
        return not any(codes)
    finally:
        os.sched_setaffinity(0, cores)
        for number in (signal.SIGSTOP, signal.SIGKILL):  # stopped, none sees that another has ended
            for process in processes:
                process.send_signal(number)
        for process in processes:
            process.wait()


BENCHMARK = Benchmark(
    name="distributed",
    doc=__doc__,
    options=options,
    problem=problem,
    measure=measure,
    epilog=_EPILOG,
    output="bench/results/distributed.json",
    resumes=True,
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark, or under torchrun this process's part of it; the exit code as of all benchmarks."""
    if not dist.is_torchelastic_launched() or os.environ["RANK"] == "0":
        return BENCHMARK.main(argv)

    def other_rank() -> int:
        args = BENCHMARK.arguments(sys.argv[1:] if argv is None else argv)
        measure_world(_job(args, args.networks[0], _deadline(args)), Run({}), [])
        return 0

    return exit_code(other_rank)


if __name__ == "__main__":
    sys.exit(main())
