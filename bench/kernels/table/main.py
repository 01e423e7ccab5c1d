"""The table of kernels: every op and optimizer on the 197 matrices of a Llama-3.2-3B in bf16, next to its bandwidth
bound, its peers and its target.

Each row is checked against the reference before it is timed. Its bandwidth bound is the traffic of `bounds` at the
rates of a copy and of scattered writes, which are measured first. Missed targets are shown and counted, and fail the
run only with --strict. A wrong result is not timed, and fails the run.
"""

from __future__ import annotations

import functools
import sys
from argparse import Namespace
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparse_opt import backends
from sparse_opt.cli.parser import CommandParser
from sparse_opt.tensors import as_bits

from ...common.environment import now
from ...common.harness import Benchmark, Report, comma_separated
from ...common.report import Columns, machine_name, render
from ...common.report import cells as cells_of
from ...common.shapes import LLAMA_3_2_3B, LLAMA_3_2_3B_SIZES, Shapes, scaled, total_numel
from .. import access_rates, bounds, inputs
from ..access_rates import AccessRates
from ..cases import Active
from . import backward, targets, tile_gradients
from .recorder import TORCH, Recorder, Row, Work
from .weights import WeightRows

# Parts of the table that can be timed alone.
PARTS = ("weights", "backward", "tiles", "deltas")
DENSITIES, PATTERNS, DELTA_DENSITIES = (0.025, 0.1), ("run16", "run32", "tile64", "tile128"), (0.01, 0.025, 0.1)
PATTERN_DENSITY = 0.025

# --quick: 1/16 of the elements, still larger than the L2 of an H200.
QUICK_NUMEL, QUICK_DELTA_NUMEL, QUICK_ROUNDS = 200_000_000, 2**26, 5
# Sizes for trying the table out on a CPU: a run takes seconds, and the tensors exceed most caches.
CPU_NUMEL, CPU_DELTA_NUMEL, CPU_ROUNDS = 8_000_000, 2**22, 5
FULL_DELTA_NUMEL, FULL_ROUNDS = 2**30, 20
TILE_TOKENS, CPU_TILE_TOKENS = (8192, 1024), (48,)


def add_options(parser: CommandParser) -> None:
    """Add the options of the table, which gpu_check shares."""
    parser.add_argument("--quick", action="store_true", help="time smaller tensors, fewer times")
    parser.add_argument("--numel", type=int, help=f"elements of all matrices (3.21 B; on a CPU {CPU_NUMEL})")
    parser.add_argument("--delta_numel", type=int, help=f"elements that are encoded (2^30; on a CPU {CPU_DELTA_NUMEL})")
    parser.add_argument("--n_rounds", type=int, help=f"timed calls of each row ({FULL_ROUNDS}; on a CPU {CPU_ROUNDS})")
    parser.add_argument("--seed", type=int, default=0, help="(%(default)s)")
    parser.add_argument("--no_peers", action="store_true", help="leave out the optimizers of other packages")
    parser.add_argument("--no_backward", action="store_true", help="leave out the backward pass (always so on a CPU)")
    parser.add_argument("--no_tiles", action="store_true", help="leave out the weight gradients by tiles")
    parser.add_argument(
        "--only", type=comma_separated, metavar="PARTS", default=PARTS, help=f"time these alone, of {','.join(PARTS)}"
    )
    parser.add_argument(
        "--probe",
        type=Path,
        default=access_rates.PROBE,
        help="source of the program that measures scattered writes, which nvcc compiles (%(default)s)",
    )
    parser.add_argument("--strict", action="store_true", help="end with 1 if a target is missed")


def why_wrong(args: Namespace) -> str:
    """The error in these options; empty if they are valid."""
    unknown = [part for part in args.only if part not in PARTS]
    return (
        f"--only {','.join(args.only)}: no part {unknown[0]!r}, expected some of {','.join(PARTS)}" if unknown else ""
    )


