"""`sparse-opt mask random | info | union | intersect | invert | convert`."""

import json

import pytest
import torch

from sparse_opt import MaskSet
from sparse_opt.cli.mask.output import PATTERNS
from sparse_opt.masks.algebra import intersect, invert, union
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


def test_output_that_cannot_be_written_leaves_nothing(sparse_opt, files, tmp_path):
    (tmp_path / "file").write_text("in the way")
    for output in (tmp_path / "file" / "masks", tmp_path / "file" / "mask.safetensors"):
        call = ("mask", "random", "--model_name", files.model, "--density", 0.1, "--output", output)
        assert str(tmp_path / "file") in sparse_opt(*call).failed_in_one_line(1)
    line = sparse_opt(*call[:-1], tmp_path / "file").failed_in_one_line(2)
    assert "does not end in .safetensors" in line
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


SHAPES = {"model.layers.0.mlp.up_proj.weight": (64, 48), "model.norm.weight": (32,)}


@pytest.fixture
def masks(tmp_path):
    made = [MaskSet.random(SHAPES, density=0.3, seed=seed) for seed in range(3)]
    return made, [mask.save(tmp_path / f"{i}.safetensors") for i, mask in enumerate(made)]


@pytest.mark.parametrize(("action", "combine"), [("union", union), ("intersect", intersect)])
def test_of_several(sparse_opt, masks, tmp_path, action, combine):
    made, paths = masks
    output = tmp_path / "new" / "result.safetensors"
    found = json.loads(sparse_opt("mask", action, *paths, "--output", output, "--json").done())
    result = MaskSet.load(output)
    assert result == combine(made)
    assert (found["file"], found["digest"], found["nnz"]) == (str(output), result.digest, result.nnz)
    assert result.metadata["source_digests"] == ", ".join(mask.digest for mask in made)
    assert result.metadata["source_methods"] == "random, random, random"


def test_invert(sparse_opt, masks, tmp_path):
    made, paths = masks
    text = sparse_opt("mask", "invert", paths[0], "--output", tmp_path / "i.safetensors").done()
    assert text.startswith(f"{tmp_path / 'i.safetensors'}\n")
    assert MaskSet.load(tmp_path / "i.safetensors") == invert(made[0])


@pytest.mark.parametrize("suffix", [".pt", ".pth", ".bin"])
@pytest.mark.parametrize("plain", [False, True])
def test_convert(sparse_opt, masks, tmp_path, suffix, plain):
    made, _ = masks
    content = {name: made[0].bool(name) for name in made[0].names}
    torch.save(content if plain else {"masks": content, "metadata": made[0].metadata}, tmp_path / f"m{suffix}")
    output = tmp_path / "m.safetensors"
    found = json.loads(sparse_opt("mask", "convert", tmp_path / f"m{suffix}", "--output", output, "--json").done())
    assert MaskSet.load(output) == made[0]
    assert found["digest"] == made[0].digest
    assert ("seed" in found["metadata"]) != plain


def test_refusals_name_the_cause_and_write_nothing(sparse_opt, masks, tmp_path):
    _, paths = masks
    other = MaskSet.random({"model.norm.weight": (64,)}, density=0.5).save(tmp_path / "other.safetensors")
    foreign = MaskSet.random({"w": (64,)}, density=0.5).save(tmp_path / "foreign.safetensors")
    torch.save({"w": torch.ones(3)}, tmp_path / "float.pt")
    there = sorted(tmp_path.iterdir())
    out = ("--output", tmp_path / "out.safetensors")
    for words, code, said in (
        (("union", paths[0], other, *out), 1, "model.norm.weight is [32] in one mask, [64] in another"),
        (("intersect", paths[0], foreign, *out), 1, "no parameter in common"),
        (("union", paths[0], *out), 2, "found one mask file"),
        (("convert", tmp_path / "float.pt", *out), 1, "float.pt: mask of w is torch.float32, expected a bool tensor"),
        (("convert", paths[0], "--output", tmp_path / "x.txt"), 2, "that ends in .safetensors, found .txt"),
        (("union", *paths, "--output", tmp_path / "x.pt"), 2, "that ends in .safetensors, found .pt"),
    ):
        assert said in sparse_opt("mask", *words).failed_in_one_line(code)
    assert sorted(tmp_path.iterdir()) == there
