from __future__ import annotations

import json
import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from sparse_opt import DeltaLog
from sparse_opt.tensor_state import as_bits


@pytest.fixture
def broken_log(files, tmp_path):
    """A copy of the log with one bit of step 2 flipped."""
    folder = shutil.copytree(files.delta_log, tmp_path / "log")
    file = folder / "step_00000002.patch.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    return folder


def test_list_shows_what_the_headers_say(sparse_opt, files):
    steps = json.loads(sparse_opt("delta", "list", "--delta_log_dir", files.delta_log, "--json").done())
    assert [(step["step"], step["kind"]) for step in steps] == [(0, "keyframe"), *((n, "patch") for n in (1, 2, 3))]
    for step in steps[1:]:
        before, after = files.states[step["step"] - 1], files.states[step["step"]]
        changed = sum(int((before[n] != after[n]).sum()) for n in after if n != "lm_head.weight")
        assert step["changed"] == changed
        assert step["share"] == changed / step["numel"]
    text = sparse_opt("delta", "list", "--delta_log_dir", files.delta_log).done()
    assert text.count("patch") == 3
    assert f"{steps[1]['changed']:,}" in text


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


def test_reconstruct_with_truncated_weights(sparse_opt, files, tmp_path):
    model = shutil.copytree(files.model, tmp_path / "model")
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    line = call_reconstruct(sparse_opt, files, tmp_path / "rebuilt", model=model).failed_in_one_line(1)
    assert f"cannot load the model {model}: " in line
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_misspelt_flag_points_to_the_help_of_its_action(sparse_opt):
    line = sparse_opt("delta", "reconstruct", "--model_nam", "m").failed_in_one_line(2)
    assert line.endswith("the nearest is '--model_name' (see 'sparse-opt delta reconstruct --help')")


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


@pytest.mark.parametrize("action", ["list", "verify"])
def test_no_log_is_one_line(sparse_opt, tmp_path, action):
    assert "holds no delta log" in sparse_opt("delta", action, "--delta_log_dir", tmp_path).failed_in_one_line(1)
