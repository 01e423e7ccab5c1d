"""verl's actor update under FSDP2: the sparse engine compared with verl's own engine and its AdamW.

An actor update is what verl's worker does with a batch of responses: forward and backward passes of its policy loss in
micro-batches, clipping, the optimizer's step and that of the schedule. Both engines are built in the same processes
from the same weights, one process per GPU, and make their first update on the same batch: the update of the active
elements must be the same, except for rounding. Then they are timed in turns. The memory of an engine is the peak of the
allocator during an update, less what the other engine holds. Neither vLLM nor Ray is part of it.

Needs verl 0.9.1 in the environment, as in that of `make test-verl`. verl has no platform for the CPU: --small runs only
with that of tests/verl_engine/cpu_platform.py, which those tests register.
"""

from __future__ import annotations

import os
import tempfile
from argparse import Namespace
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from sparse_opt.cli.doctor import installed_version
from sparse_opt.errors import SparseOptError
from sparse_opt.masks.patterns import PATTERNS
from sparse_opt.options import CommandParser

from .. import ranks
from ..harness import Benchmark, WrongResult, not_between, run_in_process
from ..rows import Case, Row, Run
from ..shapes import LLAMAS

# Options that the cases of all rows have, and what is the same in all runs.
_SETTINGS = (
    *("shape", "gpus", "density", "pattern", "sequence_length", "batch_size", "micro_batch_size"),
    *("gradient_checkpointing", "fused_kernels", "learning_rate", "seed"),
)
_FIXED = {"model_dtype": "fp32", "attention": "sdpa", "clip_grad": 1.0}
# Environment variables that verl reads on GPUs when it is imported.
VERL_ON_GPUS = {
    "VERL_PLATFORM": "nvidia",
    "VERL_ENGINE_DEVICE": "cuda",
    "VERL_USE_EXTERNAL_MODULES": "sparse_opt.integrations.verl",
}

_EPILOG = """examples:
  sparse-opt bench verl                                      # 3B shape on two GPUs
  sparse-opt bench verl --gpus 4 --gradient_checkpointing    # as verl's default configuration
"""


def options(parser: CommandParser) -> None:
    shapes = [name for name in LLAMAS if name != "70b"]  # both engines are on the GPUs at once
    what, run = ranks.add_options(parser, shapes)
    parser.set_defaults(sequence_length=1024)
    what.add_argument("--pattern", choices=tuple(PATTERNS), default="tile64", help="of the mask (%(default)s)")
    what.add_argument("--batch_size", type=int, default=4, help="sequences of an update on each GPU (%(default)s)")
    what.add_argument("--micro_batch_size", type=int, default=2, help="of these at once (%(default)s)")
    what.add_argument("--gradient_checkpointing", action="store_true", help="recompute activations in each layer")
    what.add_argument(
        "--fused_kernels",
        choices=("none", "torch", "triton"),
        default="torch",
        help="verl's fused log-probabilities, as use_fused_kernels (%(default)s); without flash-attn, none is a loop "
        "over tokens",
    )
    run.add_argument("--gpus", type=int, default=2, help="of this host (%(default)s)")
    run.add_argument("--n_rounds", type=int, default=20, help="timed updates of each engine (%(default)s)")
    run.add_argument("--folder", type=Path, help="keeps the model and the mask for later runs (default: temporary)")


def problem(args: Namespace) -> str:
    """The error in the options; empty if they are valid."""
    on_cpu = args.device == "cpu"
    if args.small:
        args.density = max(args.density, 0.25)  # the matrices have 8 to 32 tiles
    if error := not_between(args, "sequence_length", at_least=4) or ranks.problem(args, "verl"):
        return error
    if args.batch_size % args.micro_batch_size:
        return f"--batch_size {args.batch_size} is no multiple of --micro_batch_size {args.micro_batch_size}"
    if error := not_between(args, "gpus", at_least=2):
        return error
    if not on_cpu and args.gpus > torch.cuda.device_count():
        return f"--gpus {args.gpus}: torch sees {torch.cuda.device_count()}"
    if find_spec("verl") is None:
        return "verl is not installed here: `make test-verl` installs it into an environment of its own, build/verl"
    if on_cpu and os.environ.get("VERL_PLATFORM") != "cpu":
        return "--device cpu: verl has no platform for the CPU; tests/verl_engine/cpu_platform.py is that of the tests"
    return ""


def measure(args: Namespace, run: Run) -> None:
    """Run the engines in processes of a torchrun, and add their rows."""
    settings = _FIXED | {name: getattr(args, name) for name in _SETTINGS}
    with tempfile.TemporaryDirectory(prefix="sparse_opt_verl_") as temporary:
        job = settings | {"device": args.device, "n_rounds": args.n_rounds}
        job["mask_dir"] = str(args.folder or temporary)
        variables = VERL_ON_GPUS if args.device == "cuda" else {}
        result = run_in_process(
            "sparse_opt.bench.verl.world", "verl", job, Path(temporary), variables, n_ranks=args.gpus
        )
    if result is None:
        raise SparseOptError("the run did not end")
    check = result["check"]
    errors = (
        f"gradients of the active elements differ by {check['moment_error']:.1e}, expected at most "
        f"{check['moment_tolerance']:.1e}; updates by {check['update_error']:.1e}, expected at most "
        f"{check['update_tolerance']:.1e}"
    )
    if not check["met"]:
        raise WrongResult(f"the first updates of the engines differ: {errors}")
    run.add(*result_rows(result, settings | {"verl": installed_version("verl")}))
    run.note(f"the first updates agree: {errors}")


def result_rows(result: Mapping[str, Any], settings: Case) -> list[Row]:
    """The rows of the engines, the sparse one compared with verl's."""
    found = []
    for one in result["rows"]:
        case: Case = {"engine": one["engine"], **settings}
        peers: dict[str, float | Case] = {"fsdp2": {"engine": "fsdp2"}} if one["engine"] != "fsdp2" else {}
        shared: dict[str, Any] = {"suite": "verl", "case": case, "peers": peers}
        found.append(Row.of_timing(one, **shared))
        for metric, key in (("peak memory", "peak_memory_bytes"), ("memory between updates", "held_bytes")):
            if one[key] is not None:
                found.append(Row(**shared, metric=metric, unit="bytes", value=one[key]))
    return found


main = Benchmark(
    name="verl",
    doc=__doc__,
    options=options,
    problem=problem,
    measure=measure,
    epilog=_EPILOG,
    output="bench/results/verl.json",
).main
