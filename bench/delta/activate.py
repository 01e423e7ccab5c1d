"""`DeltaSet.activate`: the time until a model has the weights of a delta, from its base's and from another delta's.

Two deltas of random elements, or of random tiles of 64 x 64. Results are compared with the digests of the delta.
"""

from __future__ import annotations

import functools
from argparse import Namespace

import torch
from torch import Tensor, nn

from sparse_opt import DeltaSet, SparseDelta
from sparse_opt.cli.parser import CommandParser
from sparse_opt.delta.state import TensorSpec, read_state
from sparse_opt.tensors import as_bits

from ..harness import Benchmark, Work, time_works
from ..rows import Run
from ..shapes import LLAMA_3_2_3B, scaled, total_numel
from ..timing import Prepared


def options(parser: CommandParser) -> None:
    what = parser.add_argument_group("what is timed")
    what.add_argument("--model_numel", type=int, default=total_numel(LLAMA_3_2_3B), help="elements (%(default)s)")
    what.add_argument("--density", type=float, default=0.025, help="share that each delta changes (%(default)s)")
    what.add_argument("--n_rounds", type=int, default=20, help="timed calls (%(default)s)")


def measure_all(args: Namespace, run: Run) -> None:
    device = torch.device(args.device)
    torch.manual_seed(0)
    shapes = scaled(LLAMA_3_2_3B, args.model_numel).values()
    model = nn.ParameterList(torch.randn(shape, device=device, dtype=torch.bfloat16) * 0.02 for shape in shapes)
    layout, weights = read_state(model)

    def change(spec: TensorSpec, tile: int) -> tuple[Tensor, Tensor]:
        rows, columns = spec.shape
        chosen = torch.rand(-(-rows // tile), -(-columns // tile), device=device) < args.density
        chosen = chosen.repeat_interleave(tile, 0)[:rows].repeat_interleave(tile, 1)[:, :columns]
        new = weights[spec.name].clone()
        as_bits(new).bitwise_xor_(chosen.reshape(-1).to(torch.int16))
        return weights[spec.name], new

    for pattern, tile in (("element", 1), ("tile64", 64)):
        read = functools.partial(change, tile=tile)
        deltas = {name: SparseDelta.of_tensors(layout, read, level="packed") for name in "ab"}
        activate = DeltaSet(model, deltas).activate
        for name in ("a", "b", "a", None):
            activate(name)
            delta = deltas[name or "a"]
            delta.require_bits({key: weights[key] for key in delta.changes}, "activate", applied=name is not None)
        case = {"pattern": pattern, "density": args.density, "numel": layout.numel, "device": device.type}
        works = [
            Work(
                {**case, "from": start}, Prepared(functools.partial(activate, before), functools.partial(activate, "a"))
            )
            for start, before in (("the base", None), ("another delta", "b"))
        ]
        time_works(run, "delta_activate", works, device, args.n_rounds)
        activate(None)


main = Benchmark(
    name="delta_activate",
    doc=__doc__,
    options=options,
    measure=measure_all,
    output="bench/results/delta_activate_{device}.json",
).main
