"""`MarginsCallback`: write the margin of each pair of a DPO run to disk.

    logs/margins/margins_log.jsonl              one row per step: step, epoch, n, mean, std, min, max, share_positive
    logs/margins/epoch_000/step_00001.npy       the step's margins, fp32 [n], in the order of the data

A margin is beta * h, the implicit reward of the chosen completion minus that of the rejected one. Epochs count from 0
(complete passes over the data before the step), steps from 1; std is the population standard deviation.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import TrainerCallback

from ...errors import SparseOptError
from ...files import written_aside
from .row_file import RowFile

MARGINS_FOLDER = Path("logs", "margins")
MARGINS_FILE = "margins_log.jsonl"
_STEP_FILE = re.compile(r"step_(\d+)\.npy")


class MarginsCallback(TrainerCallback):
    """Writes the margins of a `DPOTrainer`, dense or sparse, to `logs/margins` in its output folder:

        trainer.add_callback(MarginsCallback(trainer))

    TRL logs only their mean. Its trainer gathers the margins of all processes with `accelerator.gather`, and the
    callback reads them there; process 0 writes. A resumed run rewrites the steps after its checkpoint.

    Args:
        folder: the folder to write to, in place of that one.

    Raises:
        SparseOptError: the trainer gathers no tensor with the mean that it logs as `rewards/margins`.
    """

    def __init__(self, trainer: Any, folder: Path | None = None) -> None:
        self._trainer = trainer
        self._given = folder
        self._gather = trainer.accelerator.gather
        self._gathered: list[Tensor] = []  # in this micro-batch
        self._margins: list[Tensor] = []  # of the micro-batches of this step

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._trainer.accelerator.gather = self._record
        if state.is_world_process_zero:
            remove_after(self._folder(args), state.global_step)

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        logged = self._trainer._metrics["train"]["rewards/margins"][-1]
        found = [values for values in self._gathered if values.mean().item() == logged]
        self._gathered = []
        if not found:
            raise SparseOptError(
                f"{type(self._trainer).__name__} logs rewards/margins {logged}, and gathers no tensor of that mean: "
                "the margins of this version of TRL cannot be written"
            )
        self._margins.append(found[-1].float().cpu())

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.on_substep_end(args, state, control)
        values, self._margins = torch.cat(self._margins), []
        if state.is_world_process_zero:
            epoch = max(math.ceil(round(state.epoch, 6)) - 1, 0)  # `state.epoch` counts this step
            write_margins(self._folder(args), epoch, state.global_step, values.numpy())

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._trainer.accelerator.gather = self._gather

    def _record(self, tensor: Any) -> Any:
        gathered = self._gather(tensor)
        if self._trainer.model.training and isinstance(gathered, Tensor) and gathered.is_floating_point():
            if gathered.dim() == 1:
                self._gathered.append(gathered.detach())
        return gathered

    def _folder(self, args: Any) -> Path:
        return self._given or Path(args.output_dir) / MARGINS_FOLDER


def write_margins(folder: Path, epoch: int, step: int, values: np.ndarray) -> None:
    """Write the file of a step's margins, fp32 [n], and the step's row of `margins_log.jsonl`."""
    file = folder / f"epoch_{epoch:03d}" / f"step_{step:05d}.npy"
    file.parent.mkdir(parents=True, exist_ok=True)
    with written_aside(file) as aside, aside.open("wb") as stream:
        np.save(stream, values)
    exact = values.astype(np.float64)
    row = {
        "step": step,
        "epoch": epoch,
        "n": len(values),
        "mean": float(exact.mean()),
        "std": float(exact.std()),
        "min": float(exact.min()),
        "max": float(exact.max()),
        "share_positive": float((exact > 0).mean()),
    }
    RowFile(folder / MARGINS_FILE).write(row)


def remove_after(folder: Path, last_step: int) -> None:
    """Remove what an earlier process wrote about steps after `last_step`; 0 removes all."""
    for file in folder.glob("epoch_*/step_*.npy"):
        match = _STEP_FILE.fullmatch(file.name)
        if match and int(match[1]) > last_step:
            file.unlink()
            if not any(file.parent.iterdir()):
                file.parent.rmdir()
    RowFile(folder / MARGINS_FILE).cut(last_step)
