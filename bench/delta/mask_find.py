"""Peak host memory and time of `mask find` on a log of a model's shape.

The benchmark writes a log of bf16 states. Each step changes about one element in a hundred by small multiples of its
size, as in reinforcement learning. A log that exists is used as it is. Each method then finds its mask in a process of
its own:

    python -m sparse_opt.bench.delta.mask_find /tmp/log_3b --json bench/results/mask_find.json  # a 3B model's shape
    python -m sparse_opt.bench.delta.mask_find /tmp/log_small --numel 1e8 --methods magnitude momentum

`anonymous` is the peak of the process's own memory, sampled every 10 ms. `resident` also counts pages of mapped files,
which the kernel may reclaim (VmHWM). The values before the start are subtracted from both. `limit` is the allowed
memory: per element of the largest tensor 4 bytes for the score, 1 to compare it, 2 for each of two states, 8 for each
of two sums (momentum, fisher), 2 for sums and ranks of units (patterns); 16 per active element, whose positions are
sorted, kept and put into the mask; and a fixed workspace. The digests of the masks must be equal on a CPU and on a GPU.
"""

from __future__ import annotations

import math
import multiprocessing
import sys
import threading
import time
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from sparse_opt.cli.parser import CommandParser
from sparse_opt.delta.log import DeltaLog
from sparse_opt.mask_finding.find import find_from_log
from sparse_opt.mask_finding.log_scores import LOG_METHODS
from sparse_opt.masks.patterns import PATTERNS

from ..common.harness import Benchmark, Report
from ..common.report import Columns, render
from ..common.shapes import LLAMA_3_2_3B, scaled

WORKSPACE = 300 * 2**20
_SAMPLE_SECONDS = 0.01
_CHUNK = 2**24


def options(parser: CommandParser) -> None:
    parser.add_argument("log", type=Path, help="folder of the log; written if it is empty or does not exist")
    parser.add_argument("--numel", type=lambda s: int(float(s)), help="elements, scaled from a Llama-3.2-3B's matrices")
    parser.add_argument("--n_steps", type=int, default=10, help="logged steps after the first (%(default)s)")
    parser.add_argument("--methods", nargs="+", choices=LOG_METHODS, default=list(LOG_METHODS))
    parser.add_argument("--patterns", nargs="+", choices=list(PATTERNS), default=["element", "run32"])
    parser.add_argument("--sparsity", type=float, default=97.5, help="percent (%(default)s)")


def run(args: Namespace, report: Report) -> None:
    """Find a mask by each method and pattern."""
    if not args.log.is_dir() or not any(args.log.iterdir()):
        write_log(args.log, args.numel, args.n_steps)
    rows = [
        measured(args.log, method, pattern, args.sparsity, args.device, args.threads)
        for method in args.methods
        for pattern in args.patterns
    ]
    log = DeltaLog.open(args.log)
    report |= {
        "numel": log.layout.numel,
        "n_tensors": len(log.layout.tensors),
        "largest_tensor": max(spec.numel for spec in log.layout.tensors),
        "steps": list(log.steps),
        "log_bytes": sum(path.stat().st_size for path in args.log.rglob("*") if path.is_file()),
        "sparsity": args.sparsity,
        "device": args.device,
        "threads": args.threads,
        "workspace_bytes": WORKSPACE,
        "rows": rows,
    }


def write_log(folder: Path, numel: int | None, n_steps: int) -> None:
    """A log of bf16 states of the model's shape, or of one scaled to `numel` elements."""
    shapes = LLAMA_3_2_3B if numel is None else scaled(LLAMA_3_2_3B, numel)
    generator = torch.Generator().manual_seed(0)
    state = {name: _normal(shape, generator) for name, shape in shapes.items()}
    with DeltaLog.create(folder, state, metadata={"model": "random weights"}) as log:
        for step in tqdm(range(1, n_steps + 1), desc="log", unit="step", disable=None):
            for tensor in state.values():
                _train(tensor, generator)
            log.append(step)


