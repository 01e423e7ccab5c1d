from __future__ import annotations

import importlib.util
import json

import pytest

from sparse_opt.bench.kernels import roofline


def row(work: str, backend: str, density: float | None, nbytes: float | None, ms: float) -> dict[str, object]:
    return {"work": work, "backend": backend, "density": density, "bytes": nbytes, "ms": ms}


ROWS = [
    row("step", "cuda", 0.025, 8e9, 4.0),
    row("step", "triton", 0.025, 8e9, 4.1),
    row("step", "cuda", 0.1, 8e9, 1.0),
    row("dense", "torch", None, 40e9, 16.0),
    row("clip", "cuda", 0.025, None, 0.01),
    row("tile_weight_grad_, tile64, 8192 tokens", "cuda", 0.025, 2e10, 8.0),
    row("torch.mm, 8192 tokens", "torch", None, 2e10, 60.0),
]


def written(tmp_path, report):
    path = tmp_path / "results.json"
    path.write_text(json.dumps(report))
    return path


def report():
    machine = {"cpu": "a CPU", "gpu": {"name": "a GPU"}}
    return {"environment": {"machine": machine}, "kernels": {"rows": ROWS, "copy_gb_per_s": 4000.0}}


def test_points_are_the_rows_with_bytes_at_the_density_and_the_dense_ones():
    points = roofline.points_of(ROWS, 0.025)
    assert [(p["label"], round(p["gb_per_s"])) for p in points] == [
        ("dense (torch)", 2500),
        ("step (cuda)", 2000),
        ("step (triton)", 1951),
    ]
    assert roofline.clusters(points) == [[1], [2, 3]]  # so near that their numbers share a label


def test_the_figure_is_written(tmp_path):
    pytest.importorskip("matplotlib", reason="needs matplotlib: pip install 'sparse-opt[plot]'")
    path = written(tmp_path, report())
    assert roofline.main([str(path)]) == 0
    assert (tmp_path / "roofline.png").read_bytes().startswith(b"\x89PNG")


def failed(capsys, *words):
    with pytest.raises(SystemExit) as stopped:
        roofline.main([str(word) for word in words])
    assert stopped.value.code == 2
    return capsys.readouterr().err.splitlines()[-1]


def test_without_matplotlib_it_says_so(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "matplotlib is not installed" in failed(capsys, written(tmp_path, report()))


def test_foreign_results_are_named(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    assert "no such file" in failed(capsys, tmp_path / "none.json")
    assert "wanted 'kernels'" in failed(capsys, written(tmp_path, {"rows": []}))
    assert "no row with bytes at density 0.5" in failed(
        capsys, written(tmp_path, {"kernels": {"rows": ROWS[:1], "copy_gb_per_s": 1.0}}), "--density", 0.5
    )
    path = tmp_path / "torn.json"
    path.write_text("{")
    assert "not JSON" in failed(capsys, path)
