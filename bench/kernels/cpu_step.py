"""The optimizer step on a CPU: SparseAdamW on a few active elements, and torch's fused AdamW on all of them.

The sparse step is checked first, bit by bit against the reference. Then all steps are timed in turns in one run.
"""

from __future__ import annotations

import functools
import sys
from argparse import Namespace
from collections.abc import Callable

import torch
from torch import Tensor

from sparse_opt import MaskSet, backends
from sparse_opt.cli.parser import CommandParser
from sparse_opt.errors import ConfigError

from ..common.harness import Benchmark, Report
from ..common.report import Columns, machine_line, render
from ..common.shapes import LLAMA_64M, scaled, total_numel
from ..common.timing import measure
from . import bounds
from .inputs import random_tensors
from .optimizers import (
    Gradients,
    Named,
    active_of,
    check_first_step,
    parameters,
    sparse_adamw,
    step_again,
    step_bytes,
    torch_adamw,
)

COLUMNS: Columns = {
    "one step": "{step}",
    "median ms": "{ms:.2f}",
    "p20 - p80": "{p20_ms:.2f} - {p80_ms:.2f}",
    "least MB": lambda row: f"{row['bytes'] / 1e6:.0f}",
    "times as fast": "{times_as_fast:.2f}",
}
DENSE = "torch.optim.AdamW(fused=True)"


def options(parser: CommandParser) -> None:
    parser.add_argument("--numel", type=int, default=total_numel(LLAMA_64M), help="fp32 parameters (%(default)s)")
    parser.add_argument("--density", type=float, default=0.025, help="share of active elements (%(default)s)")
    parser.add_argument("--backend", default="cpu", help="backend of the sparse step (%(default)s)")
    parser.add_argument("--n_rounds", type=int, default=15, help="timed steps of each variant (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="(%(default)s)")
    parser.add_argument(
        "--min_ratio",
        type=float,
        default=3.5,
        help="required speed-up of the sparse step, with dense and with compact gradients (%(default)s)",
    )


def run(args: Namespace, report: Report) -> None:
    """Check, then time."""
    shapes = scaled(LLAMA_64M, args.numel)
    generator = torch.Generator().manual_seed(args.seed)
    weights = dict(zip(shapes, random_tensors(shapes, torch.float32, generator, scale=0.02), strict=True))
    grads = dict(zip(shapes, random_tensors(shapes, torch.float32, generator), strict=True))
    mask = MaskSet.random(shapes, density=args.density, seed=args.seed)
    if not mask.nnz:
        raise ConfigError(f"--density {args.density:g} of {mask.numel} elements is less than one in each matrix")

    active = active_of(mask, torch.device("cpu"))

    steps: dict[str, Callable[[], object]] = {}
    kinds: tuple[Gradients, ...] = ("dense", "compact")
    for gradients in kinds:
        params = _copies(weights)
        optimizer = sparse_adamw(params, grads, mask, gradients, args.backend)
        check_first_step(optimizer, params, grads, active)
        steps[f"SparseAdamW, {gradients} gradients"] = functools.partial(step_again, optimizer)
    steps[DENSE] = torch_adamw(_copies(weights), grads).step

    found = measure(steps, n_warmup=3, n_rounds=args.n_rounds)
    ratios = {name: found[DENSE].ms / timing.ms for name, timing in found.items()}
    nbytes = {
        f"SparseAdamW, {kind} gradients": step_bytes(optimizer, param_itemsize=4, dense_grads=kind == "dense")
        for kind in kinds
    } | {DENSE: bounds.dense_adamw_traffic(mask.numel, param_itemsize=4).bytes}
    report |= {
        "threads": args.threads,
        "backend": args.backend,
        "numel": mask.numel,
        "nnz": mask.nnz,
        "n_tensors": len(shapes),
        "rows": [
            {"step": name, **found[name].as_dict(), "times_as_fast": ratios[name], "bytes": nbytes[name]}
            for name in steps
        ],
        "ratio": min(ratio for name, ratio in ratios.items() if name != DENSE),
    }


def _copies(weights: dict[str, Tensor]) -> Named:
    return parameters({name: weight.clone() for name, weight in weights.items()})


def text(report: Report) -> str:
    return (
        f"{report['numel'] / 1e6:.1f} M fp32 parameters in {report['n_tensors']} matrices, "
        f"{report['nnz'] / 1e6:.2f} M active ({report['nnz'] / report['numel']:.2%}), backend {report['backend']}\n"
        f"{machine_line(report)}; {report['threads']} threads\n{render(COLUMNS, report['rows'])}"
    )


def failures(report: Report, args: Namespace) -> list[str]:
    if report["ratio"] >= args.min_ratio:
        return []
    return [f"TOO SLOW: {report['ratio']:.2f} times as fast as {DENSE}, expected at least {args.min_ratio:g}"]


main = Benchmark(
    name="cpu_step",
    doc=__doc__,
    options=options,
    problem=lambda args: backends.why_unavailable(args.backend, "cpu"),
    measure=run,
    text=text,
    failures=failures,
    threads=2,
).main

if __name__ == "__main__":
    sys.exit(main())