def run_table(report: Report, args: Namespace, save: Callable[[], object] = lambda: None) -> list[str]:
    """Fill ``report["kernels"]``, print each row when it is measured, and return the failures.

    Parts that ``report["kernels"]`` has from an interrupted run are kept if that run had the same settings on the same
    GPU, and no wrong result.

    Args:
        save: called with the report filled after each part.
    """
    device = torch.device(args.device)
    cpu = device.type == "cpu"
    numel = args.numel or (QUICK_NUMEL if args.quick else CPU_NUMEL if cpu else None)
    delta_numel = QUICK_DELTA_NUMEL if args.quick else CPU_DELTA_NUMEL if cpu else FULL_DELTA_NUMEL
    n_rounds = QUICK_ROUNDS if args.quick else CPU_ROUNDS if cpu else FULL_ROUNDS
    recorder = Recorder(
        device,
        [name for name in backends.available(device) if name != "reference"],
        n_rounds=args.n_rounds or n_rounds,
        on_row=_print_row,
        on_failure=lambda failure: print(f"WRONG RESULT, not timed: {failure}", flush=True),
    )
    shapes = LLAMA_3_2_3B if numel is None else scaled(LLAMA_3_2_3B, numel)
    delta_numel = args.delta_numel or delta_numel
    settings = {
        "n_matrices": len(shapes),
        "numel": total_numel(shapes),
        "delta_numel": delta_numel,
        "n_rounds": recorder.n_rounds,
        "seed": args.seed,
        "peers": not args.no_peers,
        "gpu": None if cpu else str(torch.cuda.get_device_properties(device).uuid),
    }
    earlier = report.get("kernels", {})
    if earlier.get("wrong_results") == [] and all(earlier.get(name) == value for name, value in settings.items()):
        done, write_rates = _continue(recorder, earlier)
    else:
        done, write_rates = {}, _write_rates(recorder, args.probe)

    def fill() -> None:
        report["kernels"] = {
            **settings,
            "parts": dict(done),
            "copy_gb_per_s": recorder.rates.copy / 1e9,
            "write_rates": write_rates,
            "floor_counting": bounds.counting(recorder.rates),
            "rows": recorder.rows,
            "wrong_results": recorder.failures,
            "targets": [verdict.as_dict() for verdict in targets.judge(recorder.rows)],
            "left_out": recorder.left_out,
            "peer_versions": recorder.peer_versions,
        }

    try:
        for part in time_parts(recorder, shapes, delta_numel, args, done):
            done[part] = now()
            fill()
            save()
    finally:
        fill()
    return recorder.failures


def _continue(
    recorder: Recorder, kernels: Mapping[str, Any]
) -> tuple[dict[str, str], list[access_rates.ProbeRow] | str]:
    """Take over the complete parts of an interrupted run: when each ended, and the rates of scattered writes.

    The bounds of new rows follow from that run's rates too.
    """
    done: dict[str, str] = kernels["parts"]
    recorder.rows += [row for row in kernels["rows"] if row["part"] in ("", *done)]
    recorder.left_out |= kernels["left_out"]
    recorder.peer_versions |= kernels["peer_versions"]
    recorder.rates = AccessRates.of_report(kernels)
    print(f"kept from the earlier run: {', '.join(['copy', *done])}")
    return done, kernels["write_rates"]


def _write_rates(recorder: Recorder, probe: Path) -> list[access_rates.ProbeRow] | str:
    """Measure the rates of scattered writes for the recorder; return the probe's rows, or why there are none."""
    try:
        rows = access_rates.measure(recorder.device, probe)
    except access_rates.NotMeasured as error:
        return f"not measured: {error}"
    recorder.rates = AccessRates.of(0.0, rows)
    return rows


def time_parts(
    recorder: Recorder, shapes: Shapes, delta_numel: int, args: Namespace, done: Container[str]
) -> Iterator[str]:
    """Time the parts that are not done, and yield the name of each after its rows.

    Failed checks are recorded; errors propagate, except those of peers.
    """
    cpu = recorder.device.type == "cpu"
    generator = torch.Generator(recorder.device).manual_seed(args.seed)
    if not recorder.rows:
        recorder.time_copy(delta_numel, generator)
    left_out = (["backward"] if args.no_backward or cpu else []) + (["tiles"] if args.no_tiles else [])
    for part in PARTS:
        if part not in args.only or part in left_out or part in done:
            continue
        recorder.part = part
        if part == "weights":
            WeightRows(
                recorder, shapes, generator, DENSITIES, PATTERNS, PATTERN_DENSITY, args.seed, not args.no_peers
            ).run()
        elif part == "backward":
            time_backward(recorder, args.seed)
        elif part == "tiles":
            tile_gradients.time_rows(recorder, shapes, CPU_TILE_TOKENS if cpu else TILE_TOKENS, generator)
        else:
            for density in DELTA_DENSITIES:
                time_delta(recorder, delta_numel, density, generator)
        yield part


