"""Files that the package writes, whatever is in them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from sparse_opt import DeltaLog, MaskSet


@pytest.fixture(params=[0o022, 0o027], ids=oct)
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def test_files_have_the_mode_of_the_umask(umask: int, tmp_path: Path) -> None:
    state = {"w": torch.zeros(64)}
    mask = MaskSet.random({"w": (64,)}, density=0.5)
    mask.save(tmp_path / "mask.safetensors")
    with DeltaLog.create(tmp_path / "log", state, mask=mask, keyframe_every=2) as log:
        for step in (1, 2):
            state["w"][mask["w"].long()] += 1
            log.append(step)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) >= 5
    assert {path.name: path.stat().st_mode & 0o777 for path in files} == {path.name: 0o666 & ~umask for path in files}
