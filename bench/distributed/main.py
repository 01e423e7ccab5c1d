"""A training step on several GPUs: replicate and FSDP2 with SparseAdamW, DDP and FSDP2 with torch's fused AdamW.

Measures the time of a step (forward, backward, optimizer) on one pair of sequences per GPU, the peak memory of a GPU,
and the bytes that the step's collectives reduce, counted call by call. Before a step is timed, its first update is
compared with that of one device on the pairs of all GPUs.

Consecutive steps are timed together (--steps_in_a_row): as in training, the host does not wait for the GPU between
them, nor a rank for the others, except in collectives. All ranks begin them at once, and the time is that of the
slowest. The decoder layers are compiled, under FSDP2 too, unless --eager is given: a step of eager layers has the
time in which the host launches their kernels.

It starts the processes of each number of GPUs of this host and each network, every process on its own share of the
host's cores. One GPU, which efficiency is measured against, is the first; the largest number of GPUs, which the targets
are on, is the second.

Rows are written as soon as those of one number of GPUs and network are measured. With --resume the rows of the results
file are kept and not measured again. If rows have no time at the end, because --limit_s has passed or a process has
failed, the file has `completed: false`, one line on stderr names them, and the exit code is 1; the same command with
--resume measures them.

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

import sys
import tempfile
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch

from sparse_opt.cli.parser import CommandParser
from sparse_opt.errors import SparseOptError

from ..harness import NOT_MEASURED, Benchmark, comma_separated, not_between, one_of_each, run_in_process
from ..ranks import NETWORKS
from ..rows import Run
from .models import SHAPES
from .results import case_of, checked_line, missing, missing_line, result_rows, wrong_line
from .variants import VARIANTS

MODULE = "sparse_opt.bench.distributed.world"

_EPILOG = """examples:
  sparse-opt bench distributed                                       # 3B shape, 1 to all GPUs, both networks
  sparse-opt bench distributed --output own.json --limit_s 540 --resume   # go on where an earlier run ended
  sparse-opt bench distributed --gpus 2 --variants ddp,replicate_tile64_bf16
  sparse-opt bench distributed --eager --output eager.json           # without torch.compile
  sparse-opt bench distributed --shape 70b --gpus 4 --networks default --variants fsdp2_tile64_bf16 \\
      --gradient_checkpointing --dpo
  sparse-opt bench distributed --small --eager --gpus 1,2            # a tiny model, on the CPU with gloo
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
    run.add_argument("--networks", type=comma_separated, help="of default,sockets (both; on a CPU default)")
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
    names = args.variants or []
    if error := (
        _gpus_problem(args, on_cpu=on_cpu)
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


def measure(args: Namespace, run: Run) -> None:
    """Start the processes of each number of GPUs and network, and add their rows."""
    n_before = len(run.rows)
    options = {name: value for name, value in vars(args).items() if name not in ("plot", "resume", "strict", "output")}
    deadline = None if args.limit_s is None else time.time() + args.limit_s
    with tempfile.TemporaryDirectory(prefix="sparse_opt_distributed_") as name:
        folder = Path(name)
        for n, network in dict.fromkeys((n, network) for n, network, _ in missing(run, args)):
            if deadline is not None and time.time() >= deadline:
                break
            variants = [one[2] for one in missing(run, args) if one[:2] == (n, network)]
            job = options | {"variants": variants, "network": network, "deadline": deadline}
            job["mask_dir"] = str(args.mask_dir or folder)
            results = run_in_process(MODULE, f"{n} x {network}", job, folder, NETWORKS[network], n_ranks=n)
            if results is None:
                run.note(f"{NOT_MEASURED}: a process failed on {n} x {network}")
                run.completed = False
            for result in results or []:
                _add(run, result, n, network, args)
            if run.rows:
                run.save()
    if not run.rows and not run.wrong:
        raise SparseOptError(f"no row was measured; {args.output} is as it was before")
    left = missing(run, args)
    if left and not run.wrong:
        run.note(missing_line(left))
        run.completed = False
    run.notes = [note for note in run.notes if not note.startswith("the first update is")]
    if len(run.rows) > n_before:
        run.note(checked_line(run))


def _add(run: Run, result: dict[str, Any], gpus: int, network: str, args: Namespace) -> None:
    """Add the rows of a variant, or its error if its first update is wrong."""
    variant = VARIANTS[result["variant"]]
    if result["ms"] is None:
        run.wrong.append(f"{gpus} x {network}, {variant.name}: {wrong_line(result['check'])}")
        return
    for row in result_rows(result, case_of(variant, gpus, network, args)):
        run.add(row)


main = Benchmark(
    name="distributed",
    doc=__doc__,
    options=options,
    problem=problem,
    measure=measure,
    epilog=_EPILOG,
    output="bench/results/distributed.json",
    resumes=True,
).main


if __name__ == "__main__":
    sys.exit(main())
