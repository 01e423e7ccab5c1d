"""`MarginsLog`: the margins of a DPO run, in the files of `integrations.trl.margins`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from sparse_opt.integrations.trl.margins import MARGINS_FILE, MARGINS_FOLDER, remove_from, step_file, write_margins

from ..outputs import writing

if TYPE_CHECKING:
    from ..training_run import TrainingRun


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
            remove_from(self.folder, step)
            self._written = True
        epoch = self._run.epoch_of(step)
        with writing(step_file(self.folder, epoch, step)):
            row = write_margins(self.folder, epoch, step, margins)
        self._rows.write(row)
