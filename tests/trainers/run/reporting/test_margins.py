"""The margins log by itself: what it writes, and what a resumed run leaves of it."""

from __future__ import annotations

import json

import numpy as np
import torch

from sparse_opt.integrations.trl.margins import step_file
from sparse_opt.trainers.run.outputs import RowFile
from sparse_opt.trainers.run.reporting.margins import MarginsLog


class Run:
    """The attributes and methods of a run that the log uses."""

    def __init__(self, output_dir, last_step=None):
        self.output_dir, self.last_step = output_dir, last_step

    def row_file(self, name):
        path = self.output_dir / name
        if self.last_step is None:
            return RowFile(path)
        file = RowFile.resumed(path, self.last_step)
        file.cut()
        return file

    def epoch_of(self, step):
        return (step - 1) // 2


def test_rows_and_files(tmp_path):
    log = MarginsLog(Run(tmp_path))
    log.write(1, torch.tensor([1.0, -1.0, 0.0, 4.0], requires_grad=True))
    log.write(3, torch.tensor([0.5], dtype=torch.bfloat16))
    first, second = map(json.loads, (log.folder / "margins_log.jsonl").read_text().splitlines())
    assert first == {
        "step": 1, "epoch": 0, "n": 4, "mean": 1.0, "std": 3.5**0.5, "min": -1.0, "max": 4.0, "share_positive": 0.5,
    }  # fmt: skip
    assert (second["epoch"], second["mean"], second["std"]) == (1, 0.5, 0.0)
    assert np.load(tmp_path / "logs" / "margins" / "epoch_000" / "step_00001.npy").tolist() == [1.0, -1.0, 0.0, 4.0]
    assert np.load(step_file(log.folder, 1, 3)).tolist() == [0.5]
    assert sorted(path.name for path in log.folder.iterdir()) == ["epoch_000", "epoch_001", "margins_log.jsonl"]


def test_a_resumed_log_goes_on_after_the_checkpoint(tmp_path):
    log = MarginsLog(Run(tmp_path))
    for step in range(1, 6):
        log.write(step, torch.full((2,), float(step)))
    resumed = MarginsLog(Run(tmp_path, last_step=3))
    assert len(list(resumed.folder.glob("*/*.npy"))) == 5
    resumed.write(4, torch.full((2,), 40.0))
    files = sorted(path.name for path in resumed.folder.glob("*/*.npy"))
    assert files == [f"step_{step:05d}.npy" for step in range(1, 5)]
    rows = [json.loads(line) for line in (log.folder / "margins_log.jsonl").read_text().splitlines()]
    assert [(row["step"], row["mean"]) for row in rows] == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 40.0)]
    assert np.load(step_file(log.folder, 1, 4)).tolist() == [40.0, 40.0]


def test_a_run_that_was_cut_before_its_first_checkpoint_begins_anew(tmp_path):
    log = MarginsLog(Run(tmp_path))
    log.write(1, torch.ones(2))
    log.write(2, torch.ones(2))
    resumed = MarginsLog(Run(tmp_path, last_step=-1))
    resumed.write(1, torch.zeros(2))
    assert [path.name for path in resumed.folder.glob("*/*.npy")] == ["step_00001.npy"]
    assert [json.loads(line)["mean"] for line in (log.folder / "margins_log.jsonl").read_text().splitlines()] == [0.0]
