"""Weight updates from a trainer to another GPU of one host: the active weights, and all weights.

Two processes, each with a GPU: rank 0 trains a model with SparseAdamW and random token ids, rank 1 has a copy of its
weights, as an inference engine would. After each training step every row brings the copy to the trainer's weights. The
time of an update is from its start on both ranks until the copy has the new weights and has verified them.
The copies are compared with the trainer's weights, bit for bit, after the first update and after the last one.

Rows (--variants):
  weights               one torch.distributed.broadcast for each parameter of the model
  PATTERN_values        all active values in each update
  PATTERN_changed       a bitmap and the changed values
  PATTERN_values_ipc, PATTERN_changed_ipc    the same by CUDA IPC instead of NCCL
PATTERN is element or tile64.

Networks (--networks): default is what NCCL chooses between the GPUs; sockets makes NCCL use TCP over the loopback
interface, as a stand-in for a network between hosts.
"""

from __future__ import annotations

import sys
import tempfile
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

import torch

from sparse_opt.analysis.output_files import require_matplotlib
from sparse_opt.cli.parser import CommandParser
from sparse_opt.l2_fetch import GRANULARITIES

from ..common.harness import Benchmark, Report, comma_separated, one_of_each, out_of_range, run_in_process
from ..common.report import why_unwritable
from ..distributed.models import SHAPES
from ..distributed.world import NETWORKS
from .plot import plot
from .report import VARIANTS, text, wrong_lines

_EPILOG = """examples:
  sparse-opt bench weight_sync                                    # 3B shape on two GPUs, both networks
  sparse-opt bench weight_sync --networks default --variants weights,element_values,element_changed
  sparse-opt bench weight_sync --small                            # a tiny model, on the CPU with gloo
"""


def options(parser: CommandParser) -> None:
    what = parser.add_argument_group("what is trained")
    what.add_argument("--shape", choices=tuple(SHAPES), default="3b", help="of the Llama (%(default)s)")
    what.add_argument("--density", type=float, default=0.025, help="of the random masks (%(default)s)")
    what.add_argument("--learning_rate", type=float, default=1e-6, help="of the training steps (%(default)s)")
    what.add_argument("--sequence_length", type=int, default=512, help="tokens of a sequence (%(default)s)")
    what.add_argument(
        "--no_compact_weights",
        dest="compact_weights",
        action="store_false",
        help="let the sender read the model, instead of the optimizer's copy of the active weights (compact_weights)",
    )
    run = parser.add_argument_group("how")
    run.add_argument("--variants", type=comma_separated, help="rows, by commas (default: all)")
    run.add_argument("--networks", type=comma_separated, help="of default,sockets (both; on a CPU default)")
    run.add_argument("--n_rounds", type=int, default=20, help="training steps, an update after each (%(default)s)")
    run.add_argument(
        "--l2_fetch_granularity",
        type=int,
        choices=(0, *GRANULARITIES),
        default=32,
        help="bytes, see sparse_opt.set_l2_fetch_granularity; 0 leaves it as it is (%(default)s)",
    )
    run.add_argument("--seed", type=int, default=0, help="of weights, masks and token ids (%(default)s)")
    run.add_argument("--mask_dir", type=Path, help="folder that keeps the random masks for later runs")
    run.add_argument("--small", action="store_true", help="a tiny shape, on the CPU")
    run.add_argument("--plot", type=Path, help="PNG of the times; needs matplotlib")


def problem(args: Namespace) -> str:
    """The error in the options; empty if they are valid. Fills the defaults that depend on the machine."""
    on_cpu = args.device == "cpu"
    if args.small:
        args.shape, args.sequence_length = "tiny", min(args.sequence_length, 32)
    if not on_cpu and torch.cuda.device_count() < 2:
        return f"this needs two GPUs, and torch sees {torch.cuda.device_count()}: --small runs on a CPU"
    possible = [name for name, variant in VARIANTS.items() if not (on_cpu and variant.transport == "ipc")]
    args.variants = args.variants or possible
    args.networks = args.networks or ["default"] if on_cpu else args.networks or list(NETWORKS)
    if error := (
        out_of_range(args, "sequence_length", at_least=2)
        or one_of_each("networks", args.networks, ["default"] if on_cpu else list(NETWORKS))
        or one_of_each("variants", args.variants, possible)
    ):
        return error
    if args.mask_dir is not None and not args.mask_dir.is_dir():
        return f"--mask_dir {args.mask_dir}: no such folder"
    if args.output is None and args.shape != "3b":
        args.output = Path(f"bench/results/weight_sync_{args.shape}.json")
    args.device = "cpu" if on_cpu else "cuda"
    if args.plot is None:
        return ""
    require_matplotlib("plot")
    return why_unwritable(args.plot)


def run(args: Namespace, report: Report) -> None:
    """Run two processes for each network, and fill the report with their rows."""
    names = ("shape", "density", "learning_rate", "sequence_length", "n_rounds", "seed", "device", "compact_weights")
    settings = {name: getattr(args, name) for name in (*names, "l2_fetch_granularity")}
    report |= {"settings": settings, "rows": [], "failed": []}
    with tempfile.TemporaryDirectory(prefix="sparse_opt_weight_sync_") as folder:
        for network in args.networks:
            # CUDA IPC does not use the network.
            rows = [name for name in args.variants if network == "default" or VARIANTS[name].transport != "ipc"]
            job = settings | {"variants": rows, "network": network, "mask_dir": str(args.mask_dir or folder)}
            variables = NETWORKS[network]
            module = "sparse_opt.bench.weight_sync.world"
            result = run_in_process(module, network, job, Path(folder), variables, n_ranks=2)
            if result is None:
                report["failed"].append(network)
            else:
                report["rows"] += result["rows"]
    if args.plot is not None and report["rows"]:
        plot(report, args.plot)
        print(f"plot: {args.plot}")


def failures(report: Report, args: Namespace) -> list[str]:
    return [f"{network}: the run did not end" for network in report["failed"]] + wrong_lines(report)


BENCHMARK = Benchmark(
    name="weight_sync",
    doc=__doc__,
    options=options,
    problem=problem,
    measure=run,
    text=text,
    failures=failures,
    epilog=_EPILOG,
    output="bench/results/weight_sync.json",
    device="auto",
)


def main(argv: Sequence[str] | None = None) -> int:
    return BENCHMARK.main(argv)


if __name__ == "__main__":
    sys.exit(main())
