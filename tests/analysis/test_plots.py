"""The plots: values, labels and units, and files that are complete or absent."""

from __future__ import annotations

import builtins
import math
import os
import sys

import pytest
import torch

from sparse_opt import MaskSet
from sparse_opt.analysis import compare_masks, measure_coverage, measure_ranks, measure_sparsity, plots, sum_changes
from sparse_opt.analysis.changes import TOLERANCES
from sparse_opt.analysis.output_files import require_matplotlib, save_png
from sparse_opt.errors import ConfigError, DataError

matplotlib = pytest.importorskip("matplotlib", reason="needs matplotlib: pip install 'sparse-opt[plot]'")

SHAPES = {
    "model.embed_tokens.weight": (40, 32),
    "model.layers.0.self_attn.q_proj.weight": (32, 32),
    "model.layers.0.mlp.up_proj.weight": (64, 32),
    "model.layers.2.self_attn.q_proj.weight": (32, 32),
    "model.layers.2.mlp.up_proj.weight": (64, 32),
    "model.norm.weight": (32,),
}


@pytest.fixture
def log(make_log, random_states):
    return make_log(random_states(torch.float32))


def masks_of(count: int) -> dict[str, MaskSet]:
    return {f"mask {i}": MaskSet.random(SHAPES, density=0.1 * (i + 1), seed=i) for i in range(count)}


def curves(axes) -> dict[str, list[float]]:
    """Label -> the values of its curve."""
    return {line.get_label(): list(line.get_ydata()) for line in axes.lines}


def texts(axes) -> dict[tuple[int, int], str]:
    """(row, column) -> what is written there."""
    return {(int(text.get_position()[1]), int(text.get_position()[0])): text.get_text() for text in axes.texts}


def test_curves_show_the_measured_values(log):
    found = measure_sparsity(log)
    stored, rounded = plots.density_figure(found, TOLERANCES).axes
    totals = [sum_changes(step.stored.values()) for step in found]
    assert curves(stored)["bits differ"] == [100 * total.share for total in totals]
    assert curves(stored)["|ΔW| > 1e-5"] == [100 * total.shares_above[4] for total in totals]
    assert curves(rounded)["bits differ"] == [100 * sum_changes(step.rounded.values()).share for step in found]
    covered = measure_coverage(log, taus=[0.0, 1e-6])
    coverage, density = plots.coverage_figure(covered).axes
    assert curves(coverage)["τ = 1e-6"] == [100 * x for x in covered.coverage(1)]
    assert curves(density)["τ = 0"] == [100 * x for x in covered.density(0)]
    up = "model.layers.{}.mlp.up_proj.weight"
    density, flips, *_ = plots.layer_figure(found[-1], "stored").axes
    assert [label.get_text() for label in density.get_xticklabels()][2] == "MLP up"
    stats = measure_ranks(log)[30]
    stable = plots.rank_figure(stats, 1e-6, 30).axes[1]
    for i in (0, 1):
        counts = found[-1].stored[up.format(i)]
        assert density.images[0].get_array()[i, 2] == 100 * counts.share
        assert flips.images[0].get_array()[i, 2] == 100 * counts.share_flipped
        assert texts(stable)[i, 2] == f"{stats[up.format(i)].stable_rank:.3g}"
    by_step = measure_ranks(log, log.steps[1:])
    effective = plots.rank_steps_figure(by_step).axes[1]
    assert curves(effective)[up.format(1)] == [of[up.format(1)].effective_rank for of in by_step.values()]


@pytest.mark.parametrize("count", [2, 7])
def test_comparison_shows_each_pair_twice(tmp_path, count):
    pairs = compare_masks(masks_of(count))
    figure = plots.comparison_figure(pairs)
    jaccard, overlap, bar = figure.axes
    for axes in (jaccard, overlap):
        assert [label.get_text() for label in axes.get_xticklabels()] == [f"mask {i}" for i in range(count)]
        assert axes.get_xlabel() == "mask B" and axes.get_title()
    assert jaccard.get_ylabel() == "mask A" and bar.get_ylabel() == "share of elements (by chance)"
    for pair in pairs:
        i, j, total = int(pair.first[-1]), int(pair.second[-1]), pair.total
        for axes, at, values in (
            (jaccard, (i, j), (total.jaccard, total.jaccard_chance)),
            (jaccard, (j, i), (total.jaccard, total.jaccard_chance)),
            (overlap, (i, j), (total.of_first, total.of_first_chance)),
            (overlap, (j, i), (total.of_second, total.of_second_chance)),
        ):
            assert texts(axes)[at] == "{:.3f}\n({:.3f})".format(*values)
            assert axes.images[0].get_array()[at] == values[0]
    assert {texts(jaccard)[i, i] for i in range(count)} == {"same"}


def test_pair_by_layer_and_part():
    (pair,) = compare_masks(masks_of(2))
    figure = plots.pair_figure(pair)
    axes, bar = figure.axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["0", "2", "none"]
    parts = ["embeddings", "attention q", "MLP up", "norms"]
    assert [label.get_text() for label in axes.get_xticklabels()] == parts
    assert bar.get_ylabel() == "Jaccard index (by chance)"
    shown = axes.images[0].get_array()
    for name, row, column in (
        ("model.layers.0.self_attn.q_proj.weight", 0, 1),
        ("model.layers.2.mlp.up_proj.weight", 1, 2),
        ("model.embed_tokens.weight", 2, 0),
        ("model.norm.weight", 2, 3),
    ):
        assert shown[row, column] == pair.tensors[name].jaccard
    assert math.isnan(shown.data[0, 0]) and (0, 0) not in texts(axes)
    assert "mask 0" in figure.get_suptitle()


def test_masks_with_nothing_active_are_drawn(tmp_path):
    masks = {name: MaskSet.random(SHAPES, density=0) for name in ("a", "b")}
    pairs = compare_masks(masks)
    figure = plots.comparison_figure(pairs)
    assert texts(figure.axes[0])[0, 1] == "none\n(none)"
    for i, drawn in enumerate((figure, plots.pair_figure(pairs[0]), plots.mask_figure(masks["a"], "none"))):
        save_png(drawn, tmp_path / "new" / f"{i}.png")
    assert len(list((tmp_path / "new").iterdir())) == 3


def test_without_matplotlib_the_option_is_named(monkeypatch):
    def without(name, *args):
        if name == "matplotlib":
            raise ModuleNotFoundError("No module named 'matplotlib'", name="matplotlib")
        return real(name, *args)

    real = builtins.__import__
    monkeypatch.delitem(sys.modules, "matplotlib")
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ConfigError, match=r"^option 'png' needs the package matplotlib, .*sparse-opt\[plot\]'$"):
        require_matplotlib("png")


def test_a_picture_that_cannot_be_written(tmp_path, monkeypatch):
    figure = plots.mask_figure(masks_of(1)["mask 0"], "")
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(DataError, match="d.png: cannot write the picture: "):
        save_png(figure, tmp_path / "file" / "d.png")

    def disk_full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", disk_full)
    with pytest.raises(DataError, match="d.png: cannot write the picture: No space left on device"):
        save_png(figure, tmp_path / "d.png")
    assert os.listdir(tmp_path) == ["file"]
