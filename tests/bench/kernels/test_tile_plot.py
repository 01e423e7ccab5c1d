from __future__ import annotations

import json

import pytest

from sparse_opt.bench.kernels import targets, tile_plot


def row(work: str, density: float | None, ms: float, *, is_auto: bool = True) -> dict[str, object]:
    return {"work": work, "density": density, "ms": ms, "is_auto": is_auto}


ROWS = [
    row("copy", None, 1.0),
    row(targets.dense_gradient(64), None, 60.0, is_auto=False),
    row(targets.gathered_gradient(64), 0.025, 61.0),
    row(targets.tile_gradient("tile64", 64), 0.1, 14.0),
    row(targets.tile_gradient("tile64", 64), 0.025, 8.0),
    row(targets.tile_gradient("tile64", 64), 0.025, 9.0, is_auto=False),
    row(targets.tile_gradient("tile64", 64) + targets.A_CALL_A_MATRIX, 0.025, 10.0),
    row(targets.tile_gradient("tile128", 64), 0.025, 5.0),
    row(targets.tile_gradient("tile64", 16), 0.025, 2.0),
]


def test_curves_are_of_a_call_a_layer_on_the_default_backend():
    assert tile_plot.curves_of(ROWS) == {
        64: {"tile64": {0.1: 14.0, 0.025: 8.0}, "tile128": {0.025: 5.0}},
        16: {"tile64": {0.025: 2.0}},
    }


def test_the_figure_is_written(tmp_path):
    pytest.importorskip("matplotlib", reason="needs matplotlib: pip install 'sparse-opt[plot]'")
    path = tmp_path / "results.json"
    path.write_text(json.dumps({"environment": {"machine": {"cpu": "a CPU"}}, "kernels": {"rows": ROWS}}))
    assert tile_plot.main([str(path)]) == 0
    assert (tmp_path / "tile_gradients.png").read_bytes().startswith(b"\x89PNG")


def test_results_without_such_rows_are_named(tmp_path, capsys):
    pytest.importorskip("matplotlib", reason="needs matplotlib: pip install 'sparse-opt[plot]'")
    path = tmp_path / "results.json"
    path.write_text(json.dumps({"kernels": {"rows": ROWS[:2]}}))
    with pytest.raises(SystemExit) as stopped:
        tile_plot.main([str(path)])
    assert stopped.value.code == 2
    assert "no row of weight gradients by tiles" in capsys.readouterr().err
