"""The HTML page: it requests nothing, and its links and plots are there; and pictures that are complete or absent."""

import base64
import hashlib
import os
import re

import pytest
import torch

pytest.importorskip("matplotlib", reason="needs matplotlib: pip install 'sparse-opt[plot]'")

from sparse_opt import MaskSet
from sparse_opt.analysis import compare_masks, plots
from sparse_opt.analysis.plots import save_png
from sparse_opt.analysis.report import build_report
from sparse_opt.errors import SparseOptError

SCRIPT = re.compile(r"<script>(.*?)</script>", re.DOTALL)


@pytest.fixture
def log(make_log, random_states):
    return make_log(random_states(torch.float32))


def test_the_page_requests_nothing(log):
    text = build_report(log)
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy"\s+content="(.*?)"', text)
    assert policy.startswith("default-src 'none'; img-src data:;")
    (script,) = SCRIPT.findall(text)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in policy  # else browsers do not run it
    assert "url(" not in text and "@import" not in text
    addresses = re.findall(r'\b(?:src|href|action|data|srcset)="(.*?)"', text)
    links = [address for address in addresses if not address.startswith("data:")]
    ids = re.findall(r'\bid="(.*?)"', text)
    assert [link.removeprefix("#") for link in links] == ids == ["sparsity", "coverage", "ranks", "shapes"]
    prefix = "data:image/svg+xml;base64,"
    pictures = [base64.b64decode(a.removeprefix(prefix)) for a in addresses if a.startswith("data:")]
    assert len(pictures) == 5
    for picture in pictures:
        namespaces = re.findall(r"(\S*)=\"\w+://[^\"]*\"", picture.decode())
        assert set(namespaces) <= {"xmlns", "xmlns:xlink"}
        assert picture.count(b"://") == len(namespaces)  # and in no text, style or document type
        assert re.findall(rb"href=\"(?!#|data:)|url\([^#]", picture) == []


def test_names_in_a_log_are_shown_and_not_run(make_log):
    name = "<script>alert(1)</script>.weight"
    text = build_report(make_log([{name: torch.zeros(2, 2)}, {name: torch.ones(2, 2)}]))
    assert len(SCRIPT.findall(text)) == 1
    assert "&lt;script&gt;alert(1)" in text


SHAPES = {"model.layers.0.mlp.up_proj.weight": (64, 32), "model.norm.weight": (32,)}


def test_masks_with_nothing_active_are_drawn(tmp_path):
    masks = {name: MaskSet.random(SHAPES, density=0) for name in ("a", "b")}
    pairs = compare_masks(masks)
    figure = plots.comparison_figure(pairs)
    for i, drawn in enumerate((figure, plots.pair_figure(pairs[0]), plots.mask_figure(masks["a"], "none"))):
        save_png(drawn, tmp_path / "new" / f"{i}.png")
    assert len(list((tmp_path / "new").iterdir())) == 3


def test_a_picture_that_cannot_be_written(tmp_path, monkeypatch):
    figure = plots.mask_figure(MaskSet.random(SHAPES, density=0.1), "")
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(SparseOptError, match="d.png: cannot be written: "):
        save_png(figure, tmp_path / "file" / "d.png")

    def disk_full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", disk_full)
    with pytest.raises(SparseOptError, match="d.png: cannot be written: No space left on device"):
        save_png(figure, tmp_path / "d.png")
    assert os.listdir(tmp_path) == ["file"]
