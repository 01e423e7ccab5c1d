"""A training step on several GPUs: replicate and FSDP2 with SparseAdamW, DDP and FSDP2 with torch's fused AdamW.

Measures the time of a step (forward, backward, optimizer) on one pair of sequences per GPU, the peak memory of a GPU,
and the bytes that the step's collectives reduce, counted call by call. Before a step is timed, its first update is
compared with that of one device on the pairs of all GPUs.

Started by itself, it runs torchrun once for each number of GPUs and each network, and ends with the table, the ratios
to the targets, and the efficiency. Started by torchrun, it measures with the processes of that torchrun, for example
on several hosts, and adds the rows to the results file.

Rows (--variants):
  local_PATTERN_DTYPE      SparseAdamW, every GPU for itself: the step without communication
  replicate_PATTERN_DTYPE  SparseAdamW with a process group: compact gradients are reduced
  ddp                      DistributedDataParallel and fused AdamW: all gradients are reduced
  fsdp2                    fully_shard of every layer and fused AdamW
  fsdp2_PATTERN_DTYPE      fully_shard of every layer and SparseAdamW
PATTERN is element or tile64, DTYPE is that of compact gradients, fp32 or bf16.

Networks (--networks): default is what NCCL chooses between the GPUs; sockets makes NCCL use TCP over the loopback
interface, as a stand-in for a network between hosts.
"""

from __future__ import annotations

import json
import os
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

from sparse_opt.analysis.figures import require_matplotlib
from sparse_opt.cli.parser import CommandParser

from ..common.harness import Benchmark, Report, comma_separated, one_of_each, out_of_range
from ..common.report import why_unwritable, write_json
from .models import SHAPES
from .plot import plot
from .report import read_report, text, wrong_lines
from .variants import VARIANTS
from .world import NETWORKS, measure_world

_EPILOG = """examples:
  sparse-opt bench distributed                                       # 3B shape, 1 to all GPUs, both networks
  sparse-opt bench distributed --limit_s 540 --resume                # go on where an earlier run ended
  sparse-opt bench distributed --gpus 2 --variants ddp,replicate_tile64_bf16
  sparse-opt bench distributed --compile --output compiled.json      # fewer kernel launches
  sparse-opt bench distributed --shape 70b --gpus 4 --networks default --variants fsdp2_tile64_bf16 \\
      --gradient_checkpointing --dpo
  sparse-opt bench distributed --small --gpus 1,2                    # a tiny model, on the CPU with gloo
  torchrun --nnodes 2 --nproc_per_node 8 --rdzv_endpoint HOST:29500 --rdzv_backend c10d \\
      -m sparse_opt bench distributed --variants ddp,replicate_element_bf16
"""


def options(parser: CommandParser) -> None:
    what = parser.add_argument_group("what is trained")
    what.add_argument("--shape", choices=tuple(SHAPES), default="3b", help="of the Llama (%(default)s)")
    what.add_argument("--variants", type=comma_separated, help="rows, by commas (default: all but fsdp2_PATTERN_fp32)")
    what.add_argument("--density", type=float, default=0.025, help="of the random masks (%(default)s)")
    what.add_argument("--sequence_length", type=int, default=512, help="tokens of a sequence (%(default)s)")
    what.add_argument("--learning_rate", type=float, default=1e-6, help="of the timed steps (%(default)s)")
    what.add_argument("--gradient_checkpointing", action="store_true", help="recompute activations in each layer")
    what.add_argument("--compile", action="store_true", help="torch.compile the model's layers, in every variant")
    what.add_argument("--dpo", action="store_true", help="with a reference, the base weights; sparse variants only")
    run = parser.add_argument_group("how")
    run.add_argument("--gpus", type=comma_separated, help="numbers of GPUs, by commas (default: 1,2,4,... to all)")
    run.add_argument("--networks", type=comma_separated, help="of default,sockets (both; on a CPU default)")
    run.add_argument("--n_rounds", type=int, default=100, help="timed steps of each row, at most (%(default)s)")
    run.add_argument("--group_s", type=float, default=30.0, help="seconds to time rows that run in turns (%(default)s)")
    run.add_argument("--limit_s", type=float, help="end after this time, with the rows so far; --resume goes on")
    run.add_argument("--timeout_s", type=float, default=300.0, help="of a collective (%(default)s)")
    run.add_argument("--resume", action="store_true", help="keep the rows of --output and measure the missing ones")
    run.add_argument("--mask_dir", type=Path, help="folder that keeps the random masks for later runs")
    run.add_argument("--seed", type=int, default=0, help="of weights, masks and token ids (%(default)s)")
    run.add_argument("--small", action="store_true", help="a tiny shape, on the CPU")
    run.add_argument("--plot", type=Path, help="PNG of times and efficiency; needs matplotlib")


