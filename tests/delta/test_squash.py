"""Squashing removes steps; the others keep their bits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from sparse_opt import DeltaLog
from sparse_opt.errors import DeltaLogError

Compare = Callable[[Mapping[str, Tensor], Mapping[str, Tensor]], None]


@pytest.mark.parametrize(
    ("a", "b", "kind"), [(0, 2, "patch"), (2, 7, "patch"), (1, 5, "keyframe"), (0, 8, "patch"), (7, 8, "patch")]
)
def test_squash(logged: Any, same_bits: Compare, a: int, b: int, kind: str) -> None:
    """Steps 0 (keyframe), 1, 2, 5 (keyframe), 7, 8."""
    gone = []
    with DeltaLog.open(logged.directory) as log:
        info = log.squash(a, b, on_step=gone.append)
    assert gone == sorted((step for step in logged.states if a < step < b), reverse=True)
    assert (info.step, info.kind) == (b, kind)
    if gone and kind == "patch":
        assert info.parent_step == a
    log = DeltaLog.open(logged.directory)
    assert log.steps == tuple(step for step in logged.states if not a < step < b)
    assert log.verify() == []
    for step in log.steps:
        same_bits(log.load(step), logged.states[step])
    with pytest.raises(DeltaLogError, match="is not logged"):
        log.load(gone[0] if gone else 3)


def test_a_log_that_codes_against_its_base_keeps_to_it(tmp_path: Path, states: Any, same_bits: Compare) -> None:
    state = states.state()
    kept = {0: state}
    with DeltaLog.create(tmp_path / "log", state, against="base") as log:
        for step in range(1, 6):
            kept[step] = states.change(state, 0.02)
            log.append(step, kept[step])
        info = log.squash(1, 4)
        assert (info.kind, info.parent_step) == ("patch", 0)
        assert log.steps == (0, 1, 4, 5)
        for step in log.steps:
            same_bits(log.load(step), kept[step])
        (tmp_path / "log" / "step_00000001.patch.safetensors").unlink()
        same_bits(log.load(4), kept[4])
        assert [(p.file, p.lost_steps) for p in log.verify()] == [("step 1", (1,))]


def test_appending_after_a_squash(logged: Any, states: Any, same_bits: Compare) -> None:
    """While writing: later steps are coded against the kept step, and keyframe intervals count existing steps."""
    kept = dict(logged.states)
    with DeltaLog.open(logged.directory) as log:
        kept[9] = states.change(kept[8], 0.05)
        assert log.append(9, kept[9]).wait().kind == "keyframe"
        for step in (10, 11):
            kept[step] = states.change(kept[step - 1], 0.05)
            log.append(step, kept[step])
        log.squash(9, 11)
        kept[12] = states.change(kept[11], 0.05)
        assert log.append(12, kept[12]).wait().parent_step == 11
        kept[13] = states.change(kept[12], 0.05)
        assert log.append(13, kept[13]).wait().kind == "keyframe"  # the third behind step 9
        for step in log.steps:
            same_bits(log.load(step), kept[step])
        assert log.verify() == []


def test_what_can_not_be_squashed(logged: Any, same_bits: Compare) -> None:
    log = DeltaLog.open(logged.directory)
    for a, b, message in (
        (0, 3, "step 3 is not logged"),
        (4, 8, "step 4 is not logged"),
        (5, 5, "squash from step 5 to step 5, expected ascending steps"),
        (8, 1, "squash from step 8 to step 1"),
    ):
        with pytest.raises(DeltaLogError, match=f"{logged.directory}: {message}"):
            log.squash(a, b)
    with DeltaLog.open(logged.directory, logged.states[8]) as writer:
        writer.append(9).wait()
        with pytest.raises(DeltaLogError, match="another writer has this delta log open"):
            log.squash(0, 2)
    # Nothing is removed if the state cannot be kept.
    content = bytearray(logged.file(1).read_bytes())
    content[-1] ^= 1
    logged.file(1).write_bytes(content)
    with pytest.raises(DeltaLogError, match=f"{logged.file(1)}: step 1: damaged"):
        log.squash(0, 2)
    assert log.steps == (*logged.states, 9)
