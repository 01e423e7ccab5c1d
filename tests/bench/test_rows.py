"""Rows and runs: their peers, their files, and the commit that they name."""

import json
import shutil
import subprocess

import pytest

from sparse_opt.bench import rows
from sparse_opt.bench.rows import Row, Run
from sparse_opt.errors import ConfigError


def row(mode: str = "dense", metric: str = "time", value: float = 2.0, **others) -> Row:
    case = {"mode": mode, "batch_size": 4, "compile": False, "pattern": None, "exclude": ["a", "b"]}
    return Row(suite="s", case=case | others.pop("case", {}), metric=metric, unit="ms", value=value, **others)


def test_a_run_is_read_as_it_was_written(tmp_path):
    path = tmp_path / "run.json"
    peers = {"bound": 1.0, "dense": {"mode": "dense", "rank": None}}
    run = Run({"commit": "a"}, [row(), row("lora", case={"rank": 16}, p20=1.0, p80=3.0, n=5, peers=peers)])
    run.notes, run.wrong, run.completed = ["n"], ["w"], False
    run.add(row("sparse", environment={"commit": "b"}))
    rows.write(path, run)
    assert rows.read(path) == run
    text = json.loads(path.read_text())
    assert text["case"] == {"batch_size": 4, "exclude": "a b"}  # what all have in common is there once
    assert text["rows"][0]["case"] == {"mode": "dense"}
    with pytest.raises(ValueError, match="JSON"):
        rows.write(path, Run({}, [row(value=float("nan"))]))
    assert rows.read(path) == run


def test_peers_are_numbers_or_rows_of_other_cases():
    dense, lora = row(), row("lora", case={"rank": 16}, peers={"bound": 1.0, "dense": {"mode": "dense", "rank": None}})
    run = Run({}, [dense, lora, row(metric="memory")])
    assert run.peer(lora, "bound") == 1.0
    assert run.peer(lora, "dense") is dense
    assert run.peer(dense, "dense") is None and run.peer(row("x", peers={"y": {"mode": "y"}}), "y") is None


def test_a_row_replaces_one_of_the_same_case_and_metric():
    run = Run({}, [row(value=1.0), row(metric="memory")])
    run.add(row(value=3.0))
    assert [(found.metric, found.value) for found in run.rows] == [("memory", 2.0), ("time", 3.0)]


@pytest.mark.parametrize("text", ["{", "{}", '{"rows": [{"suite": "s"}], "case": {}}', None])
def test_a_file_without_a_run_is_named(tmp_path, text):
    path = tmp_path / "run.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=f"{path}: (expected the JSON of|cannot read)"):
        rows.read(path)


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A repository with the module in bench/, and how to run git there."""
    if shutil.which("git") is None:
        pytest.skip("needs git")
    monkeypatch.delenv(rows.COMMIT_VARIABLE, raising=False)
    monkeypatch.setattr(rows, "__file__", str(tmp_path / "bench" / "rows.py"))
    (tmp_path / "bench" / "results").mkdir(parents=True)
    for name in ("bench/rows.py", "bench/results/x.json", "setup.py"):
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


def test_the_commit_says_whether_files_differ_but_for_results(checkout, monkeypatch):
    folder, head = checkout
    (folder / "new.py").write_text("2\n")
    (folder / "bench" / "results" / "x.json").write_text("2\n")
    assert rows.commit() == head
    (folder / "setup.py").write_text("2\n")
    assert rows.commit() == f"{head}-dirty"
    monkeypatch.setenv(rows.COMMIT_VARIABLE, "abc")
    assert rows.commit() == "abc"
