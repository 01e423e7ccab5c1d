"""`sparse-opt bench NAME ...`: run a benchmark of `sparse_opt.bench`. Each checks its results before timing."""

from __future__ import annotations

import importlib
from collections.abc import Sequence

from ..options import CommandParser

# Name -> (module of sparse_opt.bench, what its main(argv) measures).
BENCHMARKS = {
    "baseline": (
        "training.baseline.main",
        "a step of DPO, GRPO or DPO in TRL, full, sparse and with adapters: time by section, and peak memory",
    ),
    "delta": (
        "delta.bench",
        "patches: bytes per changed weight, and speed, compared with other encodings; the time to activate a delta",
    ),
    "distributed": (
        "distributed.main",
        "a step on several GPUs: replicate and FSDP2, sparse and dense: time, peak memory, bytes reduced",
    ),
    "grpo_engine": (
        "grpo_engine",
        "GRPO in TRL with a vLLM on the same GPU, dense, LoRA and tiles: time by section, cache, log-probabilities",
    ),
    "kernels": (
        "kernels.table",
        "every op and optimizer on the shapes of a 3B model, with bandwidth bounds, peers and targets",
    ),
    "profiles": (
        "training.profiles",
        "RFT's profiles compared with plain training: tokens per second, memory, accuracy",
    ),
    "report": ("report", "show the rows that benchmarks wrote, judge them by the targets, compare runs"),
    "scale": (
        "scale",
        "the largest model of one GPU: peak memory and time of a DPO step, by model size, dense, LoRA and sparse",
    ),
    "verl": (
        "verl.main",
        "verl's actor update on several GPUs, the sparse engine compared with verl's own: time, peak memory",
    ),
    "weight_sync": (
        "weight_sync",
        "weight updates from a trainer to another GPU: the active weights compared with all weights, time and bytes",
    ),
}

_EPILOG = """examples:
  sparse-opt bench baseline dpo
  sparse-opt bench kernels --numel 200000000
  sparse-opt bench report bench/results/kernels_gpu.json part=tiles
  sparse-opt bench report before.json after.json
  sparse-opt bench kernels --help
"""


def run(argv: Sequence[str]) -> int:
    """Run the named benchmark with the remaining words and return its exit code."""
    width = max(map(len, BENCHMARKS))
    names = "\n".join(f"  {name:<{width}}  {summary}" for name, (_, summary) in BENCHMARKS.items())
    parser = CommandParser(
        prog="sparse-opt bench",
        usage="sparse-opt bench NAME [options]",
        description="Run a benchmark.\n\n" + names,
        epilog=_EPILOG,
    )
    parser.add_argument("name", metavar="NAME", choices=BENCHMARKS, help="a benchmark of the list above")
    args = parser.parse_words([word.replace("-", "_") if word[:1] != "-" else word for word in argv[:1]])
    module, _ = BENCHMARKS[args.name]
    return importlib.import_module(f"sparse_opt.bench.{module}").main(list(argv[1:]))
