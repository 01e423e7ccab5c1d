"""Which commit a result names."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from sparse_opt.bench.common import environment


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A repository with the module in bench/, and how to run git there."""
    if shutil.which("git") is None:
        pytest.skip("needs git")
    monkeypatch.delenv(environment.COMMIT_VARIABLE, raising=False)
    monkeypatch.setattr(environment, "__file__", str(tmp_path / "bench" / "common" / "environment.py"))
    for name in ("common", "results"):
        (tmp_path / "bench" / name).mkdir(parents=True)
    for name in ("bench/common/environment.py", "bench/results/x.json", "setup.py"):
        (tmp_path / name).write_text("1\n")

    def git(*words: str) -> str:
        author = ("-c", "user.name=a", "-c", "user.email=a@b")
        return subprocess.run(
            ["git", "-C", tmp_path, *author, *words], check=True, capture_output=True, text=True
        ).stdout

    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "one")
    return tmp_path, git("rev-parse", "HEAD").strip()


def test_files_that_differ_are_said(checkout):
    folder, head = checkout
    assert environment.commit() == head
    (folder / "new.py").write_text("2\n")
    assert environment.commit() == head  # not git's
    (folder / "setup.py").write_text("2\n")
    assert environment.commit() == f"{head}-dirty"


def test_results_are_no_part_of_the_code(checkout):
    folder, head = checkout
    (folder / "bench" / "results" / "x.json").write_text("2\n")
    assert environment.commit() == head
    (folder / "bench" / "common" / "environment.py").write_text("2\n")
    assert environment.commit() == f"{head}-dirty"


def test_a_named_commit_goes_before_the_checkout(checkout, monkeypatch):
    monkeypatch.setenv(environment.COMMIT_VARIABLE, "abc")
    assert environment.commit() == "abc"
