"""`sparse-opt delta list|verify|reconstruct`: the steps of a delta log, their health, and models made from them."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import DeltaLogError
from .output import format_bytes, format_percent, print_json, table
from .parser import CommandParser, add_json_flag

if TYPE_CHECKING:
    import torch

    from ..delta_state import StateLayout

_EPILOG = """examples:
  sparse-opt delta list --delta_log_dir delta_logs_M
  sparse-opt delta verify --delta_log_dir delta_logs_M
  sparse-opt delta reconstruct --model_name M --delta_log_dir delta_logs_M --step 50 --output_dir step_50
"""
_VERIFY_EPILOG = """Rebuilds every step and compares every digest. Exit code 1 if a file is broken; the steps that are
lost with it are named.

examples:
  sparse-opt delta verify --delta_log_dir delta_logs_M
"""
_RECONSTRUCT_EPILOG = """--model_name gives the architecture and the tokenizer; every weight comes from the log, bit for
bit.

examples:
  sparse-opt delta reconstruct --model_name M --delta_log_dir delta_logs_M --step 50 --output_dir step_50
"""


def run(argv: Sequence[str]) -> int:
    """Run one of the actions."""
    actions: dict[str, Callable[[Namespace], None]] = {"list": _list, "verify": _verify, "reconstruct": _reconstruct}
    args = _parser().parse_words(argv)
    actions[args.action](args)
    return 0


def _parser() -> CommandParser:
    parser = CommandParser(
        prog="sparse-opt delta",
        description="Delta logs: the weights of a run, step by step, bit for bit.",
        epilog=_EPILOG,
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="{list,verify,reconstruct}")
    listing = actions.add_parser("list", help="every step: its kind, what changed, its size", epilog=_EPILOG)
    verify = actions.add_parser("verify", help="rebuild every step and compare its digest", epilog=_VERIFY_EPILOG)
    rebuild = actions.add_parser("reconstruct", help="a step as a checkpoint", epilog=_RECONSTRUCT_EPILOG)
    rebuild.add_argument("--model_name", required=True, metavar="M", help="the logged model: hub name or local folder")
    rebuild.add_argument("--step", type=int, required=True, metavar="N", help="logged step")
    rebuild.add_argument("--output_dir", type=Path, required=True, metavar="DIR", help="new or empty folder")
    for action in (listing, verify, rebuild):
        action.add_argument("--delta_log_dir", type=Path, required=True, metavar="DIR", help="the delta log")
        add_json_flag(action)
    return parser


def _list(args: Namespace) -> None:
    from ..delta_log import DeltaLog

    infos = DeltaLog.open(args.delta_log_dir).info()
    if args.json:
        print_json([{**asdict(info), "share": info.share} for info in infos])
        return
    rows = [
        (str(i.step), i.kind, f"{i.changed:,}" if i.step else "", format_percent(i.share) if i.step else "", size)
        for i, size in ((info, format_bytes(info.bytes)) for info in infos)
    ]
    print(table(("step", "kind", "changed", "share", "size"), rows, words=2))
    print(f"{len(infos)} steps of {infos[0].numel:,} elements, {format_bytes(sum(info.bytes for info in infos))}")


def _verify(args: Namespace) -> None:
    from ..delta_log import DeltaLog

    log = DeltaLog.open(args.delta_log_dir)
    steps, problems = log.steps, log.verify()
    lost = sorted({step for problem in problems for step in problem.lost_steps})
    if args.json:
        print_json({"ok": not problems, "steps": steps, "lost_steps": lost, "problems": [asdict(p) for p in problems]})
    elif problems:
        print("\n".join(map(str, problems)))
    else:
        print(f"{args.delta_log_dir}: all {len(steps)} steps rebuild to the bits that were logged")
    if problems:
        files = ", ".join(problem.file for problem in problems)
        listed = ", ".join(map(str, lost)) or "none"
        raise DeltaLogError(f"{args.delta_log_dir}: broken: {files}; lost steps: {listed}")


def _reconstruct(args: Namespace) -> None:
    digest = reconstruct(args.delta_log_dir, args.step, args.model_name, args.output_dir)
    if args.json:
        print_json({"checkpoint": args.output_dir, "step": args.step, "digest": digest})
    else:
        print(f"{args.output_dir}: step {args.step}, state digest {digest}")


def reconstruct(delta_log_dir: Path, step: int, model_name: str, output_dir: Path) -> str:
    """Write the model at a logged step, with its tokenizer, as a checkpoint; returns the state's digest.

    The folder appears when all of it is written, or not at all.

    Raises:
        ConfigError: the folder holds something, or cannot be made.
        DeltaLogError: the step is not logged, the log is damaged, or it is another model's.
        DataError: the model cannot be loaded.
    """
    from sparse_opt.trainers.outputs import check_new_folder, save_checkpoint

    from ..delta_log import DeltaLog
    from .models import load_model
    from .progress import hide_progress_bars

    check_new_folder(output_dir, "output_dir")
    log = DeltaLog.open(delta_log_dir)
    digest = log.digest(step)
    hide_progress_bars()
    model, tokenizer = load_model(model_name, _main_dtype(log.layout))
    log.apply_(model, step)
    save_checkpoint(model, tokenizer, output_dir)
    return digest


def _main_dtype(layout: StateLayout) -> torch.dtype:
    """The dtype of most elements: what the model was trained in."""
    import torch

    numels: dict[str, int] = {}
    for spec in layout.tensors:
        numels[spec.dtype] = numels.get(spec.dtype, 0) + spec.numel
    dtype: Any = getattr(torch, max(numels, key=lambda name: numels[name]))
    return dtype
