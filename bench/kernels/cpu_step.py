"""The optimizer step on a CPU: SparseAdamW on a few active elements, beside torch's fused AdamW on all of them.

The sparse step is checked first, against `torch.optim.AdamW` whose gradients are multiplied by the mask. Then all steps
are timed in turns in one run.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sparse_opt import MaskSet, backends

from ..common.environment import environment
from ..common.report import table, why_unwritable, write_json
from ..common.shapes import LLAMA_64M, scaled, total_numel
from ..common.timing import Timing, measure
from . import floors
from .cases import WrongResult
from .inputs import random_tensors
from .optimizers import LR, WEIGHT_DECAY, Gradients, Named, parameters, sparse_adamw, step_again, torch_adamw

CHECKED_STEPS = 3
DENSE = "torch.optim.AdamW(fused=True)"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; return 0 if the sparse step is correct and fast enough, else 1."""
    parser = _parser()
    args = parser.parse_args(argv)
    problem = "" if args.json is None else why_unwritable(args.json)
    problem = problem or backends.why_unavailable(args.backend, "cpu")
    if problem:
        parser.error(problem)
    threads = torch.get_num_threads()
    torch.set_num_threads(args.threads)
    try:
        report = run(args)
    except WrongResult as error:
        print(f"WRONG RESULT, nothing was timed: {error}", file=sys.stderr)
        return 1
    finally:
        torch.set_num_threads(threads)
    print(_text(report))
    if args.json is not None:
        write_json(args.json, report)
    if report["ratio"] < args.min_ratio:
        print(f"TOO SLOW: {report['ratio']:.2f} times as fast as {DENSE}, wanted {args.min_ratio:g}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="sparse-opt bench cpu_step", description=__doc__, allow_abbrev=False)
    parser.add_argument("--numel", type=int, default=total_numel(LLAMA_64M), help="fp32 parameters (%(default)s)")
    parser.add_argument("--density", type=float, default=0.025, help="share of active elements (%(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (%(default)s)")
    parser.add_argument("--backend", default="cpu", help="of the sparse step (%(default)s)")
    parser.add_argument("--n_rounds", type=int, default=15, help="timed steps of each variant (%(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--min_ratio",
        type=float,
        default=4.0,
        help="how many times as fast the sparse step has to be, from either kind of gradients (%(default)s)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    return parser


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Check, then time. Raises WrongResult."""
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
    return {
        "benchmark": "cpu_step",
        "environment": environment("cpu"),
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
            found, wanted = flat[active][at].item(), expected[name][at].item()
            raise WrongResult(
                f"{what}: {name} at {int(active[at])} is {found!r} after {CHECKED_STEPS} steps, "
                f"masked torch.optim.AdamW gives {wanted!r}; {int(wrong.sum())} of {len(wrong)} differ"
            )
        moved = flat.view(torch.int32) != start[name].view(-1).view(torch.int32)
        moved[active] = False
        if moved.any():
            raise WrongResult(f"{what}: {name} changed at {int(moved.nonzero()[0])}, outside the mask")


def _copies(weights: dict[str, Tensor]) -> Named:
    return parameters({name: weight.clone() for name, weight in weights.items()})


def _row(name: str, timing: Timing, ratio: float, mask: MaskSet) -> dict[str, Any]:
    if name == DENSE:
        nbytes = floors.dense_adamw_bytes(mask.numel, param_itemsize=4)
    else:
        nbytes = floors.adamw_bytes(
            mask.numel, mask.nnz, param_itemsize=4, grad_itemsize=4, dense_grads="dense gradients" in name
        )
    return {"step": name, **timing.as_dict(), "times_as_fast": ratio, "bytes": nbytes}


def _text(report: dict[str, Any]) -> str:
    where = report["environment"]
    rows = [
        [
            row["step"],
            f"{row['ms']:.2f}",
            f"{row['p20_ms']:.2f} - {row['p80_ms']:.2f}",
            f"{row['bytes'] / 1e6:.0f}",
            f"{row['times_as_fast']:.2f}",
        ]
        for row in report["rows"]
    ]
    return "\n".join(
        [
            f"{report['numel'] / 1e6:.1f} M fp32 parameters in {report['n_tensors']} matrices, "
            f"{report['nnz'] / 1e6:.2f} M active ({report['nnz'] / report['numel']:.2%}), backend {report['backend']}",
            f"{where['machine']['cpu']}, {report['threads']} threads, torch {where['versions']['torch']}, "
            f"commit {where['commit']}",
            table(("one step", "median ms", "p20 - p80", "least MB", "times as fast"), rows),
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
