"""`sparse-opt analyze sparsity|coverage|ranks|report`: what training changed in a model."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError
from ..options import CommandParser
from ..tables import table
from .common import add_json_flag, add_tensor_choice, json_text, print_json

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ..analysis.records import Table
    from ..delta.state_log import StateLog

_EPILOG = """examples:
  sparse-opt analyze sparsity --delta_log_dir delta_logs_M
  sparse-opt analyze sparsity --base_model Qwen/Qwen2.5-0.5B --model_name Qwen/Qwen2.5-0.5B-Instruct
  sparse-opt analyze report --delta_log_dir delta_logs_M --output report.html
"""
_SPARSITY_EPILOG = """Density is the share of elements that changed since the first logged step; sparsity is 100 % minus
density. 'bits' counts elements whose bits differ, '> T' those that moved by more than T (subtracted in fp32), and
'flips' those whose sign changed. Publications often count with T = 1e-5. For logs of fp32 weights, the statistics of
the same weights rounded to bf16 are shown too: much of the sparsity of a bf16 run is rounding (arXiv 2511.08567).

--output DIR writes sparsity.csv (every tensor and step), sparsity.json, density_by_step.png, sparsity_by_layer.png.

examples:
  sparse-opt analyze sparsity --delta_log_dir delta_logs_M
  sparse-opt analyze sparsity --delta_log_dir delta_logs_M --tolerance 1e-5 --steps 50 100 --by tensor
  sparse-opt analyze sparsity --base_model base/ --model_name tuned/ --include '*mlp*' --output plots/
  sparse-opt analyze sparsity --checkpoints run/checkpoints --base_model base/
"""
_COVERAGE_EPILOG = """An element is active at step t if |W_t - W_0| > tau. Coverage at t is the share of the elements
active at the last step that are active at t. Density at t is the share of all elements that are active at t.

--output DIR writes coverage.csv, coverage.json, coverage.png.

examples:
  sparse-opt analyze coverage --delta_log_dir delta_logs_M --tau 1e-7 1e-6 1e-5 --output plots/
  sparse-opt analyze coverage --checkpoints states/ --output plots/
"""
_RANKS_EPILOG = """For the change of each weight matrix: classical rank (as numpy.linalg.matrix_rank counts in fp32),
effective rank exp(-sum p ln p) with p = s / sum(s), stable rank sum(s^2) / s_1^2, norms, and the shares of elements
that moved by more than tau and by more than mean + 2 standard deviations. It also has the spread of the update over the
matrices, by their norms: Gini coefficient, normalised entropy, share of the 3 largest.

--output DIR writes ranks.csv, ranks.json, ranks_by_layer.png; of several steps also ranks_by_step.png, and
ranks_by_layer.png shows the last of them.

examples:
  sparse-opt analyze ranks --delta_log_dir delta_logs_M --all_steps --include '*.h.0.*' --output plots/
  sparse-opt analyze ranks --base_model base/ --model_name tuned/
"""
_REPORT_EPILOG = """One HTML file without external resources: the tables and plots of sparsity, coverage (of a log),
ranks and shapes.

examples:
  sparse-opt analyze report --delta_log_dir delta_logs_M --output report.html
  sparse-opt analyze report --base_model base/ --model_name tuned/ --skip ranks --output report.html
