from __future__ import annotations

import json

import pytest
import torch

from sparse_opt import MaskSet
from sparse_opt.cli.mask.output import PATTERNS
from sparse_opt.masks.patterns import PATTERNS as PATTERNS_THERE_ARE


def test_find_warns_in_one_line_when_less_moved_than_was_asked_for(sparse_opt, files, tmp_path):
    words = ("--delta_log_dir", files.delta_log, "--target_step", 1, "--sparsity_percent", 10, "--output", tmp_path)
    outcome = sparse_opt("mask", "find", *words)
    outcome.done()
    assert outcome.err.startswith("sparse-opt: warning: only ")
    assert outcome.err.count("\n") == 1


def test_random_is_the_library_s_mask_of_the_model(sparse_opt, files, tmp_path):
    words = ("--model_name", files.model, "--density", 0.25, "--pattern", "run16", "--seed", 3, "--pool", "global")
    found = json.loads(sparse_opt("mask", "random", *words, "--output", tmp_path, "--json").done())
    assert found["file"] == str(tmp_path / "sparsity_75.0pct_random_seed3.safetensors")
    mask = MaskSet.load(found["file"])
    shapes = {name: tensor.shape for name, tensor in files.states[0].items() if name != "lm_head.weight"}
    assert mask == MaskSet.random(shapes, density=0.25, pattern="run16", seed=3, pool="global")
    assert mask.pattern == "run16"
    assert mask.metadata["model"] == str(files.model)


def test_patterns_are_those_of_the_library():
    assert list(PATTERNS) == list(PATTERNS_THERE_ARE)


@pytest.mark.parametrize("density", [0, -0.1, 1.5, "nan"])
def test_random_refuses_a_density_out_of_range(sparse_opt, files, tmp_path, density):
    call = ("mask", "random", "--model_name", files.model, "--density", density, "--output", tmp_path)
    assert "density" in sparse_opt(*call).failed_in_one_line(2)


def test_random_of_a_model_that_is_not_there(sparse_opt, tmp_path):
    call = ("mask", "random", "--model_name", tmp_path / "none", "--density", 0.1, "--output", tmp_path / "masks")
    assert str(tmp_path / "none") in sparse_opt(*call).failed_in_one_line(1)
    assert list(tmp_path.iterdir()) == []


def test_info_counts_by_layer_and_tensor(sparse_opt, tmp_path):
    mask = MaskSet(
        {"h.0.w": torch.tensor([0, 5]), "h.1.w": torch.tensor([1]), "norm": torch.tensor([], dtype=torch.int32)},
        {"h.0.w": (2, 4), "h.1.w": (2, 4), "norm": (4,)},
        metadata={"method": "by hand"},
    )
    file = mask.save(tmp_path / "mask.safetensors")
    png = tmp_path / "new" / "density.png"
    info = json.loads(sparse_opt("mask", "info", file, "--png", png, "--json").done())
    assert png.read_bytes().startswith(b"\x89PNG")
    assert (info["nnz"], info["numel"], info["density"], info["pattern"]) == (3, 20, 0.15, "element")
    assert info["digest"] == mask.digest
    assert info["metadata"]["method"] == "by hand"
    assert {name: layer["density"] for name, layer in info["layers"].items()} == {"0": 0.25, "1": 0.125, "none": 0}
    assert {name: t["nnz"] for name, t in info["tensors"].items()} == {"h.0.w": 2, "h.1.w": 1, "norm": 0}
    assert {name: part["density"] for name, part in info["parts"].items()} == {"norms": 0, "other": 0.1875}
    text = sparse_opt("mask", "info", file, "--per_tensor").done()
    assert "3 of 20 elements active in 3 tensors: density 15.000 %" in text and "h.1.w" in text


def test_output_that_cannot_be_written_leaves_nothing(sparse_opt, files, tmp_path):
    (tmp_path / "file").write_text("in the way")
    for output in (tmp_path / "file" / "masks", tmp_path / "file" / "mask.safetensors"):
        call = ("mask", "random", "--model_name", files.model, "--density", 0.1, "--output", output)
        assert str(tmp_path / "file") in sparse_opt(*call).failed_in_one_line(1)
    line = sparse_opt(*call[:-1], tmp_path / "file").failed_in_one_line(2)
    assert "does not end in .safetensors" in line
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
