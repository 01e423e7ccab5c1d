"""A run of 200 steps, killed and resumed in the middle: each of its steps is in the log, as in a run that was not."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from launch import run_script

from sparse_opt import DeltaLog
from sparse_opt.delta.digest import StateDigest
from sparse_opt.delta.state import read_state

sys.path.insert(0, str(Path(__file__).parent))
from run_driver import STEPS, make_mask, make_model, train


@pytest.mark.slow
def test_every_step_of_a_run_that_was_killed_and_resumed(tmp_path: Path) -> None:
    model = make_model()
    layout, tensors = read_state(model)

    def digest() -> str:
        return layout.state_digest(StateDigest.start([tensors[name] for name in layout.names]).result())

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in the other process: sums of another order are others
    try:
        expected = {0: digest(), **{step: digest() for step in train(model)}}
    finally:
        torch.set_num_threads(threads)
    assert len(set(expected.values())) == STEPS + 1

    driver = Path(__file__).with_name("run_driver.py")
    for killed_at in ("117", "163", None):
        done = run_script(driver, [str(tmp_path), *([] if killed_at is None else [killed_at])], timeout=300)
        assert done.returncode == (0 if killed_at is None else -9), done.stderr
        log = DeltaLog.open(tmp_path / "log")
        if killed_at is not None:
            # The last submitted step may not be on disk.
            assert int(killed_at) - 2 <= log.last_step <= int(killed_at)

    assert log.steps == tuple(range(STEPS + 1))
    assert {step: log.digest(step) for step in log.steps} == expected
    # Rebuilds each of them, and compares its digest with the one in the file.
    assert log.verify() == []
    assert all(info.masked for info in log.info() if info.kind == "patch")
    assert log.mask_digest == make_mask(model).digest
    for step in (1, 59, 60, 117, 118, 200):
        state = log.load(step)
        found = StateDigest.start([state[name] for name in layout.names]).result()
        assert layout.state_digest(found) == expected[step]
