"""The work of `sparse-opt analyze`: open the source, measure, print, write."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from ...analysis import coverage as coverages
from ...analysis import plots, records
from ...analysis.checkpoints import CheckpointPair, CheckpointSeries
from ...analysis.output_files import require_matplotlib, save_png, write_text
from ...analysis.ranks import TAU, measure_ranks_by_step
from ...analysis.shapes import weight_shapes
from ...analysis.sparsity import measure_sparsity
from ...analysis.states import Progress
from ...analysis.tables import Table, write_csv
from ...delta.log import DeltaLog
from ...delta.state_log import StateLog
from ...errors import ConfigError
from ...masks.parameters import tied_text
from ...progress import progress_bar
from ...tables import table
from ...tensors import resolve_device
from ..output import print_json

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def sparsity(args: Namespace) -> None:
    """`analyze sparsity`."""
    _require_at_least_0("tolerance", args.tolerance)
    _require_plots(args)
    log = _open(args)
    found = measure_sparsity(log, args.steps, tolerances=args.tolerance, **_choice(args), progress=_bar("sparsity"))
    data = {
        "source": str(log.directory),
        "base_step": log.steps[0],
        "tolerances": args.tolerance,
        "steps": [records.changes_json(step) for step in found],
    }
    pictures: dict[str, Callable[[], Figure]] = {
        "density_by_step": lambda: plots.density_figure(found, args.tolerance),
        "sparsity_by_layer": lambda: plots.layer_figure(found[-1], "stored"),
    }
    if found[-1].rounded is not None:
        pictures["sparsity_by_layer_bf16"] = lambda: plots.layer_figure(found[-1], "bf16")
    shown = [
        *records.change_tables(found, args.tolerance),
        *records.change_profile(found[-1], args.tolerance, args.by),
    ]
    _give(args, "sparsity", data, shown, records.change_records(found, args.tolerance), pictures, log.layout.aliases)


def coverage(args: Namespace) -> None:
    """`analyze coverage`."""
    _require_at_least_0("tau", args.tau)
    _require_plots(args)
    log = _open(args)
    found = coverages.measure_coverage(log, args.steps, taus=args.tau, **_choice(args), progress=_bar("coverage"))
    pictures = {
        "coverage_combined": lambda: plots.coverage_figure(found),
        "density_combined": lambda: plots.coverage_density_figure(found),
    }
    data = {"source": str(log.directory), "base_step": log.steps[0], **records.coverage_json(found)}
    shown = records.coverage_tables(found)
    _give(args, "coverage", data, shown, records.coverage_records(found), pictures, log.layout.aliases)


def ranks(args: Namespace) -> None:
    """`analyze ranks`."""
    _require_at_least_0("tau", [args.tau])
    _require_k(args)
    _require_plots(args)
    log = _open(args)
    by_step = args.all_steps or args.steps is not None
    steps = args.steps if by_step else [log.steps[-1] if args.step is None else args.step]
    found = measure_ranks_by_step(
        log, steps, tau=args.tau, method=args.method, k=args.k, **_choice(args), progress=_bar("ranks")
    )
    step, stats = list(found.items())[-1]
    listed = records.rank_table(stats, args.tau)
    pictures = {"ranks_by_layer": lambda: plots.rank_figure(stats, args.tau, step)}
    data = {
        "source": str(log.directory),
        "base_step": log.steps[0],
        "step": step,
        "tau": args.tau,
        "method": args.method,
        "matrices": records.ranks_json(stats),
        "concentration": records.concentration_json(found),
    }
    shown, rows = [listed, records.rank_summary(stats), records.concentration_table(found)], listed
    if by_step:
        shown, rows = [*shown, records.rank_steps_table(found)], records.rank_step_records(found, args.tau)
        data["steps"] = [{"step": step, "matrices": records.ranks_json(stats)} for step, stats in found.items()]
        pictures["ranks_by_step"] = lambda: plots.rank_steps_figure(found)
    _give(args, "ranks", data, shown, rows, pictures, log.layout.aliases)


def shapes(args: Namespace) -> None:
    """`analyze shapes`."""
    from ...progress import hide_progress_bars
    from ..mask.from_model import parameter_shapes

    _require_plots(args)
    hide_progress_bars()
    weights = weight_shapes(parameter_shapes(args.model_name))
    listed = records.shape_table(weights)
    data = {
        "model": args.model_name,
        "numel": sum(weight.numel for weight in weights),
        "weights": records.shapes_json(weights),
    }
    pictures = {"shapes": lambda: plots.shape_figure(weights, f"Weights of {args.model_name} by component")}
    _give(args, "shapes", data, [listed, records.shape_sums(weights)], listed, pictures)


def report(args: Namespace) -> None:
    """`analyze report`."""
    from ...analysis.report import build_report

    _require_at_least_0("tolerance", args.tolerance)
    _require_at_least_0("tau", args.tau)
    _require_k(args)
    require_matplotlib("output")
    path = _page_file(args.output)
    log = _open(args)
    page = build_report(
        log,
        args.steps,
        tolerances=args.tolerance,
        taus=() if "coverage" in args.skip or isinstance(log, CheckpointPair) else args.tau,
        rank_tau=None if "ranks" in args.skip else TAU,
        method=args.method,
        k=args.k,
        **_choice(args),
        progress=_bar,
    )
    write_text(path, page, "page")
    if args.json:
        print_json({"file": str(path), "bytes": path.stat().st_size})
    else:
        print(f"wrote {path}")


def _page_file(output: Path) -> Path:
    if output.suffix == ".html" and not output.is_dir():
        return output
    if output.is_file() or (output.suffix and not output.is_dir()):
        raise ConfigError(f"option 'output' is {output}: expected a file that ends in .html, or a folder")
    return output / "report.html"


def _open(args: Namespace) -> StateLog:
    log, folder, base = args.delta_log_dir, args.checkpoints, args.base_model
    tuned = getattr(args, "model_name", None)  # coverage takes no pair
    if log is not None and (folder, base, tuned) == (None, None, None):
        return DeltaLog.open(log)
    if folder is not None and (log, tuned) == (None, None):
        return CheckpointSeries.of_folder(folder, base)
    if (log, folder) == (None, None) and base is not None and tuned is not None:
        return CheckpointPair.open(base, tuned)
    pair = "or both --base_model and --model_name, " if hasattr(args, "model_name") else ""
    raise ConfigError(f"expected either --delta_log_dir, {pair}or --checkpoints")


def _choice(args: Namespace) -> dict[str, Any]:
    return {
        "include": args.include,
        "exclude": args.exclude,
        "mlp_only": args.mlp_only,
        "device": resolve_device(args.device),
    }


def _bar(what: str) -> Progress:
    return lambda names: progress_bar(names, what=what, unit="tensor")


def _require_at_least_0(option: str, values: Sequence[float]) -> None:
    if not all(value >= 0 for value in values):
        raise ConfigError(f"option '{option}' is {' '.join(f'{value:g}' for value in values)}: expected at least 0")


def _require_k(args: Namespace) -> None:
    if args.k < 1:
        raise ConfigError(f"option 'k' is {args.k}: expected at least 1")


def _require_plots(args: Namespace) -> None:
    """Raise, before a long analysis, if --output is a file or plots cannot be drawn."""
    if args.output is not None:
        if args.output.exists() and not args.output.is_dir():
            raise ConfigError(f"option 'output' is {args.output}: a file, expected a folder")
        if not args.no_plots:
            require_matplotlib("output")


def _give(
    args: Namespace,
    name: str,
    data: Mapping[str, Any],
    shown: Sequence[Table],
    rows: Table,
    pictures: Mapping[str, Callable[[], Figure]],
    tied: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Write the requested files, and print the tables or the JSON, with the further names of `tied` tensors."""
    data = {**data, "tied": dict(tied)} if tied else data
    written: list[Path] = []
    if args.output is not None:
        written = [args.output / f"{name}.csv", args.output / f"{name}.json"]
        write_csv(rows, written[0])
        write_text(written[1], json.dumps(data, indent=2, allow_nan=False) + "\n", "data")
        if not args.no_plots:
            for picture, draw in pictures.items():
                written.append(args.output / f"{picture}.png")
                save_png(draw(), written[-1])
    if args.json:
        print_json(data)
        return
    for item in shown:
        print(f"{item.title}\n{table(item.headings, item.texts, n_words=max(1, item.n_words))}\n")
    for line in [*tied_text(tied), *(f"wrote {path}" for path in written)]:
        print(line)
