"""Plots of masks, and files that are complete or absent."""

from __future__ import annotations

import os

import pytest

from sparse_opt import MaskSet
from sparse_opt.analysis import compare_masks, plots
from sparse_opt.analysis.output_files import save_png
from sparse_opt.errors import DataError

matplotlib = pytest.importorskip("matplotlib", reason="needs matplotlib: pip install 'sparse-opt[plot]'")

SHAPES = {"model.layers.0.mlp.up_proj.weight": (64, 32), "model.norm.weight": (32,)}


def texts(axes) -> dict[tuple[int, int], str]:
    """(row, column) -> what is written there."""
    return {(int(text.get_position()[1]), int(text.get_position()[0])): text.get_text() for text in axes.texts}


def test_comparison_shows_each_pair_twice():
    masks = {f"mask {i}": MaskSet.random(SHAPES, density=0.1 * (i + 1), seed=i) for i in range(3)}
    pairs = compare_masks(masks)
    jaccard, overlap, _ = plots.comparison_figure(pairs).axes
    for pair in pairs:
        i, j, total = int(pair.first[-1]), int(pair.second[-1]), pair.total
        for at, of_row in (((i, j), total.of_first), ((j, i), total.of_second)):
            assert texts(jaccard)[at] == f"{total.jaccard:.3f}\n({total.jaccard_chance:.3f})"
            assert overlap.images[0].get_array()[at] == of_row


def test_masks_with_nothing_active_are_drawn(tmp_path):
    masks = {name: MaskSet.random(SHAPES, density=0) for name in ("a", "b")}
    pairs = compare_masks(masks)
    figure = plots.comparison_figure(pairs)
    assert texts(figure.axes[0])[0, 1] == "none\n(none)"
    for i, drawn in enumerate((figure, plots.pair_figure(pairs[0]), plots.mask_figure(masks["a"], "none"))):
        save_png(drawn, tmp_path / "new" / f"{i}.png")
    assert len(list((tmp_path / "new").iterdir())) == 3


def test_a_picture_that_cannot_be_written(tmp_path, monkeypatch):
    figure = plots.mask_figure(MaskSet.random(SHAPES, density=0.1), "")
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(DataError, match="d.png: cannot write the picture: "):
        save_png(figure, tmp_path / "file" / "d.png")

    def disk_full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", disk_full)
    with pytest.raises(DataError, match="d.png: cannot write the picture: No space left on device"):
        save_png(figure, tmp_path / "d.png")
    assert os.listdir(tmp_path) == ["file"]
