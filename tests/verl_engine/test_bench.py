"""A small run of `sparse-opt bench verl`: two gloo processes, both engines."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("verl", reason="needs verl: make test-verl")

from sparse_opt.cli.main import main


def test_a_small_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    output = tmp_path / "verl.json"
    code = main(["bench", "verl", "--small", "--n_rounds", "2", "--folder", str(tmp_path), "--output", str(output)])
    out, err = capfd.readouterr()
    assert code == 0, err
    report = json.loads(output.read_text())
    assert report["completed"] and report["settings"]["verl"] == "0.9.1"
    assert [row["engine"] for row in report["rows"]] == ["fsdp2", "sparse_fsdp2"]
    for row in report["rows"]:
        assert row["p20_ms"] <= row["ms"] <= row["p80_ms"] and row["n_rounds"] == 2
    check = report["check"]
    assert check["met"] and 0 < check["moment_error"] <= check["moment_tolerance"]
    # The norm of the active gradients is a part of that of all.
    assert 0 < check["grad_norm"][1] < check["grad_norm"][0]
    assert "The first updates agree" in out and "sparse_fsdp2, SparseAdamW" in out
    assert (tmp_path / "tiny_0/config.json").is_file()
