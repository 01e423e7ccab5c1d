"""The kernels' table: every op and optimizer on the 197 matrices of a Llama-3.2-3B in bf16, beside its floor, its peers
and its target.

Each row is checked against the reference before it is timed. A missed target is shown and counted; only --strict ends
with 1 for it. A wrong result is never timed, and always ends with 1.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from sparse_opt import backends

from ..common.environment import environment
from ..common.report import table, why_unwritable, write_json
from ..common.rows import Row
from ..common.shapes import LLAMA_3_2_3B, LLAMA_3_2_3B_SIZES, scaled
from . import targets
from .bench import PARTS, KernelBench

# --quick: 1/16 of the elements, still larger than the L2 of an H200.
QUICK_NUMEL, QUICK_DELTA_NUMEL, QUICK_ROUNDS = 200_000_000, 2**26, 5
# Sizes for trying the table out on a CPU: a run takes seconds, and the tensors exceed most caches.
CPU_NUMEL, CPU_DELTA_NUMEL, CPU_ROUNDS = 8_000_000, 2**22, 5
FULL_DELTA_NUMEL, FULL_ROUNDS = 2**30, 20
TILE_TOKENS, CPU_TILE_TOKENS = (8192, 1024), (48,)

HEADERS = ("work", "backend", "density", "ms", "p20 - p80", "host ms", "floor ms", "x floor", "verdict", "target")


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table; return 0 if every result was correct (and with --strict every target met), else 1."""
    parser = argparse.ArgumentParser(prog="sparse-opt bench kernels", description=__doc__, allow_abbrev=False)
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=default, help="(%(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    add_options(parser)
    args = parser.parse_args(argv)
    if problem := why_wrong(args):
        parser.error(problem)
    device = torch.device(args.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        parser.error(f"device {device}: torch {torch.__version__} finds no CUDA device here")
    if args.json is not None and (problem := why_unwritable(args.json)):
        parser.error(problem)
    report: dict[str, Any] = {"benchmark": "kernels", "environment": environment(device), "completed": False}
    try:
        failures = run_table(report, args, device)
        report["completed"] = True
    finally:  # keep the results obtained before an error
        if args.json is not None:
            write_json(args.json, report)
    for failure in failures:
        print(f"WRONG RESULT: {failure}", file=sys.stderr)
    return 1 if failures or (args.strict and missed(report["kernels"])) else 0


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the table, which gpu_check shares."""
    parser.add_argument("--quick", action="store_true", help="time smaller tensors, fewer times")
    parser.add_argument("--numel", type=int, help=f"elements of all matrices (3.21 B; on a CPU {CPU_NUMEL})")
    parser.add_argument("--delta_numel", type=int, help=f"elements that are encoded (2^30; on a CPU {CPU_DELTA_NUMEL})")
    parser.add_argument("--n_rounds", type=int, help=f"timed calls of each row ({FULL_ROUNDS}; on a CPU {CPU_ROUNDS})")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no_peers", action="store_true", help="leave out the optimizers of other packages")
    parser.add_argument("--no_backward", action="store_true", help="leave out the backward pass (always so on a CPU)")
    parser.add_argument("--no_tiles", action="store_true", help="leave out the weight gradients by tiles")
    parser.add_argument("--only", metavar="PARTS", help=f"time these alone, of {','.join(PARTS)}")
    parser.add_argument("--strict", action="store_true", help="end with 1 if a target is missed")


def why_wrong(args: argparse.Namespace) -> str:
    """The error in these options; empty if they are valid."""
    unknown = sorted(set(_parts(args)) - set(PARTS))
    return f"--only {args.only}: no part {unknown[0]!r}, wanted some of {','.join(PARTS)}" if unknown else ""


def _parts(args: argparse.Namespace) -> tuple[str, ...]:
    return PARTS if args.only is None else tuple(args.only.split(","))


def run_table(report: dict[str, Any], args: argparse.Namespace, device: torch.device) -> list[str]:
    """Fill ``report["kernels"]`` and print the table; return the failures."""
    cpu = device.type == "cpu"
    numel = args.numel or (QUICK_NUMEL if args.quick else CPU_NUMEL if cpu else None)
    delta_numel = QUICK_DELTA_NUMEL if args.quick else CPU_DELTA_NUMEL if cpu else FULL_DELTA_NUMEL
    n_rounds = QUICK_ROUNDS if args.quick else CPU_ROUNDS if cpu else FULL_ROUNDS
    bench = KernelBench(
        LLAMA_3_2_3B if numel is None else scaled(LLAMA_3_2_3B, numel),
        device,
        [name for name in backends.available(device) if name != "reference"],
        delta_numel=args.delta_numel or delta_numel,
        n_rounds=args.n_rounds or n_rounds,
        seed=args.seed,
        with_peers=not args.no_peers,
        backward_sizes=None if args.no_backward or cpu else LLAMA_3_2_3B_SIZES,
        tile_tokens=() if args.no_tiles else CPU_TILE_TOKENS if cpu else TILE_TOKENS,
        parts=_parts(args),
        on_row=_print_row,
        on_failure=lambda failure: print(f"WRONG RESULT, not timed: {failure}", flush=True),
    )
    try:
        bench.run()
    finally:
        report["kernels"] = bench.as_dict()
    print(f"\n{text(report)}")
    return bench.failures


def missed(kernels: Mapping[str, Any]) -> list[targets.Verdict]:
    """The targets that the rows of a report miss."""
    return [verdict for verdict in targets.judge(kernels["rows"]) if not verdict.met]


def text(report: Mapping[str, Any]) -> str:
    """The table, the rows left out, the missed targets, and the counts of both."""
    found, machine = report["kernels"], report["environment"]["machine"]
    verdicts = targets.judge(found["rows"])
    missing = missed(found)
    return "\n".join(
        [
            f"{found['n_matrices']} bf16 matrices of {found['numel'] / 1e9:.3g} B elements; deltas of "
            f"{found['delta_numel'] / 1e6:.4g} M; {machine.get('gpu', {}).get('name', machine['cpu'])}; "
            f"copy {found['copy_gb_per_s']:.0f} GB/s",
            table(HEADERS, [cells(row, verdicts) for row in found["rows"]], n_words=2, n_last_words=2),
            *(f"not timed: {work}: {why}" for work, why in found["left_out"].items()),
            *(f"missed: {verdict.text}" for verdict in missing),
            f"{len(verdicts)} targets, set for an H200 and all 3.21 B elements: "
            f"{len(verdicts) - len(missing)} met, {len(missing)} missed",
        ]
    )


def cells(row: Mapping[str, Any], verdicts: Sequence[targets.Verdict]) -> list[str]:
    """One line of the table, in the order of HEADERS."""
    ratio = targets.x_floor(row)
    own = targets.of_row(row, verdicts)
    return [
        row["work"],
        row["backend"],
        "" if row["density"] is None else f"{row['density']:.1%}",
        f"{row['ms']:.3f}",
        f"{row['p20_ms']:.3f} - {row['p80_ms']:.3f}",
        f"{row['host_ms']:.3f}",
        "" if row["floor_ms"] is None else f"{row['floor_ms']:.3f}",
        "" if ratio is None else f"{ratio:.2f}",
        "" if not own else "met" if all(verdict.met for verdict in own) else "missed",
        "; ".join(verdict.target for verdict in own),
    ]


def _print_row(row: Row) -> None:
    # Verdicts are omitted here: targets compare rows with each other, so they need the complete table.
    print("  ".join(cell for cell in cells(row.as_dict(), ()) if cell), flush=True)


if __name__ == "__main__":
    sys.exit(main())
