"""`sparse-opt bench NAME ...`: run a benchmark of `sparse_opt.bench`. Each checks its result before it times it."""

from __future__ import annotations

import importlib
from collections.abc import Sequence

from .parser import CommandParser

# Module of sparse_opt.bench -> what its main(argv) measures.
BENCHMARKS = {
    "cpu_step": "the optimizer step on a CPU, sparse beside torch.optim.AdamW(fused=True)",
    "dpo_step": "a step of DPO, dense beside sparse, on a Llama-3.2-3B-shaped model: time and peak memory",
    "gpu_check": "what has to hold on a GPU: the tests, the memory checker, ops and steps beside their floors",
}

_EPILOG = """examples:
  sparse-opt bench cpu_step
  sparse-opt bench cpu_step --help
"""


def run(argv: Sequence[str]) -> int:
    """Hand the words after the benchmark's name to it, and its exit code back."""
    width = max(map(len, BENCHMARKS))
    names = "\n".join(f"  {name:<{width}}  {summary}" for name, summary in BENCHMARKS.items())
    parser = CommandParser(
        prog="sparse-opt bench",
        usage="sparse-opt bench NAME [its own arguments]",
        description="Run a benchmark.\n\n" + names,
        epilog=_EPILOG,
    )
    parser.add_argument("name", metavar="NAME", choices=BENCHMARKS, type=_module_name, help="one of the above")
    args = parser.parse_words(argv[:1])
    return importlib.import_module(f"sparse_opt.bench.{args.name}").main(list(argv[1:]))


def _module_name(word: str) -> str:
    return word.replace("-", "_")
