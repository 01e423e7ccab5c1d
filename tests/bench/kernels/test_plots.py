from __future__ import annotations

import json
import sys
from types import ModuleType

import pytest

from sparse_opt.bench.kernels import plots
from sparse_opt.bench.kernels.table import targets


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
    points = plots.points_of(ROWS, 0.025)
    assert [(p["label"], round(p["gb_per_s"])) for p in points] == [
        ("dense (torch)", 2500),
        ("step (cuda)", 2000),
        ("step (triton)", 1951),
    ]
    assert plots.clusters(points) == [[1], [2, 3]]  # so near that their numbers share a label


def test_a_roofline_is_written(tmp_path):
    pytest.importorskip("matplotlib", reason="needs matplotlib: pip install 'sparse-opt[plot]'")
    path = written(tmp_path, report())
    assert plots.main(["roofline", str(path)]) == 0
    assert (tmp_path / "roofline.png").read_bytes().startswith(b"\x89PNG")


def failed(capsys, *words):
    with pytest.raises(SystemExit) as stopped:
        plots.main(["roofline", *map(str, words)])
    assert stopped.value.code == 2
    return capsys.readouterr().err.splitlines()[-1]


def test_without_matplotlib_it_says_so(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "matplotlib, which is not installed" in failed(capsys, written(tmp_path, report()))


def test_foreign_results_are_named(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", ModuleType("matplotlib"))
    assert "no such file" in failed(capsys, tmp_path / "none.json")
    assert "expected 'kernels'" in failed(capsys, written(tmp_path, {"rows": []}))
    assert "no row with bytes at density 0.5" in failed(
        capsys, written(tmp_path, {"kernels": {"rows": ROWS[:1], "copy_gb_per_s": 1.0}}), "--density", 0.5
    )
    path = tmp_path / "torn.json"
    path.write_text("{")
    assert "not JSON" in failed(capsys, path)


def tile_row(work: str, density: float | None, ms: float, *, is_auto: bool = True) -> dict[str, object]:
    return {"work": work, "density": density, "ms": ms, "is_auto": is_auto}


TILE_ROWS = [
    tile_row("copy", None, 1.0),
    tile_row(targets.dense_gradient(64), None, 60.0, is_auto=False),
    tile_row(targets.gathered_gradient(64), 0.025, 61.0),
    tile_row(targets.tile_gradient("tile64", 64), 0.1, 14.0),
    tile_row(targets.tile_gradient("tile64", 64), 0.025, 8.0),
    tile_row(targets.tile_gradient("tile64", 64), 0.025, 9.0, is_auto=False),
    tile_row(targets.tile_gradient("tile64", 64) + targets.A_CALL_A_MATRIX, 0.025, 10.0),
    tile_row(targets.tile_gradient("tile128", 64), 0.025, 5.0),
    tile_row(targets.tile_gradient("tile64", 16), 0.025, 2.0),
]


def test_curves_are_of_a_call_a_layer_on_the_default_backend():
    assert plots.curves_of(TILE_ROWS) == {
        64: {"tile64": {0.1: 14.0, 0.025: 8.0}, "tile128": {0.025: 5.0}},
        16: {"tile64": {0.025: 2.0}},
    }


def test_a_plot_of_tile_gradients_is_written(tmp_path):
    pytest.importorskip("matplotlib", reason="needs matplotlib: pip install 'sparse-opt[plot]'")
    path = tmp_path / "results.json"
    path.write_text(json.dumps({"environment": {"machine": {"cpu": "a CPU"}}, "kernels": {"rows": TILE_ROWS}}))
    assert plots.main(["tile_gradients", str(path)]) == 0
    assert (tmp_path / "tile_gradients.png").read_bytes().startswith(b"\x89PNG")


def test_results_without_such_rows_are_named(tmp_path, capsys):
    pytest.importorskip("matplotlib", reason="needs matplotlib: pip install 'sparse-opt[plot]'")
    path = tmp_path / "results.json"
    path.write_text(json.dumps({"kernels": {"rows": TILE_ROWS[:2]}}))
    with pytest.raises(SystemExit) as stopped:
        plots.main(["tile_gradients", str(path)])
    assert stopped.value.code == 2
    assert "no row of weight gradients by tiles" in capsys.readouterr().err
