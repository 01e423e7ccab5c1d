"""Programs of .ci: the check of a release, and the Makefile's steps with their logs and stamps."""

import os
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


def test_a_failed_step_shows_the_end_of_its_log_and_leaves_no_stamp(python, checkout, tmp_path):
    script = "for i in $(seq 100); do echo line $i; done; echo 'a.cpp:1: error: no such thing' >&2; exit 7"
    step = python(checkout / ".ci/step.py", "--stamp", "stamp", "building", "sh", "-c", script, cwd=tmp_path)
    assert step.returncode == 1
    lines = step.stdout.splitlines()
    assert lines[1].endswith("the end of build/logs/building.log:")
    assert lines[2:] == [*(f"line {index}" for index in range(72, 101)), "a.cpp:1: error: no such thing"]
    assert not (tmp_path / "stamp").exists()


def test_a_stamp_is_older_than_a_source_edited_during_the_step(python, checkout, tmp_path):
    source, stamp = tmp_path / "source", tmp_path / "stamp"
    source.write_text("")
    os.utime(source, (1, 1))
    command = (checkout / ".ci/step.py", "--stamp", stamp, "building")
    python(*command, "true", cwd=tmp_path)
    assert source.stat().st_mtime < stamp.stat().st_mtime

    python(*command, "sh", "-c", "sleep 0.1; touch source", cwd=tmp_path)
    assert source.stat().st_mtime > stamp.stat().st_mtime
