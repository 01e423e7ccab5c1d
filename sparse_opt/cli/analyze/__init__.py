"""`sparse-opt analyze sparsity|coverage|ranks|shapes|report`: what training changed in a model."""

from __future__ import annotations

import importlib
from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path

from ..parser import CommandParser, add_json_flag, add_tensor_choice

_EPILOG = """examples:
  sparse-opt analyze sparsity --delta_log_dir delta_logs_M
  sparse-opt analyze sparsity --base_model Qwen/Qwen2.5-0.5B --model_name Qwen/Qwen2.5-0.5B-Instruct
  sparse-opt analyze coverage --delta_log_dir delta_logs_M --output plots/
  sparse-opt analyze ranks --delta_log_dir delta_logs_M --device cuda --output plots/
  sparse-opt analyze shapes meta-llama/Llama-3.2-3B
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

--output DIR writes coverage.csv, coverage.json, coverage_combined.png, density_combined.png.

examples:
  sparse-opt analyze coverage --delta_log_dir delta_logs_M
  sparse-opt analyze coverage --delta_log_dir delta_logs_M --tau 1e-7 1e-6 1e-5 --output plots/
  sparse-opt analyze coverage --checkpoints states/ --output plots/
"""
_RANKS_EPILOG = """For the change of each weight matrix: classical rank (as numpy.linalg.matrix_rank counts in fp32),
effective rank exp(-sum p ln p) with p = s / sum(s), stable rank sum(s^2) / s_1^2, norms, and the shares of elements
that moved by more than tau and by more than mean + 2 standard deviations. It also has the spread of the update over the
matrices, by their norms: Gini coefficient, normalised entropy, share of the 3 largest.

methods, all in fp64; a statistic that a method only bounds is printed as an interval:
  exact    all singular values, by SVD
  gram     all singular values, from the eigenvalues of A^T A: faster; loses those below about 1e-6 of the norm
  lowrank  the --k largest singular values, by a randomized projection: for updates known to be of low rank

--output DIR writes ranks.csv, ranks.json, ranks_by_layer.png; with --steps or --all_steps also ranks_by_step.png;
ranks_by_layer.png then shows the last of the steps.

examples:
  sparse-opt analyze ranks --delta_log_dir delta_logs_M --device cuda
  sparse-opt analyze ranks --delta_log_dir delta_logs_M --all_steps --include '*.h.0.*' --output plots/
  sparse-opt analyze ranks --delta_log_dir delta_logs_M --step 100 --method gram --exclude '*embed*' --output plots/
  sparse-opt analyze ranks --base_model base/ --model_name merged/ --method lowrank --k 64
"""
_SHAPES_EPILOG = """Only the model's configuration is read, no weights. Tied weights are listed once.

--output DIR writes shapes.csv, shapes.json, shapes.png.

examples:
  sparse-opt analyze shapes meta-llama/Llama-3.2-3B
  sparse-opt analyze shapes checkpoints/step_100 --json
"""
_REPORT_EPILOG = """One HTML file without external resources: the tables and plots of sparsity, coverage (of a log),
ranks and shapes.

--output is a file that ends in .html, or a folder, where the file is report.html.

examples:
  sparse-opt analyze report --delta_log_dir delta_logs_M --output report.html
  sparse-opt analyze report --delta_log_dir delta_logs_M --method gram --device cuda --output reports/
  sparse-opt analyze report --base_model base/ --model_name tuned/ --skip ranks --output report.html
"""
# Copies of the values in the analyses, which cannot be imported without torch.
TOLERANCES = (0.0, 1e-8, 1e-7, 1e-6, 1e-5, 1e-4)
TAUS = (0.0, 1e-7, 1e-6, 1e-5, 1e-4)
TAU = 1e-6
METHODS = ("exact", "gram", "lowrank")
LOWRANK_K = 64


def run(argv: Sequence[str]) -> int:
    """Measure, print a table or JSON, and write the requested files."""
    args = _parser().parse_words(argv)
    actions = importlib.import_module(".actions", __package__)
    getattr(actions, args.action)(args)
    return 0


def _parser() -> CommandParser:
    parser = CommandParser(prog="sparse-opt analyze", description="Measure what training changed.", epilog=_EPILOG)
    actions = parser.add_subparsers(dest="action", required=True, metavar="{sparsity,coverage,ranks,shapes,report}")

    sparsity = actions.add_parser("sparsity", help="share of changed elements by step", epilog=_SPARSITY_EPILOG)
    _add_source(sparsity)
    _add_steps(sparsity)
    _add_tolerance(sparsity)
    sparsity.add_argument(
        "--by",
        choices=("component", "layer", "tensor"),
        default="component",
        help="how the table of the last step is grouped (%(default)s)",
    )
    sparsity.add_argument("--per_tensor", dest="by", action="store_const", const="tensor", help="--by tensor")
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
    which.add_argument("--step", type=int, metavar="N", help="logged step (the last)")
    which.add_argument("--steps", type=int, nargs="+", metavar="N", help="several logged steps: ranks by step")
    which.add_argument("--all_steps", action="store_true", help="all logged steps: ranks by step")
    ranks.add_argument("--tau", type=float, default=TAU, metavar="T", help="threshold of a moved element (%(default)s)")
    _add_method(ranks)
    _add_output(ranks)

    shapes = actions.add_parser("shapes", help="names, shapes and sizes of a model's weights", epilog=_SHAPES_EPILOG)
    shapes.add_argument("model_name", metavar="MODEL", help="hub name or local folder")
    _add_output(shapes)

    report = actions.add_parser("report", help="all analyses as one HTML page", epilog=_REPORT_EPILOG)
    _add_source(report)
    _add_steps(report)
    _add_tolerance(report)
    _add_taus(report)
    _add_method(report)
    report.add_argument(
        "--skip",
        nargs="+",
        choices=("coverage", "ranks"),
        default=[],
        help="analyses to leave out",
    )
    report.add_argument("--output", type=Path, required=True, metavar="PATH", help=".html file, or folder")
    add_json_flag(report)
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


def _add_method(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--method", choices=METHODS, default="exact", help="how singular values are computed (%(default)s)"
    )
    parser.add_argument(
        "--k",
        type=int,
        default=LOWRANK_K,
        metavar="K",
        help="singular values of --method lowrank (%(default)s)",
    )


def _add_output(parser: ArgumentParser) -> None:
    parser.add_argument("--output", type=Path, metavar="DIR", help="folder for CSV, JSON and PNG files")
    parser.add_argument("--no_plots", action="store_true", help="write no PNG files, which need matplotlib")
    add_json_flag(parser)
