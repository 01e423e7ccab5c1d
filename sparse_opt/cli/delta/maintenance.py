"""`sparse-opt delta verify|squash|convert`: check a log, delete steps of it, or convert it to a new log."""

from __future__ import annotations

import sys
from argparse import Namespace
from dataclasses import asdict

from ...errors import ConfigError, DeltaLogError
from ...progress import progress_bar
from ...tables import format_bytes
from ..output import print_json
from .rebuild import open_log_of, print_dtype_hint


def run_verify(args: Namespace) -> None:
    """Check the whole log; after printing the results, raise DeltaLogError if a file is damaged."""
    log = open_log_of(args)
    steps = log.steps
    with progress_bar(total=len(steps), what="verify", unit="step") as bar:
        problems = log.verify(on_step=lambda step: bar.update())
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


def run_squash(args: Namespace) -> None:
    """Delete the steps strictly between two steps."""
    from ...delta.log import DeltaLog

    removed: list[int] = []
    with DeltaLog.open(args.delta_log_dir) as log:
        between = sum(args.first < step < args.last for step in log.steps)
        with progress_bar(total=between, what="squash", unit="step") as bar:

            def gone(step: int) -> None:
                removed.append(step)
                bar.update()

            info = log.squash(args.first, args.last, on_step=gone)
    if args.json:
        print_json({"removed": sorted(removed), "step": asdict(info)})
    else:
        print(
            f"{args.delta_log_dir}: {len(removed)} steps removed; step {info.step} is a {info.kind} of "
            f"{format_bytes(info.bytes)}"
        )


def run_convert(args: Namespace) -> None:
    """Write any log as a new delta log."""
    from ...delta.export import convert
    from ...delta.lock import LOCK_NAME
    from ...delta.log import DeltaLog
    from ...files import check_new_folder

    if args.keyframe_every is not None and args.keyframe_every < 1:
        raise ConfigError(f"option 'keyframe_every' is {args.keyframe_every}: expected 1 or more")
    check_new_folder(args.output_dir, "to", ignored=LOCK_NAME)
    log = open_log_of(args)
    with progress_bar(total=len(log.steps), what="convert", unit="step") as bar:
        convert(
            log,
            args.output_dir,
            level=args.level,
            keyframe_every=args.keyframe_every,
            metadata={} if args.model_name is None else {"model": args.model_name},
            on_step=lambda step: bar.update(),
        )
    infos = DeltaLog.open(args.output_dir).info()
    size = sum(info.bytes for info in infos)
    if args.json:
        print_json({"delta_log_dir": args.output_dir, "steps": [info.step for info in infos], "bytes": size})
    else:
        print(f"{args.output_dir}: {len(infos)} steps, {format_bytes(size)}")
    print_dtype_hint(log, args, sys.stderr)