def time_backward(recorder: Recorder, seed: int) -> None:
    """Time the two backward passes of `backward`."""
    if why := backward.why_absent():
        recorder.left_out[targets.BACKWARD_HOOKS] = why
        return
    works: list[Work] = []

    def make() -> None:
        works.extend(backward.backward_works(LLAMA_3_2_3B_SIZES, recorder.device, DENSITIES[0], seed))

    if recorder.passes(targets.BACKWARD_HOOKS, make):
        recorder.time(works)


def time_delta(recorder: Recorder, numel: int, density: float, generator: torch.Generator) -> None:
    """Time delta_encode and delta_apply_ at one density, and torch's operations."""
    old = inputs.random_tensors({"weight": (numel,)}, torch.bfloat16, generator)
    case = inputs.delta_encode_case(old, density, generator)
    new = case.arguments["new"]
    peer = functools.partial(torch_encode, old[0], new[0])
    others = [Work(targets.TORCH_ENCODE, TORCH, density, peer, case.traffic)]
    recorder.time_cases({targets.ENCODE: case}, density, others)

    indices, values, _ = torch.ops.sparse_opt.delta_encode(old, new, backend="reference")
    active = Active(indices, [0], [len(indices)])
    recorder.time_cases({targets.APPLY: inputs.delta_apply_case(old, active, values)}, density)


def torch_encode(old: Tensor, new: Tensor) -> tuple[Tensor, Tensor]:
    """The closest torch operations to delta_encode."""
    where = (as_bits(old) != as_bits(new)).nonzero().view(-1)
    return where, new.view(-1)[where]


def missed(kernels: Mapping[str, Any]) -> list[targets.Verdict]:
    """The targets that the rows of a report miss."""
    return [verdict for verdict in targets.judge(kernels["rows"]) if not verdict.met]


def text(report: Mapping[str, Any]) -> str:
    """The table, the rows left out, the missed targets, and the counts of both."""
    found, missing = report["kernels"], missed(report["kernels"])
    verdicts = targets.judge(found["rows"])
    return "\n".join(
        [
            f"\n{found['n_matrices']} bf16 matrices of {found['numel'] / 1e9:.3g} B elements; deltas of "
            f"{found['delta_numel'] / 1e6:.4g} M; {machine_name(report)}; copy {found['copy_gb_per_s']:.0f} GB/s",
            *filter(None, [access_rates.line(found)]),
            render(columns(verdicts), found["rows"], n_words=2, n_last_words=2),
            *(f"not timed: {work}: {why}" for work, why in found["left_out"].items()),
            *(f"missed: {verdict.text}" for verdict in missing),
            f"{len(verdicts)} targets, set for an H200 and all 3.21 B elements: "
            f"{len(verdicts) - len(missing)} met, {len(missing)} missed",
        ]
    )


def columns(verdicts: Sequence[targets.Verdict]) -> Columns:
    """The columns of the table; the last two show the verdicts."""

    def verdict(row: Mapping[str, Any]) -> str:
        own = targets.of_row(row, verdicts)
        return "" if not own else "met" if all(verdict.met for verdict in own) else "missed"

    return {
        "work": "{work}",
        "backend": "{backend}",
        "density": lambda row: "" if row["density"] is None else f"{row['density']:.1%}",
        "ms": "{ms:.3f}",
        "p20 - p80": "{p20_ms:.3f} - {p80_ms:.3f}",
        "host ms": "{host_ms:.3f}",
        "bound ms": lambda row: "" if row["floor_ms"] is None else f"{row['floor_ms']:.3f}",
        "x bound": lambda row: "" if not row["floor_ms"] else f"{targets.x_bound(row):.2f}",
        "verdict": verdict,
        "target": lambda row: "; ".join(verdict.target for verdict in targets.of_row(row, verdicts)),
    }


def _print_row(row: Row) -> None:
    # Verdicts are omitted here: targets compare rows with each other, so they need the complete table.
    print("  ".join(cell for cell in cells_of(columns(()), row) if cell), flush=True)


def _measure(args: Namespace, report: Report) -> None:
    report["failures"] = run_table(report, args)


def failures(report: Report, args: Namespace) -> list[str]:
    """Wrong results, and with --strict the missed targets."""
    wrong = [f"WRONG RESULT: {failure}" for failure in report["failures"]]
    return wrong + ([f"MISSED: {verdict.text}" for verdict in missed(report["kernels"])] if args.strict else [])


main = Benchmark(
    name="kernels",
    doc=__doc__,
    options=add_options,
    problem=why_wrong,
    measure=_measure,
    text=text,
    failures=failures,
    device="auto",
).main

if __name__ == "__main__":
    sys.exit(main())