def _normal(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    flat = torch.empty(math.prod(shape), dtype=torch.bfloat16)
    for part in flat.split(_CHUNK):
        part.copy_(torch.randn(part.numel(), generator=generator).mul_(0.02))
    return flat.view(*shape)


def _train(tensor: Tensor, generator: torch.Generator) -> None:
    """Add 1 % of their size or less to one element in a hundred; the same ones are likelier in each step."""
    flat = tensor.view(-1)
    n = flat.numel() // 100
    # The square of a uniform number: low positions of each stretch are hit more often.
    at = (torch.rand(n, generator=generator, dtype=torch.float64).square_() * flat.numel()).long()
    flat[at] = (flat[at].float() * (1 + 0.02 * (torch.rand(n, generator=generator) - 0.3))).bfloat16()


def measured(log: Path, method: str, pattern: str, sparsity: float, device: str, threads: int) -> dict[str, Any]:
    """One finding in a fresh process."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_find, args=(sender, log, method, pattern, sparsity, device, threads))
    process.start()
    sender.close()
    try:
        row: dict[str, Any] = receiver.recv()
    except EOFError:
        process.join()
        raise RuntimeError(f"mask find {method} {pattern} ended with exit code {process.exitcode}") from None
    process.join()
    return row


def _find(sender: Any, log: Path, method: str, pattern: str, sparsity: float, device: str, threads: int) -> None:
    torch.set_num_threads(threads)
    if device == "cuda":
        torch.zeros(1, device=device)  # the memory of the CUDA context is not counted
        torch.cuda.reset_peak_memory_stats()
    opened = DeltaLog.open(log)
    before = _memory()
    sampler = _Sampler()
    start = time.perf_counter()
    # The parser has checked method and pattern, which the type checker cannot see.
    found = find_from_log(opened, method=method, sparsity=sparsity, pattern=pattern, device=device)  # type: ignore[arg-type]
    seconds = time.perf_counter() - start
    anonymous = sampler.stop()
    largest = max(spec.numel for spec in opened.layout.tensors)
    per_element = (
        4 + 1 + 2 * 2 + (2 * 8 if method in ("momentum", "fisher") else 0) + (2 if pattern != "element" else 0)
    )
    sender.send(
        {
            "method": method,
            "pattern": pattern,
            "seconds": seconds,
            "anonymous_bytes": max(0, anonymous - before["RssAnon"]),
            "resident_bytes": _memory()["VmHWM"] - before["VmRSS"],
            "limit_bytes": per_element * largest + 16 * found.mask.nnz + WORKSPACE,
            "gpu_bytes": torch.cuda.max_memory_allocated() if device == "cuda" else None,
            "nnz": found.mask.nnz,
            "digest": found.mask.digest,
            "captured_score": None if found.capture is None else found.capture.share,
        }
    )


def _memory() -> dict[str, int]:
    """Bytes of this process, by the kernel's names for them."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return {key: int(value.split()[0]) * 1024 for key, value in (line.split(":") for line in lines if "kB" in line)}


class _Sampler:
    """Samples the peak of this process's anonymous memory in a thread."""

    def __init__(self) -> None:
        self._most, self._stopped = 0, threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()

    def _sample(self) -> None:
        while not self._stopped.wait(_SAMPLE_SECONDS):
            self._most = max(self._most, _memory()["RssAnon"])

    def stop(self) -> int:
        self._stopped.set()
        self._thread.join()
        return max(self._most, _memory()["RssAnon"])


def _gib(key: str) -> Callable[[Mapping[str, Any]], str]:
    return lambda row: "" if row[key] is None else f"{row[key] / 2**30:.2f}"


COLUMNS: Columns = {
    "method": "{method}",
    "pattern": "{pattern}",
    "s": "{seconds:.1f}",
    "anonymous GiB": _gib("anonymous_bytes"),
    "limit GiB": _gib("limit_bytes"),
    "resident GiB": _gib("resident_bytes"),
    "GPU GiB": _gib("gpu_bytes"),
    "captured": lambda row: "" if row["captured_score"] is None else f"{100 * row['captured_score']:.1f} %",
    "digest": "{digest}",
}


def text(report: Report) -> str:
    return (
        f"{report['numel'] / 1e9:.2f} B elements in {report['n_tensors']} tensors, the largest of "
        f"{report['largest_tensor'] / 1e9:.3f} B; {len(report['steps'])} logged steps, "
        f"{report['log_bytes'] / 2**30:.2f} GiB; sparsity {report['sparsity']} %, {report['device']}, "
        f"{report['threads']} threads\n\n{render(COLUMNS, report['rows'], n_words=2)}"
    )


def failures(report: Report, args: Namespace) -> list[str]:
    return [
        f"TOO MUCH MEMORY: {row['method']} {row['pattern']} held {row['anonymous_bytes']} bytes, limit "
        f"{row['limit_bytes']}"
        for row in report["rows"]
        if row["anonymous_bytes"] > row["limit_bytes"]
    ]


main = Benchmark(
    name="mask_find",
    command="python -m sparse_opt.bench.delta.mask_find",
    doc=__doc__,
    options=options,
    measure=run,
    text=text,
    failures=failures,
    device="cpu",
    threads=torch.get_num_threads(),
).main

if __name__ == "__main__":
    sys.exit(main())
