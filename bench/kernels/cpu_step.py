"""The optimizer step on a CPU: SparseAdamW on a few active elements, beside torch's fused AdamW on all of them.

The sparse step is checked first, against `torch.optim.AdamW` whose gradients are multiplied by the mask. Then all steps
are timed in turns in one run.
"""

from __future__ import annotations

import functools
import sys
from argparse import Namespace
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from sparse_opt import MaskSet, backends
from sparse_opt.cli.parser import CommandParser

from ..common.harness import Benchmark, Report, WrongResult
from ..common.report import Columns, machine_line, render
from ..common.shapes import LLAMA_64M, scaled, total_numel
from ..common.timing import Timing, measure
from . import floors
from .inputs import random_tensors
from .optimizers import LR, WEIGHT_DECAY, Gradients, Named, parameters, sparse_adamw, step_again, torch_adamw

CHECKED_STEPS = 3
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
        default=4.0,
        help="required speed-up of the sparse step, with dense and with compact gradients (%(default)s)",
    )


def run(args: Namespace, report: Report) -> None:
    """Check, then time."""
    shapes = scaled(LLAMA_64M, args.numel)
    generator = torch.Generator().manual_seed(args.seed)
    weights = dict(zip(shapes, random_tensors(shapes, torch.float32, generator, scale=0.02), strict=True))
    grads = dict(zip(shapes, random_tensors(shapes, torch.float32, generator), strict=True))
    mask = MaskSet.random(shapes, density=args.density, seed=args.seed)

    steps: dict[str, Callable[[], object]] = {}
    expected = masked_torch_weights(weights, grads, mask)
    kinds: tuple[Gradients, ...] = ("dense", "compact")
    for gradients in kinds:
        params = _copies(weights)
        optimizer = sparse_adamw(params, grads, mask, gradients, args.backend)
        for _ in range(CHECKED_STEPS):
            step_again(optimizer)
        check_weights(f"SparseAdamW, {gradients} gradients", params, weights, expected, mask)
        steps[f"SparseAdamW, {gradients} gradients"] = functools.partial(step_again, optimizer)
    del expected
    steps[DENSE] = torch_adamw(_copies(weights), grads).step

    found = measure(steps, n_warmup=3, n_rounds=args.n_rounds)
    ratios = {name: found[DENSE].ms / timing.ms for name, timing in found.items()}
    report |= {
        "threads": args.threads,
        "backend": args.backend,
        "numel": mask.numel,
        "nnz": mask.nnz,
        "n_tensors": len(shapes),
        "rows": [_row(name, found[name], ratios[name], mask) for name in steps],
        "ratio": min(ratio for name, ratio in ratios.items() if name != DENSE),
    }


def masked_torch_weights(weights: dict[str, Tensor], grads: dict[str, Tensor], mask: MaskSet) -> dict[str, Tensor]:
    """The active weights, [nnz] each, after some steps of torch's AdamW on gradients multiplied by the mask."""
    expected = {}
    for name, weight in weights.items():
        param = nn.Parameter(weight.clone())
        param.grad = grads[name] * mask.bool(name)
        optimizer = torch.optim.AdamW([param], lr=LR, weight_decay=WEIGHT_DECAY)
        for _ in range(CHECKED_STEPS):
            optimizer.step()
        expected[name] = param.detach().view(-1)[mask[name].long()]
    return expected


def check_weights(
    what: str, params: Named, start: dict[str, Tensor], expected: dict[str, Tensor], mask: MaskSet
) -> None:
    """Raise WrongResult unless active elements are as expected up to rounding, and the others kept their bits."""
    for name, param in params.items():
        flat, active = param.detach().view(-1), mask[name].long()
        # In both implementations, each step rounds the weight three times (decay, update, their sum) and the update
        # about eight times. The update is no larger than the learning rate while the gradient keeps its sign.
        unit = CHECKED_STEPS * 2.0**-23
        allowed = unit * (3 * expected[name].abs() + 8 * LR)
        wrong = ~((flat[active] - expected[name]).abs() <= allowed)
        if wrong.any():
            at = int(wrong.nonzero()[0])
            found, should = flat[active][at].item(), expected[name][at].item()
            raise WrongResult(
                f"{what}: {name} at {int(active[at])} is {found!r} after {CHECKED_STEPS} steps, "
                f"masked torch.optim.AdamW gives {should!r}; {int(wrong.sum())} of {len(wrong)} differ"
            )
        moved = flat.view(torch.int32) != start[name].view(-1).view(torch.int32)
        moved[active] = False
        if moved.any():
            raise WrongResult(f"{what}: {name} changed at {int(moved.nonzero()[0])}, outside the mask")


def _copies(weights: dict[str, Tensor]) -> Named:
    return parameters({name: weight.clone() for name, weight in weights.items()})


def _row(name: str, timing: Timing, ratio: float, mask: MaskSet) -> dict[str, Any]:
    sizes: dict[str, Any] = {"param_itemsize": 4, "grad_itemsize": 4, "dense_grads": "dense gradients" in name}
    dense = floors.dense_adamw_bytes(mask.numel, param_itemsize=4)
    nbytes = dense if name == DENSE else floors.step_bytes(mask.numel, mask.nnz, states=2, **sizes)
    return {"step": name, **timing.as_dict(), "times_as_fast": ratio, "bytes": nbytes}


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
