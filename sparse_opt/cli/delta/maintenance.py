"""`sparse-opt delta verify|reconstruct|convert`: check a log, write a step as a checkpoint, or all as a new log."""

from __future__ import annotations

from argparse import Namespace
from collections import Counter
from dataclasses import asdict
from typing import Any

from ...errors import ConfigError, DeltaLogError
from ...progress import progress_bar
from ...tables import format_bytes
from ..common import print_json


def run_verify(args: Namespace) -> None:
    """Check the whole log; after printing the results, raise DeltaLogError if a file is damaged."""
    from ...delta.log import DeltaLog

    log = DeltaLog.open(args.delta_log_dir)
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


def run_reconstruct(args: Namespace) -> None:
    """Write the model at a logged step, with its tokenizer, as a checkpoint."""
    import torch

    from sparse_opt.trainers.pretrained import load_causal_lm, load_tokenizer_from

    from ...delta.log import DeltaLog
    from ...files import check_new_folder, save_model
    from ...progress import hide_progress_bars

    log = DeltaLog.open(args.delta_log_dir)
    check_new_folder(args.output_dir, "output_dir")
    digest = log.digest(args.step)
    hide_progress_bars()
    numels = Counter[str]()
    for spec in log.layout.tensors:
        numels[spec.dtype] += spec.numel
    dtype = getattr(torch, max(numels, key=numels.__getitem__))  # of most elements, in which the model was trained
    model, tokenizer = load_causal_lm(args.model_name, dtype), load_tokenizer_from(args.model_name)
    log.apply_(model, args.step)
    save_model(model, tokenizer, args.output_dir)
    if args.json:
        print_json({"checkpoint": args.output_dir, "step": args.step, "digest": digest})
    else:
        print(f"{args.output_dir}: step {args.step}, state digest {digest}")


def run_convert(args: Namespace) -> None:
    """Write a log of `.pt` files as a delta log, or a delta log with fewer steps or other keyframes."""
    from ...delta.convert import convert
    from ...delta.files import is_pt_log, list_steps
    from ...delta.lock import LOCK_NAME
    from ...delta.log import DeltaLog
    from ...files import check_new_folder

    if args.keyframe_every is not None and args.keyframe_every < 1:
        raise ConfigError(f"option 'keyframe_every' is {args.keyframe_every}: expected 1 or more")
    check_new_folder(args.output_dir, "to", ignored=LOCK_NAME)
    source = args.source
    options: dict[str, Any] = {
        "keyframe_every": args.keyframe_every,
        "metadata": {} if args.model_name is None else {"model": args.model_name},
    }
    if is_pt_log(source) and not list_steps(source)[0]:
        if args.steps is not None:
            raise ConfigError(f"option 'steps': {source} is a folder of .pt files, expected a delta log")
        _convert_pt(args, options)
    else:
        if args.dtype is not None:
            raise ConfigError(f"option 'dtype': {source} is a delta log, expected a folder of .pt files")
        log = DeltaLog.open(source)
        with progress_bar(total=len(args.steps or log.steps), what="convert", unit="step") as bar:
            convert(log, args.output_dir, steps=args.steps, on_step=lambda step: bar.update(), **options)
    infos = DeltaLog.open(args.output_dir).info()
    size = sum(info.bytes for info in infos)
    if args.json:
        print_json({"delta_log_dir": args.output_dir, "steps": [info.step for info in infos], "bytes": size})
    else:
        print(f"{args.output_dir}: {len(infos)} steps, {format_bytes(size)}")


def _convert_pt(args: Namespace, options: dict[str, Any]) -> None:
    import torch

    from ...delta.pt import convert_pt, list_pt_files

    dtype = None if args.dtype is None else getattr(torch, args.dtype)
    n_steps = len(list_pt_files(args.source))
    with progress_bar(total=n_steps, what="convert", unit="step") as bar:
        convert_pt(args.source, args.output_dir, dtype=dtype, on_step=lambda step: bar.update(), **options)
