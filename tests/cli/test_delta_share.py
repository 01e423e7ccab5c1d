"""`sparse-opt delta diff | apply | show | merge | push` on checkpoints of a tiny model, in one file and in shards."""

from __future__ import annotations

import copy
import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from sparse_opt import SparseDelta


@pytest.fixture
def checkpoints(files, tmp_path):
    """`base` and `sharded`, a tiny model in one file and in shards, and `first`, `second`, trained from it."""
    base = AutoModelForCausalLM.from_pretrained(files.model, dtype=torch.bfloat16)
    base.save_pretrained(tmp_path / "base")
    AutoTokenizer.from_pretrained(files.model).save_pretrained(tmp_path / "base")
    shutil.copytree(tmp_path / "base", tmp_path / "sharded")
    (tmp_path / "sharded" / "model.safetensors").unlink()
    base.save_pretrained(tmp_path / "sharded", max_shard_size="2KB")
    (tmp_path / "sharded" / "README.md").write_text("the base's card")
    for name, rows in (("first", slice(0, 3)), ("second", slice(5, 7))):
        tuned = copy.deepcopy(base)
        with torch.no_grad():
            tuned.model.embed_tokens.weight[rows] *= 1.5
            tuned.model.layers[1].mlp.up_proj.weight[rows] += 0.01
        tuned.save_pretrained(tmp_path / name)
    return tmp_path


def state_of(folder):
    return {name: t for file in sorted(folder.glob("*.safetensors")) for name, t in load_file(file).items()}


def same(a, b) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[n].view(torch.int16), b[n].view(torch.int16)) for n in a)


def test_diff_and_apply(sparse_opt, checkpoints):
    delta = checkpoints / "delta"
    found = json.loads(
        sparse_opt("delta", "diff", checkpoints / "base", checkpoints / "first", "-o", delta, "--json").done()
    )
    assert found["changed"] == SparseDelta.from_pretrained(delta).changed > 0
    for base in ("base", "sharded"):
        out = checkpoints / f"of_{base}"
        sparse_opt("delta", "apply", delta, checkpoints / base, "-o", out).done()
        assert same(state_of(out), state_of(checkpoints / "first"))
        kept = {path.name for path in (checkpoints / base).iterdir()} - {"README.md"}
        assert {path.name for path in out.iterdir()} == kept
        AutoModelForCausalLM.from_pretrained(out)
    # The delta of the files is that of the models, and it names its base.
    models = [AutoModelForCausalLM.from_pretrained(checkpoints / name) for name in ("base", "first")]
    of_models = SparseDelta.from_models(*models)
    assert of_models.counts == SparseDelta.from_pretrained(delta).counts
    with SparseDelta.from_pretrained(delta).active(models[0]):
        assert same(models[0].state_dict(), models[1].state_dict())
    of_models.save_pretrained(checkpoints / "of_models")
    sparse_opt("delta", "apply", checkpoints / "of_models", "--output_dir", checkpoints / "named").done()
    assert same(state_of(checkpoints / "named"), state_of(checkpoints / "first"))


def test_show(sparse_opt, checkpoints):
    sparse_opt("delta", "diff", checkpoints / "base", checkpoints / "first", "-o", checkpoints / "d").done()
    found = json.loads(sparse_opt("delta", "show", checkpoints / "d", "--json").done())
    assert sum(layer["changed"] for layer in found["layers"].values()) == found["changed"]
    assert found["layers"]["0"]["changed"] == 0 < found["layers"]["1"]["changed"]
    assert found["tensors"]["model.layers.1.mlp.up_proj.weight"] == found["layers"]["1"]["changed"]
    text = sparse_opt("delta", "show", checkpoints / "d", "--largest", 1).done()
    assert found["base_digest"] in text and text.count(".weight ") == 1


