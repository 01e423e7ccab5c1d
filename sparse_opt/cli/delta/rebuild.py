"""`sparse-opt delta reconstruct|export`: write a step of a log as a checkpoint, or in formats of other tools."""

from __future__ import annotations

import sys
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from ...errors import ConfigError
from ...progress import progress_bar
from ...tables import format_bytes
from ..output import print_json

if TYPE_CHECKING:
    import torch

    from ...delta.log import DeltaLog
    from ...delta.pt import PtDeltaLog
    from ...delta.state import StateLayout

    Log = DeltaLog | PtDeltaLog


def open_log_of(args: Namespace) -> Log:
    """Open the log of a call, with its arguments for folders of `.pt` files.

    Raises:
        ConfigError: such an argument is given for a log of the other kind.
        DeltaLogError: there is no log.
    """
    import torch

    from ...delta.open import open_log
    from ...delta.pt import PtDeltaLog

    dtype = None if args.dtype in (None, "stored") else getattr(torch, args.dtype)
    if args.base_state is not None:
        return PtDeltaLog(args.delta_log_dir, base_state=args.base_state, against=args.against or "base", dtype=dtype)
    log = open_log(args.delta_log_dir)
    if isinstance(log, PtDeltaLog):
        return PtDeltaLog(args.delta_log_dir, against=args.against or "base", dtype=dtype)
    for option in ("against", "dtype"):
        if getattr(args, option) is not None:
            raise ConfigError(f"option '{option}': {args.delta_log_dir} is a delta log, expected a folder of .pt files")
    return log


def print_dtype_hint(log: Log, args: Namespace, stream: TextIO) -> None:
    """Print a hint if no dtype was given and all weights of an fp32 base are exact in a 16-bit dtype."""
    from ...delta.pt import PtDeltaLog

    if isinstance(log, PtDeltaLog) and args.dtype is None:
        exact = log.exact_dtype()
        if exact is not None:
            name = str(exact).removeprefix("torch.")
            print(
                f"sparse-opt: every weight of the base is a {name} value: --dtype {name} halves the states", file=stream
            )


def run_reconstruct(args: Namespace) -> None:
    """Write a step as a checkpoint."""
    log = open_log_of(args)
    digest = _reconstruct(log, args.step, args.model_name, args.output_dir)
    if args.json:
        print_json({"checkpoint": args.output_dir, "step": args.step, "digest": digest})
    else:
        print(f"{args.output_dir}: step {args.step}, state digest {digest}")
    print_dtype_hint(log, args, sys.stderr)


def reconstruct(delta_log_dir: Path, step: int, model_name: str, output_dir: Path) -> str:
    """Write the model at a logged step, with its tokenizer, as a checkpoint; return the state's digest.

    The folder is written atomically.

    Raises:
        ConfigError: the folder is not empty or cannot be created.
        DeltaLogError: the step is not logged, the log is damaged, or it belongs to another model.
        DataError: the model cannot be loaded.
    """
    from ...delta.open import open_log

    return _reconstruct(open_log(delta_log_dir), step, model_name, output_dir)


def _reconstruct(log: Log, step: int, model_name: str, output_dir: Path) -> str:
    from sparse_opt.trainers.pretrained import load_causal_lm, load_tokenizer_from

    from ...files import check_new_folder, save_model
    from ...progress import hide_progress_bars

    check_new_folder(output_dir, "output_dir")
    digest = log.digest(step)
    hide_progress_bars()
    model, tokenizer = load_causal_lm(model_name, _main_dtype(log.layout)), load_tokenizer_from(model_name)
    log.apply_(model, step)
    save_model(model, tokenizer, output_dir)
    return digest


def _main_dtype(layout: StateLayout) -> torch.dtype:
    """The dtype of most elements, in which the model was trained."""
    import torch

    numels: dict[str, int] = {}
    for spec in layout.tensors:
        numels[spec.dtype] = numels.get(spec.dtype, 0) + spec.numel
    dtype: Any = getattr(torch, max(numels, key=lambda name: numels[name]))
    return dtype


def run_export(args: Namespace) -> None:
    """Write a step in one of the formats of `delta.export`."""
    from ...delta.export import export_state, export_values
    from ...delta.pt import export_pt
    from ...files import check_new_folder

    if args.format != "pt" and len(args.step) > 1:
        raise ConfigError(f"option 'step' is {args.step}: format {args.format} takes one step")
    if args.format != "values" and args.since is not None:
        raise ConfigError(f"option 'since' is {args.since}: format {args.format} has none")
    if args.format == "pt":
        check_new_folder(args.output, "output")
    elif args.output.suffix != ".safetensors":
        raise ConfigError(
            f"option 'output': {args.output} ends in {args.output.suffix or 'no suffix'}, expected .safetensors"
        )
    log = open_log_of(args)
    steps = sorted(set(args.step))
    found: dict[str, Any] = {"output": args.output, "format": args.format}
    pt = args.format == "pt"
    total, unit = (len(steps), "step") if pt else (len(log.layout.names), "tensor")
    with progress_bar(total=total, what="export", unit=unit) as bar:
        if args.format == "state":
            export_state(log, steps[0], args.output, on_tensor=bar.update)
            found |= {"step": steps[0], "digest": log.digest(steps[0])}
            said = f"the state at step {steps[0]}"
        elif args.format == "values":
            since = _step_before(log, steps[0]) if args.since is None else args.since
            changed = export_values(log, since, steps[0], args.output, on_tensor=bar.update)
            found |= {"step": steps[0], "since": since, "changed": changed}
            said = f"{changed:,} elements that changed from step {since} to step {steps[0]}"
        else:
            inexact = export_pt(log, steps, args.output, on_step=lambda step: bar.update())
            found |= {"steps": steps, "inexact": inexact}
            lost = ", ".join(f"{count:,} at step {step}" for step, count in inexact.items() if count)
            said = f"{len(steps)} steps and their base" + (
                f"; elements that are not restored exactly: {lost}" if lost else ""
            )
    files = list(args.output.iterdir()) if pt else [args.output]
    found["bytes"] = sum(path.stat().st_size for path in files)
    if args.json:
        print_json(found)
    else:
        print(f"{args.output}: {said}, {format_bytes(found['bytes'])}")


def _step_before(log: Log, step: int) -> int:
    log.digest(step)  # raises if the step is not logged
    earlier = [logged for logged in log.steps if logged < step]
    if not earlier:
        raise ConfigError(f"option 'step' is {step}: it is the base, with no step before it")
    return earlier[-1]
