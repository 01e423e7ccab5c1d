"""The largest model that one GPU trains: peak memory and time of a DPO step, by model size and method.

Each row is a process of its own, with random bf16 weights made on the device layer by layer, in transformers' Llama and
Qwen2 classes. Steps are those of `sparse-opt bench baseline dpo`, on one pair.

Models (--shapes): 3b Llama-3.2-3B, 8b Llama-3.1-8B, 14b Qwen2.5-14B, 32b Qwen2.5-32B, 70b Llama-3-70B.
Methods (--methods):
  dense   full fine-tuning, torch's fused AdamW with bf16 moments, a frozen reference model
  lora    adapters of rank --lora_rank, which are off for the reference
  sparse  SparseAdamW under a random mask, fp32 moments, compact gradients in bf16, reference by base weights
  lean    the same with bf16 moments, and base weights in host memory
A row whose memory ran out reads "does not fit", with a lower bound of what it needs. With --limit_gib, torch's
allocator gets that much memory, as on a smaller GPU: 78 for a GPU of 80 GB. A row that is in the results file is
measured again; other rows of the file are kept.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import get_args

from sparse_opt.analysis.output_files import require_matplotlib
from sparse_opt.cli.parser import CommandParser
from sparse_opt.masks.patterns import PATTERNS

from ..common.harness import Benchmark, Report, comma_separated, one_of_each, out_of_range, run_in_process
from ..common.report import why_unwritable, write_json
from .cases import SHAPES, SPARSE_OPTIONS, Case, Method
from .plot import plot
from .report import case_of, text, wrong_lines

METHODS: tuple[str, ...] = get_args(Method)
CHECKPOINTING = {"on": True, "off": False}
SMALL_SHAPES = [name for name in SHAPES if name.startswith("tiny")]
# Segments that grow: a peak of allocated memory then needs hardly more reserved memory.
ALLOCATOR = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}

_EPILOG = """examples:
  sparse-opt bench scale                                             # all shapes and methods
  sparse-opt bench scale --shapes 32b --methods lean --checkpointing on --limit_gib 78
  sparse-opt bench scale --shapes 32b --methods lean --checkpointing on --sequence_length 4096
  sparse-opt bench scale --small                                     # tiny models, on the CPU
