"""`sparse-opt analyze sparsity`: how much of a model training changed, step by step."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError, DataError
from .output import format_percent, print_json, table
from .parser import CommandParser, add_json_flag, add_tensor_choice

if TYPE_CHECKING:
    from ..analysis import ChangeCounts

_EPILOG = """examples:
  sparse-opt analyze sparsity --delta_log_dir delta_logs_M
  sparse-opt analyze sparsity --delta_log_dir delta_logs_M --tolerance 1e-5 --steps 50 100 --per_tensor
"""
_SPARSITY_EPILOG = f"""'changed' is the share of elements whose bits are not those of the first logged step; '> T' is
the share of elements that moved by more than T, subtracted in fp32. The update's sparsity is 1 minus a share.

{_EPILOG}"""


def run(argv: Sequence[str]) -> int:
    """Measure, and print a table or JSON."""
    _sparsity(_parser().parse_words(argv))
    return 0


def _parser() -> CommandParser:
    parser = CommandParser(prog="sparse-opt analyze", description="Measure what training changed.", epilog=_EPILOG)
    actions = parser.add_subparsers(dest="action", required=True, metavar="{sparsity}")
    sparsity = actions.add_parser("sparsity", help="share of changed elements per step", epilog=_SPARSITY_EPILOG)
    sparsity.add_argument("--delta_log_dir", type=Path, required=True, metavar="DIR", help="the delta log")
    sparsity.add_argument("--steps", type=int, nargs="+", metavar="N", help="logged steps (all after the first)")
    sparsity.add_argument(
        "--tolerance", type=float, nargs="+", default=[1e-6, 1e-5], metavar="T", help="tolerances (1e-6 1e-5)"
    )
    sparsity.add_argument("--per_tensor", action="store_true", help="list every tensor at the last of the steps")
    add_tensor_choice(sparsity)
    add_json_flag(sparsity)
    return parser


def _sparsity(args: Namespace) -> None:
    from tqdm import tqdm

    from ..analysis import changes_at, sum_changes
    from ..delta_log import DeltaLog

    if not all(tolerance >= 0 for tolerance in args.tolerance):
        raise ConfigError(f"option 'tolerance' is {args.tolerance}: wanted at least 0")
    log = DeltaLog.open(args.delta_log_dir)
    steps = args.steps or log.steps[1:]
    if not steps:
        raise DataError(f"{args.delta_log_dir}: no step after {log.steps[0]}, nothing to compare with it")
    found = {
        step: changes_at(
            log,
            step,
            tolerances=args.tolerance,
            include=args.include,
            exclude=args.exclude,
            mlp_only=args.mlp_only,
        )
        for step in tqdm(steps, desc="analyze", unit="step", disable=None, leave=False)
    }
    totals = {step: sum_changes(tensors.values()) for step, tensors in found.items()}
    if args.json:
        listed = [
            {"step": step, **_shares(totals[step]), "tensors": {name: _shares(c) for name, c in tensors.items()}}
            for step, tensors in found.items()
        ]
        print_json({"tolerances": args.tolerance, "steps": listed})
        return
    above = [f"> {tolerance:g}" for tolerance in args.tolerance]
    print(table(("step", "changed", *above), [(str(step), *_percents(total)) for step, total in totals.items()]))
    if args.per_tensor:
        rows = [(name, f"{counts.numel:,}", *_percents(counts)) for name, counts in found[steps[-1]].items()]
        print(f"\nat step {steps[-1]}\n" + table(("tensor", "elements", "changed", *above), rows))


def _shares(counts: ChangeCounts) -> dict[str, Any]:
    return {"numel": counts.numel, "changed": counts.share, "above": counts.shares_above}


def _percents(counts: ChangeCounts) -> list[str]:
    return [format_percent(share) for share in (counts.share, *counts.shares_above)]
