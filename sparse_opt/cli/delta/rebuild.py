"""`sparse-opt delta reconstruct`: write a step of a log as a checkpoint."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..output import print_json

if TYPE_CHECKING:
    import torch

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
