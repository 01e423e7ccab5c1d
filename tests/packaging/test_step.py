"""The Makefile's steps: the end of the log of one that failed, and stamps."""

from __future__ import annotations

import os


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
