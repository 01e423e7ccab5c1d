"""The optimizer step on a CPU: SparseAdamW on a few active elements, and torch's fused AdamW on all of them.

The sparse step is checked first, bit by bit against the reference. Then all steps are timed in turns.
"""

from __future__ import annotations

import functools
import sys
from argparse import Namespace

import torch
from torch import Tensor

from sparse_opt import MaskSet, backends
from sparse_opt.cli.parser import CommandParser
from sparse_opt.errors import ConfigError, MaskError

from ..harness import Benchmark, Work, time_works
from ..rows import Run
from ..shapes import LLAMA_64M, scaled, total_numel
from .inputs import random_tensors
from .optimizers import (
    Gradients,
    Named,
    active_of,
    check_first_step,
    parameters,
    sparse_adamw,
    step_again,
    torch_adamw,
)

DENSE = "torch.optim.AdamW(fused=True)"
KINDS: tuple[Gradients, ...] = ("dense", "compact")


def options(parser: CommandParser) -> None:
    what = parser.add_argument_group("what is timed")
    what.add_argument("--numel", type=int, default=total_numel(LLAMA_64M), help="fp32 parameters (%(default)s)")
    what.add_argument("--density", type=float, default=0.025, help="share of active elements (%(default)s)")
    what.add_argument("--backend", default="cpu", help="backend of the sparse step (%(default)s)")
    what.add_argument("--n_rounds", type=int, default=15, help="timed steps of each variant (%(default)s)")
    what.add_argument("--seed", type=int, default=0, help="(%(default)s)")


def measure(args: Namespace, run: Run) -> None:
    """Check, then time."""
    shapes = scaled(LLAMA_64M, args.numel)
    generator = torch.Generator().manual_seed(args.seed)
    weights = dict(zip(shapes, random_tensors(shapes, torch.float32, generator, scale=0.02), strict=True))
    grads = dict(zip(shapes, random_tensors(shapes, torch.float32, generator), strict=True))
    try:
        mask = MaskSet.random(shapes, density=args.density, seed=args.seed)
    except MaskError as error:
        raise ConfigError(f"--density: {error}") from error
    active = active_of(mask, torch.device("cpu"))
    common = {"numel": mask.numel, "threads": args.threads}
    peers = {"fused AdamW": {"work": DENSE, "backend": "torch", "density": None}}
    works = []
    for kind in KINDS:
        params = _copies(weights)
        optimizer = sparse_adamw(params, grads, mask, kind, args.backend)
        case = {"work": f"SparseAdamW, {kind} gradients", "backend": args.backend, "density": args.density, **common}
        check = functools.partial(check_first_step, optimizer, params, grads, active)
        works.append(Work(case, functools.partial(step_again, optimizer), check, dict(peers)))
    dense = torch_adamw(_copies(weights), grads)
    works.append(Work({"work": DENSE, "backend": "torch", **common}, dense.step))
    time_works(run, "cpu_step", works, torch.device("cpu"), args.n_rounds)


def _copies(weights: dict[str, Tensor]) -> Named:
    return parameters({name: weight.clone() for name, weight in weights.items()})


main = Benchmark(
    name="cpu_step",
    doc=__doc__,
    options=options,
    problem=lambda args: backends.why_unavailable(args.backend, "cpu"),
    measure=measure,
    device="cpu",
    threads=2,
).main

if __name__ == "__main__":
    sys.exit(main())