"""


def options(parser: CommandParser) -> None:
    shapes = [name for name in SHAPES if name not in SMALL_SHAPES]
    what = parser.add_argument_group("what is trained")
    what.add_argument("--shapes", type=comma_separated, help=f"of {','.join(shapes)} (all)")
    what.add_argument("--methods", type=comma_separated, default=list(METHODS), help=f"of {','.join(METHODS)} (all)")
    what.add_argument(
        "--checkpointing",
        type=comma_separated,
        default=list(CHECKPOINTING),
        help="of on,off: whether activations are checkpointed (both)",
    )
    what.add_argument("--compile", action="store_true", help="torch.compile the model's layers")
    what.add_argument(
        "--cuda_graphs",
        action="store_true",
        help="replay steps as CUDA graphs; methods sparse and lean",
    )
    what.add_argument(
        "--precomputed_reference",
        action="store_true",
        help="compute the reference's log-probabilities before the first step",
    )
    what.add_argument("--sequence_length", type=int, default=1024, help="tokens, prompt and completion (%(default)s)")
    what.add_argument("--density", type=float, default=0.025, help="of the random masks (%(default)s)")
    what.add_argument("--pattern", choices=tuple(PATTERNS), default="tile64", help="of the masks (%(default)s)")
    what.add_argument(
        "--exclude", nargs="+", metavar="PATTERN", help="matrices that the mask leaves out, such as '*embed_tokens*'"
    )
    what.add_argument("--lora_rank", type=int, default=16, help="of method lora (%(default)s)")
    what.add_argument("--learning_rate", type=float, default=1e-6, help="in every method (%(default)s)")
    run = parser.add_argument_group("how")
    run.add_argument(
        "--n_steps",
        type=int,
        default=4,
        help="of each row; the first is left out of the time, and with --cuda_graphs the first four",
    )
    run.add_argument("--limit_gib", type=float, help="GiB that torch's allocator may use (default: all of the GPU)")
    run.add_argument("--max_s", type=float, help="begin no row after so many seconds")
    run.add_argument("--seed", type=int, default=0, help="of weights, masks and token ids (%(default)s)")
    run.add_argument("--small", action="store_true", help="tiny shapes, on the CPU")
    run.add_argument("--plot", type=Path, help="PNG of the peaks; needs matplotlib")


def problem(args: Namespace) -> str:
    """The error in the options; empty if they are valid. Fills the defaults that depend on `--small`."""
    allowed = [name for name in SHAPES if (name in SMALL_SHAPES) == args.small]
    args.shapes = args.shapes or allowed
    if args.small:
        args.sequence_length = min(args.sequence_length, 32)
    if error := (
        one_of_each("shapes", args.shapes, allowed)
        or one_of_each("methods", args.methods, METHODS)
        or one_of_each("checkpointing", args.checkpointing, list(CHECKPOINTING))
        or out_of_range(args, "sequence_length", at_least=16)
        or out_of_range(args, "limit_gib", at_least=0)
    ):
        return error
    if args.cuda_graphs and (not set(args.methods) <= set(SPARSE_OPTIONS) or args.device == "cpu"):
        return f"--cuda_graphs needs a GPU and --methods of {','.join(SPARSE_OPTIONS)}"
    if args.n_steps <= cases(args)[0].n_warmup:
        return f"--n_steps {args.n_steps} leaves nothing after the {cases(args)[0].n_warmup} steps of the warm-up"
    if args.plot is None:
        return ""
    require_matplotlib("plot")
    return why_unwritable(args.plot)


def cases(args: Namespace) -> list[Case]:
    """The rows to measure, in this order."""
    names = (
        "compile",
        "cuda_graphs",
        "precomputed_reference",
        "sequence_length",
        "density",
        "pattern",
        "exclude",
        "lora_rank",
        "learning_rate",
    )
    shared = {name: getattr(args, name) for name in (*names, "n_steps", "seed", "device", "limit_gib")}
    return [
        Case(**shared, shape=shape, method=method, checkpointing=CHECKPOINTING[checkpointing])
        for shape in args.shapes
        for method in args.methods
        for checkpointing in args.checkpointing
    ]


def run(args: Namespace, report: Report) -> None:
    """Run every case in a process of its own, and keep the rows of the results file that are not measured again."""
    began, missing = time.monotonic(), cases(args)
    keys = {case.key() for case in missing}
    kept = []
    if args.output.is_file():
        kept = json.loads(args.output.read_text(encoding="utf-8")).get("rows", [])
    rows = [row for row in kept if case_of(row).key() not in keys]
    report |= {"rows": rows, "failed": [], "not_begun": []}
    with tempfile.TemporaryDirectory(prefix="sparse_opt_scale_") as folder:
        for case in missing:
            if args.max_s is not None and time.monotonic() - began > args.max_s:
                report["not_begun"].append(case.name)
                continue
            row = run_in_process("sparse_opt.bench.scale.run", case.name, asdict(case), Path(folder), ALLOCATOR)
            if row is None:
                report["failed"].append(case.name)
            else:
                rows.append({key: value for key, value in row.items() if key != "job"})
            write_json(args.output, report)  # an interrupted run keeps its rows
    if args.plot is not None and rows:
        plot(report, args.plot)
        print(f"plot: {args.plot}")


BENCHMARK = Benchmark(
    name="scale",
    doc=__doc__,
    options=options,
    problem=problem,
    measure=run,
    text=text,
    failures=lambda report, args: wrong_lines(report),
    partial=lambda args: args.max_s is not None,
    epilog=_EPILOG,
    output="bench/results/scale_{device}.json",
    device="auto",
)


def main(argv: Sequence[str] | None = None) -> int:
    return BENCHMARK.main(argv)


if __name__ == "__main__":
    sys.exit(main())
