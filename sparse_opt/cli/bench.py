"""`sparse-opt bench NAME ...`: run a benchmark of `sparse_opt.bench`. Each checks its results before timing."""

from __future__ import annotations

import importlib
from collections.abc import Sequence

from .parser import CommandParser

# Name -> (module of sparse_opt.bench, what its main(argv) measures).
BENCHMARKS = {
    "baseline": (
        "training.baseline.main",
        "a step of DPO or GRPO end to end, dense, sparse, LoRA and SHiRA: time by section, and peak memory",
    ),
    "cpu_step": ("kernels.cpu_step", "the optimizer step on a CPU, sparse beside torch.optim.AdamW(fused=True)"),
    "delta": (
        "delta.bench",
        "patches: bytes for each changed weight, and speed, beside other ways to keep what changed",
    ),
    "delta_logging": (
        "training.delta_logging",
        "a training loop that logs every step, beside one that does not: time a step, and memory",
    ),
    "gpu_check": (
        "kernels.gpu_check",
        "what has to hold on a GPU: the tests, the memory checker, and the table of kernels",
    ),
    "kernels": (
        "kernels.table",
        "every op and optimizer on the shapes of a 3B model, beside floors, peers and targets",
    ),
    "learning": (
        "training.learning.main",
        "what the loops learn on generated arithmetic: dense, LoRA, sparse, by learning rate and mask pattern",
    ),
    "profiles": (
        "training.profiles.main",
        "RFT's profiles beside plain training: time, memory, accuracy, and each optimisation on and off",
    ),
}

_EPILOG = """examples:
  sparse-opt bench baseline dpo
  sparse-opt bench kernels --numel 200000000
  sparse-opt bench cpu_step --help
"""


def run(argv: Sequence[str]) -> int:
    """Run the named benchmark with the remaining words and return its exit code."""
    width = max(map(len, BENCHMARKS))
    names = "\n".join(f"  {name:<{width}}  {summary}" for name, (_, summary) in BENCHMARKS.items())
    parser = CommandParser(
        prog="sparse-opt bench",
        usage="sparse-opt bench NAME [its own arguments]",
        description="Run a benchmark.\n\n" + names,
        epilog=_EPILOG,
    )
    parser.add_argument("name", metavar="NAME", choices=BENCHMARKS, help="one of the above")
    args = parser.parse_words([word.replace("-", "_") if word[:1] != "-" else word for word in argv[:1]])
    module, _ = BENCHMARKS[args.name]
    return importlib.import_module(f"sparse_opt.bench.{module}").main(list(argv[1:]))
