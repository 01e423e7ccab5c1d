"""Every op and optimizer on the 197 matrices of a Llama-3.2-3B in bf16, next to its bandwidth bound and its peers.

On a CPU the weights are fewer and fp32.

Each row is checked against the reference before it is timed. Its bound is the traffic of `bounds` at the rate of a
copy, which is measured first, and at an H200's rates of scattered writes. A wrong result is not timed, and fails the
run. With --resume, parts of the table can be measured by several calls: --only chooses them.
"""

from __future__ import annotations

import functools
from argparse import Namespace

import torch
from torch import Tensor

from sparse_opt import backends
from sparse_opt.options import CommandParser
from sparse_opt.tensors import as_bits

from ..harness import Benchmark, comma_separated, one_of_each
from ..rows import Run
from ..shapes import LLAMA_3_2_3B, LLAMA_64M, scaled, total_numel
from . import cases, tiles
from .cases import Active
from .recorder import TORCH, Recorder
from .weights import WeightRows

PARTS = ("weights", "tiles", "experts", "deltas")
DELTA_DENSITIES = (0.01, 0.025, 0.1)

# Sizes for trying the table out on a CPU: a run takes seconds, and the tensors exceed most caches.
CPU_NUMEL, CPU_DELTA_NUMEL, CPU_ROUNDS = 8_000_000, 2**22, 5
FULL_DELTA_NUMEL, FULL_ROUNDS = 2**30, 20
TILE_TOKENS, CPU_TILE_TOKENS = (8192, 1024), (48,)


def options(parser: CommandParser) -> None:
    what = parser.add_argument_group("what is timed")
    what.add_argument(
        "--only", type=comma_separated, metavar="PARTS", default=list(PARTS), help=f"of {','.join(PARTS)} (all)"
    )
    what.add_argument("--numel", type=int, help=f"elements of all matrices (3.21 B; on a CPU {CPU_NUMEL})")
    what.add_argument("--delta_numel", type=int, help=f"elements that are encoded (2^30; on a CPU {CPU_DELTA_NUMEL})")
    what.add_argument("--n_rounds", type=int, help=f"timed calls of each row ({FULL_ROUNDS}; on a CPU {CPU_ROUNDS})")
    what.add_argument("--seed", type=int, default=0, help="(%(default)s)")


def problem(args: Namespace) -> str:
    """The error in the options; empty if they are valid."""
    return one_of_each("only", args.only, PARTS)


def measure(args: Namespace, run: Run) -> None:
    """Time the parts of the table."""
    device = torch.device(args.device)
    cpu = device.type == "cpu"
    numel = args.numel or (CPU_NUMEL if cpu else None)
    delta_numel = args.delta_numel or (CPU_DELTA_NUMEL if cpu else FULL_DELTA_NUMEL)
    shapes = LLAMA_3_2_3B if numel is None else scaled(LLAMA_64M if cpu else LLAMA_3_2_3B, numel)
    recorder = Recorder(
        run,
        device,
        [name for name in backends.available(device) if name != "reference"],
        n_rounds=args.n_rounds or (CPU_ROUNDS if cpu else FULL_ROUNDS),
        common={"part": "copy", "numel": delta_numel},
    )
    generator = torch.Generator(device).manual_seed(args.seed)
    recorder.time_copy(delta_numel, generator)
    for part in args.only:
        recorder.common = {"part": part, "numel": delta_numel if part == "deltas" else total_numel(shapes)}
        if part == "weights":
            WeightRows(recorder, shapes, generator, torch.float32 if cpu else torch.bfloat16).run()
        elif part == "tiles":
            tiles.time_layers(recorder, shapes, CPU_TILE_TOKENS if cpu else TILE_TOKENS, generator)
        elif part == "experts":
            of_layer = tiles.time_experts(recorder, generator)
            WeightRows(recorder, of_layer, generator).step_under("tile64", "compact")
        else:
            for density in DELTA_DENSITIES:
                time_delta(recorder, delta_numel, density, generator)


def time_delta(recorder: Recorder, numel: int, density: float, generator: torch.Generator) -> None:
    """Time delta_encode and delta_apply_ at one density, and torch's operations."""
    old = cases.random_tensors({"weight": (numel,)}, torch.bfloat16, generator)
    case = cases.delta_encode_case(old, density, generator)
    peer = functools.partial(torch_encode, old[0], case.arguments["new"][0])
    torch_work = recorder.work("ne, nonzero, index", TORCH, density, peer, case.traffic)
    to_torch = {"torch": {"work": "ne, nonzero, index", "backend": TORCH}}
    recorder.time([*recorder.cases({"delta_encode": case}, density, peers=to_torch), torch_work])

    indices, values, _ = torch.ops.sparse_opt.delta_encode(old, case.arguments["new"], backend="reference")
    active = Active(indices, [0], [len(indices)])
    recorder.time(recorder.cases({"delta_apply_": cases.delta_apply_case(old, active, values)}, density))


def torch_encode(old: Tensor, new: Tensor) -> tuple[Tensor, Tensor]:
    """The closest torch operations to delta_encode."""
    where = (as_bits(old) != as_bits(new)).nonzero().view(-1)
    return where, new.view(-1)[where]


main = Benchmark(
    name="kernels",
    doc=__doc__,
    options=options,
    problem=problem,
    measure=measure,
    output="bench/results/kernels_{device}.json",
).main
