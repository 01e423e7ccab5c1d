from __future__ import annotations

import json

import pytest
import torch

from sparse_opt import MaskSet
from sparse_opt.masks.algebra import intersect, invert, union

SHAPES = {"model.layers.0.mlp.up_proj.weight": (64, 48), "model.norm.weight": (32,)}


@pytest.fixture
def masks(tmp_path):
    made = [MaskSet.random(SHAPES, density=0.3, seed=seed) for seed in range(3)]
    return made, [mask.save(tmp_path / f"{i}.safetensors") for i, mask in enumerate(made)]


@pytest.mark.parametrize(("action", "combine"), [("union", union), ("intersect", intersect)])
@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_of_several(sparse_opt, masks, tmp_path, action, combine, suffix):
    made, paths = masks
    output = tmp_path / "new" / f"result{suffix}"
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


def test_convert_there_and_back(sparse_opt, masks, tmp_path):
    made, paths = masks
    pt, plain, back = tmp_path / "m.pt", tmp_path / "plain.pt", tmp_path / "back.safetensors"
    sparse_opt("mask", "convert", paths[0], "--output", pt).done()
    sparse_opt("mask", "convert", paths[0], "--output", plain, "--plain").done()
    assert torch.load(pt, weights_only=True).keys() == {"masks", "metadata"}
    content = torch.load(plain, weights_only=True)
    assert content.keys() == SHAPES.keys()
    assert all(torch.equal(tensor, made[0].bool(name)) for name, tensor in content.items())
    for source in (pt, plain):
        found = json.loads(sparse_opt("mask", "convert", source, "--output", back, "--json").done())
        assert MaskSet.load(back) == made[0]
        assert found["digest"] == made[0].digest
        assert ("seed" in found["metadata"]) == (source == pt)


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
        (("convert", paths[0], "--output", tmp_path / "x.txt"), 2, "expected a file that ends in .safetensors or .pt"),
        (("convert", paths[0], *out, "--plain"), 2, "option 'plain' is for .pt files"),
    ):
        assert said in sparse_opt("mask", *words).failed_in_one_line(code)
    assert sorted(tmp_path.iterdir()) == there
