import csv
import json
import math

import pytest
import torch

from sparse_opt import MaskSet
from sparse_opt.analysis import compare_masks

SHAPES = {
    "model.embed_tokens.weight": (40, 32),
    "model.layers.0.self_attn.q_proj.weight": (32, 32),
    "model.layers.0.mlp.up_proj.weight": (64, 32),
    "model.layers.1.mlp.up_proj.weight": (64, 32),
    "model.norm.weight": (32,),
}


@pytest.fixture
def masks(tmp_path):
    """Three files of random masks, the last one a .pt dictionary."""
    made = {name: MaskSet.random(SHAPES, density=0.2, seed=seed) for seed, name in enumerate("abc")}
    paths = [made[name].save(tmp_path / f"{name}.safetensors") for name in "ab"]
    torch.save({name: made["c"].bool(name) for name in SHAPES}, tmp_path / "c.pt")
    return made, [*paths, tmp_path / "c.pt"]


def test_two_masks_by_part_and_layer(sparse_opt, masks):
    made, paths = masks
    found = json.loads(sparse_opt("mask", "compare", *paths[:2], "--json").done())
    (pair,) = compare_masks({name: made[name] for name in "ab"})
    assert [(mask["name"], mask["file"], mask["nnz"]) for mask in found["masks"]] == [
        (name, str(path), made[name].nnz) for name, path in zip("ab", paths[:2], strict=True)
    ]
    records = {(record["level"], record["name"]): record for record in found["overlaps"]}
    assert {(record["first"], record["second"]) for record in records.values()} == {("a", "b")}
    names = ("jaccard", "jaccard_chance", "jaccard_chance_sd", "of_first", "of_second_chance")
    for key, overlap in (
        (("total", "total"), pair.total),
        (("part", "mlp_up"), pair.parts["mlp_up"]),
        (("layer", "0"), pair.layers[0]),
        (("layer", "none"), pair.layers[None]),
        (("tensor", "model.norm.weight"), pair.tensors["model.norm.weight"]),
    ):
        counts = ("active_first", "active_second", "active_both")
        assert [records[key][count] for count in counts] == [overlap.first, overlap.second, overlap.both]
        assert [records[key][name] for name in names] == [getattr(overlap, name) for name in names]


def test_several_masks_in_a_csv_and_pictures(sparse_opt, masks, tmp_path):
    made, paths = masks
    out = tmp_path / "new"
    words = ("--csv", out / "all.csv", "--png", out / "all.png")
    sparse_opt("mask", "compare", *paths, *words).done()
    pairs = compare_masks(made)
    with (out / "all.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 3 * (1 + 4 + 3 + len(SHAPES))
    for pair in pairs:
        mine = [row for row in rows if (row["first"], row["second"]) == (pair.first, pair.second)]
        assert mine[0]["level"] == "total" and float(mine[0]["jaccard"]) == pair.total.jaccard
        tensors = {row["name"]: int(row["active_both"]) for row in mine if row["level"] == "tensor"}
        assert tensors == {name: overlap.both for name, overlap in pair.tensors.items()}
    assert (out / "all.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in out.iterdir()) == ["all.csv", "all.png"]
    sparse_opt("mask", "compare", *paths[:2], "--png", out / "pair.png").done()
    assert (out / "pair.png").read_bytes().startswith(b"\x89PNG")


def test_files_of_one_name_are_told_apart_by_their_paths(sparse_opt, masks, tmp_path):
    made, paths = masks
    other = made["b"].save(tmp_path / "seed1" / "a.safetensors")
    total, *_ = json.loads(sparse_opt("mask", "compare", paths[0], other, "--json").done())["overlaps"]
    assert (total["first"], total["second"]) == (str(paths[0]), str(other))


def test_common_tensors_on_request(sparse_opt, masks, tmp_path):
    _, paths = masks
    fewer = MaskSet.random({n: s for n, s in SHAPES.items() if "mlp" in n}, density=0.5).save(
        tmp_path / "m.safetensors"
    )
    line = sparse_opt("mask", "compare", paths[0], fewer).failed_in_one_line(1)
    assert "model.embed_tokens.weight is in a and not in m" in line
    assert "'common'" in line
    found = json.loads(sparse_opt("mask", "compare", paths[0], fewer, "--common", "--json").done())
    tensors = [record["name"] for record in found["overlaps"] if record["level"] == "tensor"]
    assert tensors == [name for name in SHAPES if "mlp" in name]


def test_refusals_name_the_cause_and_write_nothing(sparse_opt, masks, tmp_path):
    _, paths = masks
    shapes = {**SHAPES, "model.norm.weight": (64,)}
    wider = MaskSet.random(shapes, density=0.2).save(tmp_path / "wider.safetensors")
    damaged = tmp_path / "damaged.safetensors"
    damaged.write_bytes(paths[0].read_bytes()[:-3])
    there = sorted(tmp_path.iterdir())
    out = ("--csv", tmp_path / "x.csv", "--png", tmp_path / "x.png")
    for words, code, said in (
        ((paths[0], wider), 1, "model.norm.weight is [32] in a and [64] in wider"),
        ((paths[0], damaged), 1, str(damaged)),
        ((paths[0], paths[1], paths[0]), 2, f"{paths[0]} is given twice"),
    ):
        assert said in sparse_opt("mask", "compare", *words, *out).failed_in_one_line(code)
    assert sorted(tmp_path.iterdir()) == there


def test_a_warning_where_the_models_have_other_names(sparse_opt, tmp_path):
    for name in ("base", "instruct"):
        mask = MaskSet({"w": torch.arange(5)}, {"w": (10,)}, metadata={"model": name})
        mask.save(tmp_path / f"{name}.safetensors")
    outcome = sparse_opt("mask", "compare", tmp_path / "base.safetensors", tmp_path / "instruct.safetensors", "--json")
    total, *_ = json.loads(outcome.done())["overlaps"]
    assert total["jaccard"] == 1 and math.isclose(total["of_first_chance"], 0.5)
    assert outcome.err == "sparse-opt: warning: base was made for the model base, instruct for instruct\n"
