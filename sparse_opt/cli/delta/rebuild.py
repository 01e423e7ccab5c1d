"""`sparse-opt delta reconstruct|export`: write a step of a log as a checkpoint, or in formats of other tools."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import ConfigError
from ...progress import progress_bar
from ...tables import format_bytes
from ..output import print_json

if TYPE_CHECKING:
    import torch

    from ...delta.log import DeltaLog
    from ...delta.state import StateLayout


def run_reconstruct(args: Namespace) -> None:
    """Write a step as a checkpoint."""
    digest = reconstruct(args.delta_log_dir, args.step, args.model_name, args.output_dir)
    if args.json:
        print_json({"checkpoint": args.output_dir, "step": args.step, "digest": digest})
    else:
        print(f"{args.output_dir}: step {args.step}, state digest {digest}")


def reconstruct(delta_log_dir: Path, step: int, model_name: str, output_dir: Path) -> str:
    """Write the model at a logged step, with its tokenizer, as a checkpoint; return the state's digest.

    The folder is written atomically.

    Raises:
        ConfigError: the folder is not empty or cannot be created.
        DeltaLogError: the step is not logged, the log is damaged, or it belongs to another model.
        DataError: the model cannot be loaded.
    """
    from sparse_opt.trainers.pretrained import load_causal_lm, load_tokenizer_from

    from ...delta.log import DeltaLog
    from ...files import check_new_folder, save_model
    from ...progress import hide_progress_bars

    log = DeltaLog.open(delta_log_dir)
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
    from ...delta.log import DeltaLog

    if args.format != "values" and args.since is not None:
        raise ConfigError(f"option 'since' is {args.since}: format {args.format} has none")
    if args.output.suffix != ".safetensors":
        raise ConfigError(
            f"option 'output': {args.output} ends in {args.output.suffix or 'no suffix'}, expected .safetensors"
        )
    log = DeltaLog.open(args.delta_log_dir)
    found: dict[str, Any] = {"output": args.output, "format": args.format, "step": args.step}
    with progress_bar(total=len(log.layout.names), what="export", unit="tensor") as bar:
        if args.format == "state":
            export_state(log, args.step, args.output, on_tensor=bar.update)
            found |= {"digest": log.digest(args.step)}
            said = f"the state at step {args.step}"
        else:
            since = _step_before(log, args.step) if args.since is None else args.since
            changed = export_values(log, since, args.step, args.output, on_tensor=bar.update)
            found |= {"since": since, "changed": changed}
            said = f"{changed:,} elements that changed from step {since} to step {args.step}"
    found["bytes"] = args.output.stat().st_size
    if args.json:
        print_json(found)
    else:
        print(f"{args.output}: {said}, {format_bytes(found['bytes'])}")


def _step_before(log: DeltaLog, step: int) -> int:
    log.digest(step)  # raises if the step is not logged
    earlier = [logged for logged in log.steps if logged < step]
    if not earlier:
        raise ConfigError(f"option 'step' is {step}: it is the base, with no step before it")
    return earlier[-1]