def problem(args: Namespace) -> str:
    """The error in the options; empty if they are valid. Fills the defaults that depend on the machine."""
    on_cpu = args.device == "cpu"
    if args.small:
        args.shape, args.sequence_length = "tiny", min(args.sequence_length, 32)
    n_gpus = 2 if on_cpu else torch.cuda.device_count()
    try:
        args.gpus = [int(n) for n in args.gpus or [2**k for k in range(n_gpus.bit_length())]]
    except ValueError:
        return f"--gpus {','.join(args.gpus)}: expected numbers"
    args.networks = args.networks or ["default"] if on_cpu else args.networks or list(NETWORKS)
    names = args.variants or []
    if error := (
        out_of_range(args, "sequence_length", at_least=2)
        or one_of_each("networks", args.networks, ["default"] if on_cpu else list(NETWORKS))
        or (one_of_each("variants", names, list(VARIANTS)) if names else "")
    ):
        return error
    if not all(1 <= n and (on_cpu or n <= n_gpus) for n in args.gpus):
        return f"--gpus {','.join(map(str, args.gpus))}: expected 1 to {n_gpus}, the GPUs of this machine"
    for name in ("group_s", "timeout_s", "limit_s"):
        if (value := getattr(args, name)) is not None and value <= 0:
            return f"--{name} is {value}, expected more than 0"
    if args.dpo and not (names and all(VARIANTS[name].pattern for name in names)):
        return "--dpo needs --variants with sparse variants only: their reference is the base weights"
    if args.mask_dir is not None and not args.mask_dir.is_dir():
        return f"--mask_dir {args.mask_dir}: no such folder"
    if args.output is None and args.shape != "3b":
        args.output = Path(f"bench/results/distributed_{args.shape}.json")
    args.device = "cpu" if on_cpu else "cuda"
    if args.plot is None:
        return ""
    require_matplotlib("plot")
    return why_unwritable(args.plot)


def run(args: Namespace, report: Report) -> None:
    """Run torchrun for each number of GPUs and network; fill the report with what the results file has then."""
    deadline = None if args.limit_s is None else time.time() + args.limit_s
    if not args.resume:
        args.output.unlink(missing_ok=True)
    earlier = read_report(args)
    write_json(args.output, earlier | {"environment": report["environment"], "completed": False})
    failed = []
    with tempfile.TemporaryDirectory(prefix="sparse_opt_distributed_") as folder:
        # The largest first, because the targets are on it.
        for n in sorted(args.gpus, reverse=True):
            for network in args.networks if n > 1 else args.networks[:1]:
                job = {name: value for name, value in vars(args).items() if name != "plot"} | {"network": network}
                job |= {"output": str(args.output), "mask_dir": str(args.mask_dir or folder), "deadline": deadline}
                if not _torchrun(n, job, Path(folder) / "job.json"):
                    failed.append(f"{n} x {network}")
    report |= {name: value for name, value in read_report(args).items() if name != "completed"}
    report["failed"] = failed
    if args.plot is not None and report["rows"]:
        plot(report, args.plot)
        print(f"plot: {args.plot}")


def _torchrun(n: int, job: dict[str, Any], file: Path) -> bool:
    """Run the job in n processes of this host until it ends or its deadline passes; whether it succeeded."""
    where, deadline = f"{n} x {job['network']}", job["deadline"]
    left = None if deadline is None else deadline - time.time()
    if left is not None and left <= 0:
        print(f"{where}: not started, because --limit_s has passed", file=sys.stderr)
        return False
    print(f"{where}: torchrun", file=sys.stderr, flush=True)
    file.write_text(json.dumps(job), encoding="utf-8")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"]
    command += [f"--nproc-per-node={n}", "-m", "sparse_opt.bench.distributed.world", str(file)]
    threads = str(max(1, (os.cpu_count() or 1) // n))  # torchrun would set one, and warn
    process = subprocess.Popen(command, env={"OMP_NUM_THREADS": threads, **os.environ}, stdout=sys.__stderr__)
    try:
        return process.wait(left) == 0
    except subprocess.TimeoutExpired:
        print(f"{where}: ended, because --limit_s has passed", file=sys.stderr)
        return False
    finally:
        if process.poll() is None:
            process.terminate()  # torchrun ends its processes
            process.wait()


def failures(report: Report, args: Namespace) -> list[str]:
    return [f"{where}: the run did not end" for where in report["failed"]] + wrong_lines(report)


BENCHMARK = Benchmark(
    name="distributed",
    doc=__doc__,
    options=options,
    problem=problem,
    measure=run,
    text=text,
    failures=failures,
    epilog=_EPILOG,
    output="bench/results/distributed.json",
    device="auto",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark, or under torchrun this process's part of it; the exit code as of all benchmarks."""
    if not dist.is_torchelastic_launched():
        return BENCHMARK.main(argv)
    args = BENCHMARK.arguments(sys.argv[1:] if argv is None else argv)
    return measure_world(Namespace(**vars(args), network=args.networks[0], deadline=None))


if __name__ == "__main__":
    sys.exit(main())
