"""The plots of masks: values, labels and units, and files that are complete or absent."""

from __future__ import annotations

import builtins
import math
import os
import sys

import numpy as np
import pytest
import torch

from sparse_opt import MaskSet
from sparse_opt.analysis.mask_overlap import compare
from sparse_opt.errors import ConfigError, DataError

matplotlib = pytest.importorskip("matplotlib", reason="needs matplotlib: pip install 'sparse-opt[plot]'")

from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: E402

from sparse_opt.analysis.mask_plots import draw_comparison, draw_density, draw_pair  # noqa: E402
from sparse_opt.analysis.output_files import require_matplotlib  # noqa: E402

SHAPES = {
    "model.embed_tokens.weight": (40, 32),
    "model.layers.0.self_attn.q_proj.weight": (32, 32),
    "model.layers.0.mlp.up_proj.weight": (64, 32),
    "model.layers.2.self_attn.q_proj.weight": (32, 32),
    "model.layers.2.mlp.up_proj.weight": (64, 32),
    "model.norm.weight": (32,),
}


@pytest.fixture
def figures(monkeypatch):
    """The figures drawn, in order."""
    from matplotlib.figure import Figure

    drawn = []

    class Kept(Figure):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            drawn.append(self)

    monkeypatch.setattr("matplotlib.figure.Figure", Kept)
    return drawn


def masks_of(count: int) -> dict[str, MaskSet]:
    return {f"mask {i}": MaskSet.random(SHAPES, density=0.1 * (i + 1), seed=i) for i in range(count)}


def texts(axes) -> dict[tuple[int, int], str]:
    """(row, column) -> what is written there."""
    return {(int(text.get_position()[1]), int(text.get_position()[0])): text.get_text() for text in axes.texts}


def is_inside(figure) -> bool:
    """Whether everything is drawn within the figure, to a pixel."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    drawn = figure.get_tightbbox(canvas.get_renderer())
    width, height = figure.get_size_inches()
    slack = 1 / figure.dpi
    return drawn.x0 >= -slack and drawn.y0 >= -slack and drawn.x1 <= width + slack and drawn.y1 <= height + slack


def pixels(path) -> torch.Tensor:
    return torch.from_numpy(matplotlib.image.imread(path))


@pytest.mark.parametrize("count", [2, 3, 7])
def test_comparison_shows_each_pair_twice(figures, tmp_path, count):
    pairs = compare(masks_of(count))
    path = tmp_path / "new" / "pairs.png"
    draw_comparison(pairs, path)
    (figure,) = figures
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
    assert is_inside(figure)
    assert pixels(path).shape[:2] == tuple(int(150 * inches) for inches in reversed(figure.get_size_inches()))
    assert [file.name for file in path.parent.iterdir()] == ["pairs.png"]


def test_pair_by_layer_and_part(figures, tmp_path):
    masks = masks_of(2)
    (pair,) = compare(masks)
    draw_pair(pair, tmp_path / "pair.png")
    axes, bar = figures[0].axes
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
    assert "mask 0" in figures[0].get_suptitle() and is_inside(figures[0])


def test_density_in_percent(figures, tmp_path):
    mask = MaskSet(
        {name: torch.arange(i) for i, name in enumerate(SHAPES)}, SHAPES, metadata={"method": "as many as its number"}
    )
    draw_density(mask, tmp_path / "density.png", "the title")
    axes, bar = figures[0].axes
    shown = axes.images[0].get_array()
    assert shown[0, 1] == pytest.approx(100 * 1 / 1024)
    assert shown[2, 3] == pytest.approx(100 * 5 / 32)
    assert texts(axes)[2, 3] == "15.6"
    assert bar.get_ylabel().startswith("density, %")
    assert figures[0].get_suptitle() == "the title" and is_inside(figures[0])


def test_densities_far_apart_have_colours_apart(figures, tmp_path):
    """Of 0.1, 1 and 100 %, the first two have different colours, too; density 0 is darkest, with white text."""
    counts = {"model.layers.0.mlp.up_proj.weight": 2, "model.layers.2.mlp.up_proj.weight": 20, "model.norm.weight": 32}
    mask = MaskSet({name: torch.arange(counts.get(name, 0)) for name in SHAPES}, SHAPES)
    draw_density(mask, tmp_path / "density.png", "")
    axes, bar = figures[0].axes
    image = axes.images[0]
    shown = {(i, j): float(image.norm(value)) for (i, j), value in np.ndenumerate(image.get_array()) if value >= 0}
    assert shown[0, 2] == 0 and 0.25 < shown[1, 2] < 0.75 and shown[2, 3] == 1
    colours = {(int(text.get_position()[1]), int(text.get_position()[0])): text.get_color() for text in axes.texts}
    assert shown[0, 1] == 0 and texts(axes)[0, 1] == "0" and colours[0, 1] == "white" and colours[2, 3] == "black"
    labels = [label.get_text() for label in bar.get_yticklabels() if label.get_text()]
    assert {"1", "10"} <= set(labels)


def test_brightness_increases_with_the_value(figures, tmp_path):
    """The colours as a black and white printer sees them (ITU-R BT.601) rise with the value, step by step."""
    draw_density(masks_of(1)["mask 0"], tmp_path / "density.png", "")
    colours = figures[0].axes[0].images[0].cmap(torch.linspace(0, 1, 50).numpy())[:, :3]
    grey = colours @ torch.tensor([0.299, 0.587, 0.114]).double().numpy()
    assert (grey[1:] > grey[:-1]).all()
    assert grey[-1] - grey[0] > 0.6


def test_masks_with_nothing_active_are_drawn(figures, tmp_path):
    masks = {name: MaskSet.random(SHAPES, density=0) for name in ("a", "b")}
    pairs = compare(masks)
    draw_comparison(pairs, tmp_path / "pairs.png")
    draw_pair(pairs[0], tmp_path / "pair.png")
    draw_density(masks["a"], tmp_path / "density.png", "none")
    assert texts(figures[0].axes[0])[0, 1] == "none\n(none)"
    assert len(list(tmp_path.iterdir())) == 3


def test_without_matplotlib_it_says_so(monkeypatch):
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
    mask = masks_of(1)["mask 0"]
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(DataError, match="d.png: cannot write the picture: "):
        draw_density(mask, tmp_path / "file" / "d.png", "")

    def disk_full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", disk_full)
    with pytest.raises(DataError, match="d.png: cannot write the picture: No space left on device"):
        draw_density(mask, tmp_path / "d.png", "")
    assert os.listdir(tmp_path) == ["file"]
