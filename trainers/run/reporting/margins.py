"""`MarginsLog`: write the margin of each pair of a DPO run to disk.

    logs/margins/margins_log.jsonl              one row per step: step, epoch, n, mean, std, min, max, share_positive
    logs/margins/epoch_000/step_00001.npy       the step's margins, fp32 [n], in the order of the data

A margin is beta * h, the implicit reward of the chosen completion minus that of the rejected one. Epochs count from 0
(complete passes over the data before the step), steps from 1; std is the population standard deviation.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from sparse_opt.files import written_aside

from ..outputs import writing

if TYPE_CHECKING:
    from ..training_run import TrainingRun

MARGINS_FOLDER = Path("logs", "margins")
MARGINS_FILE = "margins_log.jsonl"
_STEP_FILE = re.compile(r"step_(\d+)\.npy")


class MarginsLog:
    """Writes the margins of a run's steps. A resumed run rewrites those of the steps after its checkpoint.

    Args:
        folder: where to write; by default logs/margins in the run's output folder.
    """

    def __init__(self, run: TrainingRun, folder: Path | None = None):
        self._run = run
        self.folder = folder or run.output_dir / MARGINS_FOLDER
        self.folder.mkdir(parents=True, exist_ok=True)
        self._rows = run.row_file(str(self.folder.absolute() / MARGINS_FILE))
        self._written = False

    def write(self, step: int, margins: torch.Tensor) -> None:
        """Write a step's margins [n]: the file before the row, so that the file of every row exists."""
        if not self._written:
            self._remove_from(step)
            self._written = True
        values = margins.detach().float().cpu().numpy()
        epoch = self._run.epoch_of(step)
        file = step_file(self.folder, epoch, step)
        file.parent.mkdir(exist_ok=True)
        with writing(file), written_aside(file) as aside, aside.open("wb") as stream:
            np.save(stream, values)
        exact = values.astype(np.float64)
        self._rows.write(
            {
                "step": step,
                "epoch": epoch,
                "n": len(values),
                "mean": float(exact.mean()),
                "std": float(exact.std()),
                "min": float(exact.min()),
                "max": float(exact.max()),
                "share_positive": float((exact > 0).mean()),
            }
        )

    def _remove_from(self, first: int) -> None:
        """Remove the files that an earlier process wrote for this step and later ones."""
        for file in self.folder.glob("epoch_*/step_*.npy"):
            match = _STEP_FILE.fullmatch(file.name)
            if match and int(match[1]) >= first:
                file.unlink()


def step_file(folder: Path, epoch: int, step: int) -> Path:
    """The path of a step's margins."""
    return folder / f"epoch_{epoch:03d}" / f"step_{step:05d}.npy"
