"""The plots and the HTML page: their values, and that a browser shows the page without a network."""

from __future__ import annotations

import base64
import importlib.util
import json
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from sparse_opt.analysis import measure_coverage, measure_ranks, measure_sparsity, plots, sum_changes
from sparse_opt.analysis.sparsity import TOLERANCES

pytest.importorskip("matplotlib", reason="needs matplotlib: pip install 'sparse-opt[plot]'")


@pytest.fixture
def log(make_log, random_states):
    return make_log(random_states(torch.float32))


def lines(axes) -> dict[str, list[float]]:
    return {line.get_label(): list(line.get_ydata()) for line in axes.lines if not line.get_label().startswith("_")}


def test_curves_show_the_measured_values(log):
    found = measure_sparsity(log)
    stored, rounded = plots.density_figure(found, TOLERANCES).axes
    totals = [sum_changes(step.stored.values()) for step in found]
    assert lines(stored)["bits differ"] == [100 * total.share for total in totals]
    assert lines(stored)["|ΔW| > 1e-5"] == [100 * total.shares_above[4] for total in totals]
    assert lines(rounded)["bits differ"] == [100 * sum_changes(step.rounded.values()).share for step in found]
    covered = measure_coverage(log, taus=[0.0, 1e-6])
    assert lines(plots.coverage_figure(covered).axes[0])["τ = 1e-6"] == [100 * x for x in covered.coverage(1)]
    assert lines(plots.coverage_density_figure(covered).axes[0])["τ = 0"] == [100 * x for x in covered.density(0)]
    up = "model.layers.{}.mlp.up_proj.weight"
    density, flips = plots.layer_figure(found[-1], "stored").axes
    assert lines(density)["MLP up"] == [100 * found[-1].stored[up.format(i)].share for i in (0, 1)]
    assert lines(flips)["MLP up"] == [100 * found[-1].stored[up.format(i)].share_flipped for i in (0, 1)]
    stats = measure_ranks(log)
    panels = plots.rank_figure(stats, 1e-6, 30).axes
    assert lines(panels[2])["MLP up"] == [stats[up.format(i)].stable_rank.value for i in (0, 1)]


def test_every_axis_has_a_label_and_every_curve_its_own_style(log):
    found, covered = measure_sparsity(log), measure_coverage(log)
    for figure in (
        plots.density_figure(found, TOLERANCES),
        plots.layer_figure(found[-1], "bf16"),
        plots.coverage_figure(covered),
        plots.coverage_density_figure(covered),
        plots.rank_figure(measure_ranks(log), 1e-6, 30),
    ):
        figure.draw_without_rendering()
        assert any(axes.get_xlabel() for axes in figure.axes)
        assert figure.axes[0].get_ylabel()
        (legend,) = figure.legends
        for axes in figure.axes:
            highest = max(y for values in lines(axes).values() for y in values if math.isfinite(y))
            assert axes.get_ylim()[0] == 0
            assert axes.get_ylim()[1] > 1.04 * highest
            assert not legend.get_window_extent().overlaps(axes.get_window_extent())
            looks = {
                (line.get_marker(), line.get_label()) for line in axes.lines if not line.get_label().startswith("_")
            }
            assert len({marker for marker, _ in looks}) == len(looks)


def test_pictures_are_the_same_bytes_each_time(log):
    found = measure_sparsity(log)
    first, second = (plots.as_svg(plots.density_figure(found, TOLERANCES)) for _ in range(2))
    assert first == second


@pytest.fixture
def page(log, tmp_path) -> Path:
    from sparse_opt.analysis.report import build_report

    path = tmp_path / "report.html"
    path.write_text(build_report(log), encoding="utf-8")
    return path


def test_the_page_names_nothing_outside_of_itself(page):
    text = page.read_text(encoding="utf-8")
    assert re.findall(r'(?:src|href)="(?!data:|#)[^"]*"', text) == []
    assert "<script" not in text
    assert "url(" not in text
    assert "@import" not in text
    pictures = [base64.b64decode(data) for data in re.findall(r"data:image/svg\+xml;base64,([^\"]+)", text)]
    assert len(pictures) == 7
    for picture in pictures:
        addresses = re.findall(r"(\S*)=\"\w+://[^\"]*\"", picture.decode())
        assert set(addresses) <= {"xmlns", "xmlns:xlink"}
        assert picture.count(b"://") == len(addresses)  # and in no text, style or document type
        assert re.findall(rb"href=\"[^#]|url\([^#]", picture) == []


def test_names_in_a_log_are_shown_and_not_run(make_log):
    from sparse_opt.analysis.report import build_report

    name = "<script>alert(1)</script>.weight"
    text = build_report(make_log([{name: torch.zeros(2, 2)}, {name: torch.ones(2, 2)}]))
    assert "<script>" not in text
    assert "&lt;script&gt;" in text


def test_parts_can_be_left_out(log):
    from sparse_opt.analysis.report import build_report

    text = build_report(log, taus=(), rank_tau=None)
    assert re.findall(r'<section id="(\w+)">', text) == ["sparsity", "shapes"]


@pytest.mark.skipif(
    importlib.util.find_spec("PySide6") is None or importlib.util.find_spec("PySide6.QtWebEngineCore") is None,
    reason="needs a browser engine: pip install PySide6-WebEngine",
)
def test_a_browser_shows_the_page(page, log):
    browse = Path(__file__).with_name("browse.py")
    result = subprocess.run([sys.executable, browse, page], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    shown = json.loads(result.stdout)
    assert shown["requests"] == [page.resolve().as_uri()]
    assert shown["console"] == []
    assert shown["title"] == f"Update analysis of {log.directory}"
    assert shown["headings"] == [
        "Sparsity of the update",
        "Coverage of the final active set",
        "Ranks of the update",
        "Weights",
    ]
    assert len(shown["images"]) == 7
    for text, natural, width in shown["images"]:
        assert natural > 400, text
        assert width > 400, text
    assert shown["overflow"] == 0
    assert all(rows for _, rows in shown["tables"])
    total = sum_changes(measure_sparsity(log)[-1].stored.values())
    assert f"{100 * total.share:.3f} %" in shown["cells"]
    assert f"{100 * (1 - total.share):.3f} %" in shown["cells"]
