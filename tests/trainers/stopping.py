"""Runs that are killed and resumed, and the comparison of their outputs with those of an uninterrupted run."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from sparse_opt.errors import DataError
from sparse_opt.trainers.run.training_run import TrainingRun


class StoppedError(Exception):
    """Raised in place of a kill."""


def stop(monkeypatch, train, config, step):
    """Run `train(config)` until it dies in the step after `step`, whose metrics are written by then."""
    original = TrainingRun.log

    def log(self, at, *args, **metrics):
        original(self, at, *args, **metrics)
        if at == step + 1:
            raise StoppedError

    with monkeypatch.context() as patch:
        patch.setattr(TrainingRun, "log", log)
        with pytest.raises(StoppedError):
            train(config)


def stop_and_resume(monkeypatch, train, config, step):
    """The summary of a run that was stopped after `step` and went on, once its last checkpoint was found damaged."""
    stop(monkeypatch, train, config, step)
    resumed = dataclasses.replace(config, resume=True)
    for file in newest_checkpoint(config.output_dir):
        flip_a_bit(file)
        with pytest.raises(DataError, match=f"{file.parent.name}: .*{re.escape(file.name)}"):
            train(resumed)
        flip_a_bit(file)
    return train(resumed)


def newest_checkpoint(output_dir):
    """The files of a run's newest checkpoint; none where it has no checkpoint."""
    folders = sorted(Path(output_dir).glob("checkpoints/step_*"))
    return sorted(folders[-1].iterdir()) if folders else []


def flip_a_bit(file):
    """Change one bit in the middle of a file; a second time changes it back."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def rows(path):
    """A run's JSON lines, without what a clock says."""
    found = [json.loads(line) for line in Path(path).read_text().splitlines()]
    return [
        {key: value for key, value in row.items() if not key.endswith(("_time_s", "tokens_per_s"))} for row in found
    ]


def assert_same_run(one, two):
    """The same rows in the same files, and the same bits in the final weights, by the runs' summaries."""
    folders = [Path(summary["checkpoint"]).parent for summary in (one, two)]
    names = {path.name for path in folders[0].glob("*.jsonl")}
    assert names == {path.name for path in folders[1].glob("*.jsonl")}
    for name in names:
        assert rows(folders[0] / name) == rows(folders[1] / name), name
    first, second = (AutoModelForCausalLM.from_pretrained(folder / "final").state_dict() for folder in folders)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert one["n_steps"] == two["n_steps"] and one["median"].keys() == two["median"].keys()
