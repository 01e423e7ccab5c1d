"""`sparse-opt delta`: logs, and deltas of checkpoints in one file and in shards."""

import copy
import json
import re
import shutil

import pytest
import torch
from damage import flip
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from sparse_opt import DeltaLog, SparseDelta
from sparse_opt.tensors import as_bits


@pytest.fixture
def broken_log(files, tmp_path):
    """A copy of the log with one bit of step 2 flipped."""
    folder = shutil.copytree(files.delta_log, tmp_path / "log")
    flip(folder / "step_00000002.patch.safetensors")
    return folder


def as_json(outcome):
    return json.loads(outcome.done())


def changed_between(before, after) -> int:
    """Of the tiny model, whose head is tied to its embedding."""
    return sum(int((as_bits(before[n]) != as_bits(after[n])).sum()) for n in after if n != "lm_head.weight")


def test_list_shows_what_the_headers_say(sparse_opt, files):
    found = as_json(sparse_opt("delta", "list", "--delta_log_dir", files.delta_log, "--json"))
    steps, totals = found["steps"], found["totals"]
    assert [(step["step"], step["kind"]) for step in steps] == [(0, "keyframe"), *((n, "patch") for n in (1, 2, 3))]
    for step in steps[1:]:
        assert step["changed"] == changed_between(files.states[step["step"] - 1], files.states[step["step"]])
        assert step["share"] == step["changed"] / step["numel"]
        file = files.delta_log / f"step_{step['step']:08d}.patch.safetensors"
        assert step["bytes"] == file.stat().st_size
        assert step["bytes_per_change"] == step["bytes"] / step["changed"]
    assert (totals["steps"], totals["bytes"]) == (4, sum(step["bytes"] for step in steps))


def test_info_of_a_log(sparse_opt, files):
    log = DeltaLog.open(files.delta_log)
    found = as_json(sparse_opt("delta", "info", "--delta_log_dir", files.delta_log, "--json"))
    assert re.fullmatch("[0-9a-f]{32}", found["run_id"])
    assert found["steps"] == {"count": 4, "first": 0, "last": 3}
    assert (found["elements"], found["tensors"]) == (log.layout.numel, len(log.layout.tensors))
    assert found["tied"] == {"lm_head.weight": "model.embed_tokens.weight"}
    assert found["metadata"] == {"model": "tiny"}


def test_verify_of_a_whole_log(sparse_opt, files):
    assert "all 4 steps" in sparse_opt("delta", "verify", "--delta_log_dir", files.delta_log).done()
    found = json.loads(sparse_opt("delta", "verify", "--delta_log_dir", files.delta_log, "--json").done())
    assert found == {"ok": True, "steps": [0, 1, 2, 3], "lost_steps": [], "problems": []}


def test_verify_names_broken_files_and_lost_steps(sparse_opt, broken_log):
    outcome = sparse_opt("delta", "verify", "--delta_log_dir", broken_log)
    assert outcome.code == 1
    assert outcome.err.count("\n") == 1
    assert "broken: step_00000002.patch.safetensors; lost steps: 2, 3" in outcome.err
    found = json.loads(sparse_opt("delta", "verify", "--delta_log_dir", broken_log, "--json").out)
    assert (found["ok"], found["lost_steps"]) == (False, [2, 3])
    assert found["problems"][0]["file"] == "step_00000002.patch.safetensors"


@pytest.mark.parametrize("step", [0, 2])
def test_reconstruct_writes_a_checkpoint_of_the_logged_bits(sparse_opt, files, tmp_path, step):
    output = tmp_path / "deep" / "rebuilt"
    words = ("--model_name", files.model, "--delta_log_dir", files.delta_log, "--step", step, "--output_dir", output)
    found = json.loads(sparse_opt("delta", "reconstruct", *words, "--json").done())
    assert found["digest"] == DeltaLog.open(files.delta_log).digest(step)
    state = AutoModelForCausalLM.from_pretrained(output, dtype="auto").state_dict()
    assert state.keys() == files.states[step].keys()
    for name, tensor in state.items():
        assert tensor.dtype == torch.bfloat16
        assert torch.equal(as_bits(tensor), as_bits(files.states[step][name]))
    assert AutoTokenizer.from_pretrained(output)("12")["input_ids"]
    assert [path.name for path in output.parent.iterdir()] == ["rebuilt"]


def call_reconstruct(sparse_opt, files, output, *, model=None, log=None, step=2):
    words = ("--delta_log_dir", log or files.delta_log, "--step", step, "--output_dir", output)
    return sparse_opt("delta", "reconstruct", "--model_name", model or files.model, *words)


