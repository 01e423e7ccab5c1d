"""A small run of `sparse-opt bench verl`: two gloo processes, both engines."""

import os
from pathlib import Path

import pytest

pytest.importorskip("verl", reason="needs verl: make test-verl")

from sparse_opt.bench import rows
from sparse_opt.cli.main import main


def test_a_small_run(tmp_path, capfd, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)  # for `cpu_platform`
    output = tmp_path / "verl.json"
    code = main(["bench", "verl", "--small", "--n_rounds", "2", "--folder", str(tmp_path), "--output", str(output)])
    out, err = capfd.readouterr()
    assert code == 0, err
    run = rows.read(output)
    assert run.completed and run.rows[0].case["verl"] == "0.9.1"
    times = [row for row in run.rows if row.metric == "time"]
    assert [row.case["engine"] for row in times] == ["fsdp2", "sparse_fsdp2"]
    assert all(row.p20 <= row.value <= row.p80 and row.n == 2 for row in times)
    assert "the first updates agree" in out
    assert (tmp_path / "tiny_0/config.json").is_file()