def test_merge(sparse_opt, checkpoints):
    for name in ("first", "second"):
        sparse_opt("delta", "diff", checkpoints / "base", checkpoints / name, "-o", checkpoints / f"{name}_d").done()
    sparse_opt("delta", "merge", checkpoints / "first_d", checkpoints / "second_d", "-o", checkpoints / "both").done()
    sparse_opt("delta", "apply", checkpoints / "both", checkpoints / "sharded", "-o", checkpoints / "out").done()
    expected, second = state_of(checkpoints / "first"), state_of(checkpoints / "second")
    for name in ("model.embed_tokens.weight", "model.layers.1.mlp.up_proj.weight"):
        expected[name][5:7] = second[name][5:7]
    assert same(state_of(checkpoints / "out"), expected)
    twice = ("delta", "merge", checkpoints / "first_d", checkpoints / "first_d", "-o", checkpoints / "sum")
    said = sparse_opt(*twice).failed_in_one_line(1)
    assert "model.embed_tokens.weight: both deltas change 48 elements, the first at 0" in said
    sparse_opt(*twice, "--sum").done()
    assert (checkpoints / "sum").is_dir()


def test_bad_input_leaves_nothing(sparse_opt, checkpoints):
    delta, out = checkpoints / "d", checkpoints / "out"
    sparse_opt("delta", "diff", checkpoints / "base", checkpoints / "first", "-o", delta).done()

    def refused(base, said, code=1):
        line = sparse_opt("delta", "apply", delta, base, "-o", out).failed_in_one_line(code)
        assert said in line and not out.exists()
        assert not [path for path in checkpoints.iterdir() if path.name.startswith(".")]

    refused(checkpoints / "second", "model.embed_tokens.weight has the digest")
    refused(checkpoints / "nothing", "cannot read the base")
    refused(checkpoints / "base" / "config.json", "expected a checkpoint's folder", 2)
    index = checkpoints / "sharded" / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    shutil.copy(checkpoints / "base" / "model.safetensors", checkpoints / "outside.safetensors")
    content["weight_map"] = dict.fromkeys(content["weight_map"], "../outside.safetensors")
    index.write_text(json.dumps(content))
    refused(checkpoints / "sharded", "expected a file in the folder")
    state = state_of(checkpoints / "base")
    for change, said in (
        ({"model.norm.weight": state["model.norm.weight"].float()}, "model.norm.weight is torch.float32 [16]"),
        ({"model.norm.weight": None}, "has no tensor model.norm.weight"),
    ):
        new = {name: t for name, t in (state | change).items() if t is not None}
        save_file(new, checkpoints / "base" / "model.safetensors", {"format": "pt"})
        refused(checkpoints / "base", said)
        line = sparse_opt("delta", "diff", checkpoints / "base", checkpoints / "first", "-o", out).failed_in_one_line(1)
        assert "model.norm.weight is" in line and not out.exists()
    torch.save(state, checkpoints / "state.pt")
    line = sparse_opt("delta", "diff", checkpoints / "state.pt", checkpoints / "first", "-o", out).failed_in_one_line(1)
    assert "state.pt: expected a safetensors file" in line


def test_push(sparse_opt, checkpoints, monkeypatch):
    sparse_opt("delta", "diff", checkpoints / "base", checkpoints / "first", "-o", checkpoints / "d").done()
    calls = []
    monkeypatch.setattr(
        SparseDelta, "push_to_hub", lambda self, repo, private: calls.append((repo, private)) or "a-url"
    )
    assert "a-url" in sparse_opt("delta", "push", checkpoints / "d", "user/d", "--private").done()
    assert calls == [("user/d", True)]

    def refuse(*args, **kwargs):
        raise OSError("no\nconnection")

    monkeypatch.setattr(SparseDelta, "push_to_hub", refuse)
    line = sparse_opt("delta", "push", checkpoints / "d", "user/d").failed_in_one_line(1)
    assert "cannot be pushed to user/d: no connection" in line