def test_reconstruct_refuses_in_one_line_and_leaves_nothing(sparse_opt, files, broken_log, tmp_path):
    output = tmp_path / "rebuilt"
    assert "step 9 is not logged" in call_reconstruct(sparse_opt, files, output, step=9).failed_in_one_line(1)
    line = call_reconstruct(sparse_opt, files, output, model=files.wider_model).failed_in_one_line(1)
    assert "model.embed_tokens.weight" in line
    line = call_reconstruct(sparse_opt, files, output, log=broken_log).failed_in_one_line(1)
    assert "step_00000002.patch.safetensors" in line
    assert [path.name for path in tmp_path.iterdir()] == ["log"]


def test_reconstruct_leaves_a_folder_with_files_alone(sparse_opt, files, tmp_path):
    (tmp_path / "mine").write_text("keep")
    assert "not empty" in call_reconstruct(sparse_opt, files, tmp_path).failed_in_one_line(2)
    line = call_reconstruct(sparse_opt, files, tmp_path / "mine" / "rebuilt").failed_in_one_line(2)
    assert "is not a folder" in line
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_a_failed_write_leaves_nothing(sparse_opt, files, tmp_path, monkeypatch):
    def refuse(*args, **kwargs):
        raise PermissionError(13, "Permission denied", "config.json")

    # The weights are written by then; the tokenizer's files are not.
    monkeypatch.setattr("transformers.PreTrainedTokenizerFast.save_pretrained", refuse)
    line = call_reconstruct(sparse_opt, files, tmp_path / "rebuilt").failed_in_one_line(1)
    assert "Permission denied" in line
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("action", ["list", "info", "verify"])
def test_no_log_is_one_line(sparse_opt, tmp_path, action):
    assert "holds no delta log" in sparse_opt("delta", action, "--delta_log_dir", tmp_path).failed_in_one_line(1)


@pytest.fixture
def pt_log(files, tmp_path):
    """The run of `files` at steps 0, 1 and 2, as a tool with `named_parameters()` and fp32 writes it."""
    folder = tmp_path / "deltas"
    folder.mkdir()
    names = [name for name in files.states[0] if name != "lm_head.weight"]
    base = {name: files.states[0][name].float() for name in names}
    torch.save(base, folder / "base_state.pt")
    for step in (1, 2):
        torch.save(
            {name: files.states[step][name].float() - base[name] for name in names}, folder / f"deltas_step_{step}.pt"
        )
    return folder


@pytest.mark.parametrize("action", ["list", "info", "verify"])
def test_the_error_for_pt_files_names_the_command_that_converts_them(sparse_opt, pt_log, action):
    line = sparse_opt("delta", action, "--delta_log_dir", pt_log).failed_in_one_line(1)
    assert f"expected a delta log: convert it: sparse-opt delta convert --from {pt_log} --to NEW_DIR" in line
    line = sparse_opt("mask", "find", "--delta_log_dir", pt_log).failed_in_one_line(1)
    assert "sparse-opt delta convert" in line


def test_convert_of_pt_files(sparse_opt, files, pt_log, tmp_path):
    outcome = sparse_opt("delta", "convert", "--from", pt_log, "--to", tmp_path / "wide", "--json")
    assert as_json(outcome)["steps"] == [0, 1, 2]
    words = ("--dtype", "bfloat16", "--model_name", "tiny")
    outcome = sparse_opt("delta", "convert", "--from", pt_log, "--to", tmp_path / "log", *words)
    assert outcome.done().startswith(f"{tmp_path / 'log'}: 3 steps, ") and outcome.err == ""
    log = DeltaLog.open(tmp_path / "log")
    assert log.metadata == {"model": "tiny"}
    for step in (0, 1, 2):
        for name, tensor in log.load(step).items():
            assert torch.equal(as_bits(tensor), as_bits(files.states[step][name]))


def test_convert_refuses_in_one_line_and_leaves_nothing(sparse_opt, files, pt_log, tmp_path):
    def refused(code, *words, source=pt_log):
        call = ("delta", "convert", "--from", source, "--to", tmp_path / "new", *words)
        return sparse_opt(*call).failed_in_one_line(code)

    assert "keyframe_every' is 0: expected 1 or more" in refused(2, "--keyframe_every", 0)
    assert "option 'dtype'" in refused(2, "--dtype", "bfloat16", source=files.delta_log)
    assert "holds no delta log" in refused(1, source=tmp_path)
    (pt_log / "deltas_step_2.pt").write_bytes(b"PK")
    assert "deltas_step_2.pt: step 2: damaged" in refused(1)
    assert [path.name for path in tmp_path.iterdir()] == ["deltas"]
    words = ("delta", "convert", "--from", pt_log, "--to", pt_log)
    assert "option 'to'" in sparse_opt(*words).failed_in_one_line(2)


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
    refused(checkpoints / "nothing", "cannot read ")
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
