"""The largest model that one GPU trains: peak memory and time of a DPO step, by model size and mode.

This is `sparse-opt bench baseline dpo` with other defaults: all shapes, --modes dense,lora,tiles, --lean, and masks of
the matrices alone. The shapes are 3b Llama-3.2-3B, 8b Llama-3.1-8B, 14b Qwen2.5-14B, 32b Qwen2.5-32B, 70b Llama-3-70B;
qwen3_30b_a3b Qwen3-30B-A3B, a mixture of experts, and the same with 98 layers, which no published model has.
With --limit_gib, torch's allocator gets that much memory, as on a smaller GPU: 78 for a GPU of 80 GB. With --resume,
rows of the results file that are not measured again are kept.
"""

from __future__ import annotations

from argparse import Namespace

from sparse_opt.options import CommandParser

from .harness import Benchmark
from .training.baseline import main as baseline

_EPILOG = """examples:
  sparse-opt bench scale --shapes 32b --modes tiles --gradient_checkpointing --limit_gib 78
  sparse-opt bench scale --small                                     # tiny models, on the CPU
"""


def options(parser: CommandParser) -> None:
    baseline.options(parser)
    parser.set_defaults(algorithm="dpo", modes=["dense", "lora", "tiles"], lean=True, exclude=["*norm*", "*bias"])
    parser.set_defaults(sequence_length=1024, n_steps=4, n_warmup=1)


def problem(args: Namespace) -> str:
    """The error in the options; empty if they are valid."""
    args.shapes = args.shapes or baseline.allowed_shapes(args.small)
    if args.small:
        args.sequence_length = min(args.sequence_length, 32)
    return baseline.problem(args)


main = Benchmark(
    name="scale",
    doc=__doc__,
    options=options,
    problem=problem,
    measure=baseline.measure,
    epilog=_EPILOG,
    output="bench/results/scale_{device}.json",
).main
