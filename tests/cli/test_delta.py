from __future__ import annotations

import json
import re
import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from sparse_opt import DeltaLog
from sparse_opt.tensors import as_bits


@pytest.fixture
def broken_log(files, tmp_path):
    """A copy of the log with one bit of step 2 flipped."""
    folder = shutil.copytree(files.delta_log, tmp_path / "log")
    file = folder / "step_00000002.patch.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
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
        assert step["level"] in ("packed", "tight")
        file = files.delta_log / f"step_{step['step']:08d}.patch.safetensors"
        assert step["bytes"] == file.stat().st_size
        assert step["bytes_per_change"] == step["bytes"] / step["changed"]
    assert (totals["steps"], totals["bytes"]) == (4, sum(step["bytes"] for step in steps))
    text = sparse_opt("delta", "list", "--delta_log_dir", files.delta_log).done()
    assert text.count(" patch ") == 3 and f"{steps[1]['changed']:,}" in text


def test_info_of_a_log(sparse_opt, files):
    log = DeltaLog.open(files.delta_log)
    found = as_json(sparse_opt("delta", "info", "--delta_log_dir", files.delta_log, "--largest", 2, "--json"))
    assert re.fullmatch("[0-9a-f]{32}", found["run_id"])
    assert found["steps"] == {"count": 4, "first": 0, "last": 3}
    assert (found["elements"], found["tensors"]) == (log.layout.numel, len(log.layout.tensors))
    assert found["tied"] == {"lm_head.weight": "model.embed_tokens.weight"}
    assert found["metadata"] == {"model": "tiny"}
    assert [entry["elements"] for entry in found["largest"]] == sorted(
        (s.numel for s in log.layout.tensors), reverse=True
    )[:2]
    text = sparse_opt("delta", "info", "--delta_log_dir", files.delta_log).done()
    assert found["run_id"] in text and "model: tiny" in text


def test_verify_of_a_whole_log(sparse_opt, files):
    assert "all 4 steps" in sparse_opt("delta", "verify", "--delta_log_dir", files.delta_log).done()
    found = json.loads(sparse_opt("delta", "verify", "--delta_log_dir", files.delta_log, "--json").done())
    assert found == {"ok": True, "steps": [0, 1, 2, 3], "lost_steps": [], "problems": []}


def test_verify_names_broken_files_and_lost_steps(sparse_opt, broken_log):
    outcome = sparse_opt("delta", "verify", "--delta_log_dir", broken_log)
    assert outcome.code == 1
    assert outcome.err.count("\n") == 1
    assert "broken: step_00000002.patch.safetensors; lost steps: 2, 3" in outcome.err
    outcome = sparse_opt("delta", "verify", "--delta_log_dir", broken_log, "--json")
    assert outcome.code == 1
    found = json.loads(outcome.out)
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


def test_convert_says_when_fewer_bits_would_do(sparse_opt, files, pt_log, tmp_path):
    outcome = sparse_opt("delta", "convert", "--from", pt_log, "--to", tmp_path / "wide", "--json")
    assert as_json(outcome)["steps"] == [0, 1, 2]
    assert outcome.err.splitlines() == [
        "sparse-opt: every weight of the base is a bfloat16 value: --dtype bfloat16 halves the states"
    ]
    words = ("--dtype", "bfloat16", "--level", "tight", "--model_name", "tiny")
    outcome = sparse_opt("delta", "convert", "--from", pt_log, "--to", tmp_path / "log", *words)
    assert outcome.done().startswith(f"{tmp_path / 'log'}: 3 steps, ") and outcome.err == ""
    log = DeltaLog.open(tmp_path / "log")
    assert log.metadata == {"model": "tiny"}
    for step in (0, 1, 2):
        for name, tensor in log.load(step).items():
            assert torch.equal(as_bits(tensor), as_bits(files.states[step][name]))


def test_convert_keeps_the_chosen_steps(sparse_opt, files, tmp_path):
    words = ("delta", "convert", "--from", files.delta_log, "--to", tmp_path / "new", "--steps", 3, "--json")
    assert as_json(sparse_opt(*words))["steps"] == [0, 3]
    assert DeltaLog.open(tmp_path / "new").digest(3) == DeltaLog.open(files.delta_log).digest(3)


def test_convert_refuses_in_one_line_and_leaves_nothing(sparse_opt, files, pt_log, tmp_path):
    def refused(code, *words, source=pt_log):
        call = ("delta", "convert", "--from", source, "--to", tmp_path / "new", *words)
        return sparse_opt(*call).failed_in_one_line(code)

    assert "keyframe_every' is 0: expected 1 or more" in refused(2, "--keyframe_every", 0)
    assert "invalid choice: 'small' (choose from" in refused(2, "--level", "small")
    assert "option 'against'" in refused(2, "--against", "base", source=files.delta_log)
    assert "holds no delta log" in refused(1, source=tmp_path)
    assert "nothing.pt: file not found" in refused(1, "--base_state", pt_log / "nothing.pt")
    (pt_log / "deltas_step_2.pt").write_bytes(b"PK")
    assert "deltas_step_2.pt: step 2: damaged" in refused(1)
    assert [path.name for path in tmp_path.iterdir()] == ["deltas"]
    words = ("delta", "convert", "--from", pt_log, "--to", pt_log)
    assert "option 'to'" in sparse_opt(*words).failed_in_one_line(2)