"""
# Copies of the values in the analyses, which cannot be imported without torch.
TOLERANCES = (0.0, 1e-8, 1e-7, 1e-6, 1e-5, 1e-4)
TAUS = (0.0, 1e-7, 1e-6, 1e-5, 1e-4)
TAU = 1e-6


def run(argv: Sequence[str]) -> int:
    """Measure, print a table or JSON, and write the requested files."""
    actions = {"sparsity": _sparsity, "coverage": _coverage, "ranks": _ranks, "report": _report}
    args = _parser().parse_words(argv)
    _require_output(args)
    actions[args.action](args)
    return 0


def _parser() -> CommandParser:
    parser = CommandParser(prog="sparse-opt analyze", description="Measure what training changed.", epilog=_EPILOG)
    actions = parser.add_subparsers(dest="action", required=True, metavar="{sparsity,coverage,ranks,report}")

    sparsity = actions.add_parser("sparsity", help="share of changed elements by step", epilog=_SPARSITY_EPILOG)
    _add_source(sparsity)
    _add_steps(sparsity)
    _add_tolerance(sparsity)
    sparsity.add_argument(
        "--by",
        choices=("component", "layer", "expert", "tensor"),
        default="component",
        help="how the table of the last step is grouped (%(default)s)",
    )
    _add_output(sparsity)

    coverage = actions.add_parser(
        "coverage", help="when the final active elements became active", epilog=_COVERAGE_EPILOG
    )
    _add_log(coverage)
    coverage.add_argument("--base_model", metavar="M", help="with --checkpoints: step 0 (the first checkpoint)")
    _add_choice(coverage)
    _add_steps(coverage)
    _add_taus(coverage)
    _add_output(coverage)

    ranks = actions.add_parser("ranks", help="ranks and norm of each matrix's update", epilog=_RANKS_EPILOG)
    _add_source(ranks)
    which = ranks.add_mutually_exclusive_group()
    which.add_argument("--steps", type=int, nargs="+", metavar="N", help="logged steps (the last)")
    which.add_argument("--all_steps", action="store_true", help="all logged steps")
    ranks.add_argument("--tau", type=float, default=TAU, metavar="T", help="threshold of a moved element (%(default)s)")
    _add_output(ranks)

    report = actions.add_parser("report", help="all analyses as one HTML page", epilog=_REPORT_EPILOG)
    _add_source(report)
    _add_steps(report)
    _add_tolerance(report)
    _add_taus(report)
    report.add_argument(
        "--skip",
        nargs="+",
        choices=("coverage", "ranks"),
        default=[],
        help="analyses to leave out",
    )
    report.add_argument("--output", type=Path, required=True, metavar="FILE", help="the page to write, .html")
    return parser


def _add_source(parser: ArgumentParser) -> None:
    _add_log(parser)
    parser.add_argument(
        "--base_model",
        metavar="M",
        help="instead: hub name[@revision], folder or file before training; with --checkpoints: step 0",
    )
    parser.add_argument("--model_name", metavar="M", help="with --base_model: the same after training")
    _add_choice(parser)


def _add_log(parser: ArgumentParser) -> None:
    parser.add_argument("--delta_log_dir", type=Path, metavar="DIR", help="a delta log")
    parser.add_argument(
        "--checkpoints",
        type=Path,
        metavar="DIR",
        help="instead: a folder of checkpoints step_N, step-N or checkpoint-N: folders, .safetensors or .pt files",
    )


def _add_choice(parser: ArgumentParser) -> None:
    add_tensor_choice(parser)
    parser.add_argument("--device", default="cpu", metavar="D", help="auto, cpu, cuda or cuda:N (%(default)s)")


def _add_steps(parser: ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, nargs="+", metavar="N", help="logged steps (all after the first)")


def _add_tolerance(parser: ArgumentParser) -> None:
    default = " ".join(f"{t:g}" for t in TOLERANCES)
    parser.add_argument(
        "--tolerance", type=float, nargs="+", default=list(TOLERANCES), metavar="T", help=f"tolerances ({default})"
    )


def _add_taus(parser: ArgumentParser) -> None:
    default = " ".join(f"{t:g}" for t in TAUS)
    parser.add_argument("--tau", type=float, nargs="+", default=list(TAUS), metavar="T", help=f"thresholds ({default})")


def _add_output(parser: ArgumentParser) -> None:
    parser.add_argument("--output", type=Path, metavar="DIR", help="folder for CSV, JSON and PNG files")
    parser.add_argument("--no_plots", action="store_true", help="write no PNG files, which need matplotlib")
    add_json_flag(parser)


def _sparsity(args: Namespace) -> None:
    from ..analysis import measure_sparsity, plots, records

    log, chosen = _open(args)
    found = measure_sparsity(log, args.steps, tolerances=args.tolerance, **chosen)
    levels: dict[str, Any] = {level: records.change_records(found, args.tolerance, level) for level in records.LEVELS}
    pictures: dict[str, Callable[[], Figure]] = {
        "density_by_step": lambda: plots.density_figure(found, args.tolerance),
        "sparsity_by_layer": lambda: plots.layer_figure(found[-1], "stored"),
    }
    if found[-1].rounded is not None:
        pictures["sparsity_by_layer_bf16"] = lambda: plots.layer_figure(found[-1], "bf16")
    experts = found[-1].experts
    if experts:
        pictures["sparsity_by_expert"] = lambda: plots.expert_figure(
            {expert: counts.share for expert, counts in experts.items()},
            f"Update by layer and expert, step {found[-1].step}",
            "elements whose bits differ (%)",
        )
    elif args.by == "expert":
        raise ConfigError(f"option 'by' is 'expert', but no chosen tensor of {log.directory} is of experts")
    shown = [*records.change_tables(found, args.tolerance), *records.change_tables(found, args.tolerance, args.by)]
    _give(args, {"tolerances": args.tolerance, **levels}, shown, levels["tensor"], pictures, log)


def _coverage(args: Namespace) -> None:
    from ..analysis import measure_coverage, plots, records

    log, chosen = _open(args)
    found = measure_coverage(log, args.steps, taus=args.tau, **chosen)
    rows = records.coverage_records(found)
    data = {"final_step": found.steps[-1], "numel": found.numel, "coverage": rows}
    _give(args, data, records.coverage_tables(found), rows, {"coverage": lambda: plots.coverage_figure(found)}, log)


def _ranks(args: Namespace) -> None:
    from ..analysis import measure_ranks, plots, records

    log, chosen = _open(args)
    steps = log.steps[1:] if args.all_steps else args.steps
    found = measure_ranks(log, steps, tau=args.tau, **chosen)
    last = max(found)
    pictures: dict[str, Callable[[], Figure]] = {
        "ranks_by_layer": lambda: plots.rank_figure(found[last], args.tau, last)
    }
    if len(found) > 1:
        pictures["ranks_by_step"] = lambda: plots.rank_steps_figure(found)
    rows = records.rank_records(found)
    data = {
        "tau": args.tau,
        "matrices": rows,
        "components": records.component_records(found),
        "concentration": records.concentration_records(found),
    }
    shown = [records.rank_table(found, args.tau), *records.rank_summaries(found)]
    _give(args, data, shown, rows, pictures, log)


def _report(args: Namespace) -> None:
    from ..analysis.records import write_text
    from ..analysis.report import build_report

    log, chosen = _open(args)
    page = build_report(
        log,
        args.steps,
        tolerances=args.tolerance,
        taus=() if "coverage" in args.skip or len(log.steps) == 2 else args.tau,
        rank_tau=None if "ranks" in args.skip else TAU,
        **chosen,
    )
    write_text(args.output, page)
    print(f"wrote {args.output}")


def _require_output(args: Namespace) -> None:
    """Raise, before a long analysis, if --output has the wrong kind or plots cannot be drawn."""
    from ..analysis.plots import require_matplotlib

    if args.output is None:
        return
    if args.action == "report":
        if args.output.suffix != ".html" or args.output.is_dir():
            raise ConfigError(f"option 'output' is {args.output}: expected a file that ends in .html")
    elif args.output.exists() and not args.output.is_dir():
        raise ConfigError(f"option 'output' is {args.output}: a file, expected a folder")
    if args.action == "report" or not args.no_plots:
        require_matplotlib("output")


def _open(args: Namespace) -> tuple[StateLog, dict[str, Any]]:
    """The log, and the arguments `names` and `device` of the analyses."""
    from ..analysis import CheckpointSeries, chosen_names
    from ..delta import DeltaLog
    from ..tensors import resolve_device

    device = resolve_device(args.device)
    log: StateLog
    given = args.delta_log_dir, args.checkpoints, args.base_model, getattr(args, "model_name", None)
    match [value is not None for value in given]:
        case [True, False, False, False]:
            log = DeltaLog.open(args.delta_log_dir)
        case [False, True, _, False]:
            log = CheckpointSeries.of_folder(args.checkpoints, args.base_model)
        case [False, False, True, True]:
            log = CheckpointSeries.of_pair(args.base_model, args.model_name)
        case _:
            pair = "or both --base_model and --model_name, " if hasattr(args, "model_name") else ""
            raise ConfigError(f"expected either --delta_log_dir, {pair}or --checkpoints")
    return log, {"names": chosen_names(log, args.include, args.exclude, mlp_only=args.mlp_only), "device": device}


def _give(
    args: Namespace,
    data: Mapping[str, Any],
    shown: Sequence[Table],
    rows: Sequence[dict[str, Any]],
    pictures: Mapping[str, Callable[[], Figure]],
    log: StateLog,
) -> None:
    """Write the requested files, and print the tables or the JSON, with the further names of tied tensors."""
    from ..analysis.plots import save_png
    from ..analysis.records import write_csv, write_text
    from ..masks.parameters import tied_text

    tied = dict(log.layout.aliases)
    data = {"source": str(log.directory), "base_step": log.steps[0], **data} | ({"tied": tied} if tied else {})
    written: list[Path] = []
    if args.output is not None:
        written = [args.output / f"{args.action}.csv", args.output / f"{args.action}.json"]
        write_csv(rows, written[0])
        write_text(written[1], json_text(data) + "\n")
        for picture, draw in () if args.no_plots else pictures.items():
            written.append(args.output / f"{picture}.png")
            save_png(draw(), written[-1])
    if args.json:
        print_json(data)
        return
    for item in shown:
        n_words = [*item.is_text, False].index(False)  # the text columns come first
        print(f"{item.title}\n{table(item.headings, item.texts, n_words=max(1, n_words))}\n")
    for line in [*tied_text(tied), *(f"wrote {path}" for path in written)]:
        print(line)
