"""What `make release-check` finds in the files of a release."""

from __future__ import annotations

import runpy
import shutil
from pathlib import Path

import pytest

WHEEL = "sparse_opt-0.1.0-cp311-abi3-manylinux_2_34_x86_64.whl"
CUDA_WHEEL = "sparse_opt-0.1.0+cu130-cp311-abi3-manylinux_2_34_x86_64.whl"
SOURCES = "sparse_opt-0.1.0.tar.gz"


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ([WHEEL, SOURCES, f"cuda/{CUDA_WHEEL}"], []),
        ([SOURCES], ["dist has no a manylinux abi3 wheel"]),
        ([WHEEL, SOURCES, CUDA_WHEEL], [f"{CUDA_WHEEL} is not of version 0.1.0"]),
        ([WHEEL, SOURCES, f"cuda/{WHEEL}"], [f"cuda/{WHEEL} has the version 0.1.0, expected 0.1.0+cu"]),
    ],
    ids=["right", "no wheel", "local version", "no local version"],
)
def test_what_may_not_be_published(names, expected, checkout, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for file in ("CHANGELOG.md", "sparse_opt/__init__.py"):
        Path(file).parent.mkdir(exist_ok=True)
        shutil.copy(checkout / file, file)
    for name in names:
        (tmp_path / "dist" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "dist" / name).touch()
    found = runpy.run_path(str(checkout / ".ci/release_check.py"))["problems"](tmp_path, Path("dist"))
    assert len(found) == len(expected) and all(map(str.startswith, found, expected)), found
