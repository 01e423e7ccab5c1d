"""Removal of steps at the end of a log, for a run that continues from an earlier one."""

from __future__ import annotations

import pytest
import torch

from sparse_opt.delta.log import DeltaLog
from sparse_opt.errors import DeltaLogError


@pytest.fixture
def log(tmp_path):
    """Steps 0, 2, 4, 6 of a small state, and the state."""
    state = {"weight": torch.arange(64, dtype=torch.float32), "bias": torch.zeros(3, dtype=torch.bfloat16)}
    log = DeltaLog.create(tmp_path / "log", state, keyframe_every=2)
    for step in (2, 4, 6):
        state["weight"][step] += 0.5
        log.append(step)
    return log, state


@pytest.mark.parametrize(
    ("after", "left"), [(0, (0,)), (3, (0, 2)), (4, (0, 2, 4)), (6, (0, 2, 4, 6)), (9, (0, 2, 4, 6))]
)
def test_truncate_removes_the_later_steps_alone(log, after, left):
    log, _ = log
    log.flush()
    digests = {step: log.digest(step) for step in left}
    log.truncate(after)
    assert log.steps == left
    assert not log.verify()
    assert {step: log.digest(step) for step in left} == digests


def test_the_run_continues_after_the_truncation(log):
    log, state = log
    log.truncate(3)
    state["weight"][4] -= 0.5
    state["weight"][6] -= 0.5
    assert log.step_of(state) == 2
    state["weight"][7] = -1.0
    log.append(5, state)
    log.close()
    assert log.steps == (0, 2, 5)
    assert torch.equal(log.load(5)["weight"], state["weight"])


def test_a_log_keeps_its_start(log):
    log, _ = log
    with pytest.raises(DeltaLogError, match="truncating after step -1: the log begins with step 0"):
        log.truncate(-1)
    assert log.steps == (0, 2, 4, 6)


def test_another_writers_log_is_left_alone(log):
    log, _ = log
    with pytest.raises(DeltaLogError, match="another writer has this delta log open"):
        DeltaLog.open(log.directory).truncate(2)
    log.close()
    assert log.steps == (0, 2, 4, 6)
