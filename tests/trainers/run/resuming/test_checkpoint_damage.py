"""Damaged checkpoints: each is refused by the name of its file, and the last intact one is named."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from stopping import assert_same_run, flip_a_bit, rows, stop

from sparse_opt.delta.log import DeltaLog
from sparse_opt.errors import ConfigError, DataError, DeltaLogError
from sparse_opt.trainers import dpo
from sparse_opt.trainers.dpo import DPOConfig
from sparse_opt.trainers.run.resuming.manifest import write_manifest

N_STEPS = 4


@pytest.fixture(scope="module")
def configure(model_folder, pairs_file):
    """`configure(folder)`: a DPO run of four steps in this folder, with a checkpoint at each step."""

    def make(folder, **changes):
        options = {
            "policy_name": str(model_folder),
            "dataset": str(pairs_file),
            "output_dir": folder / "run",
            "delta_log_dir": folder / "log",
            "delta_log_steps": "every:1",
            "dtype": "fp32",
            "device": "cpu",
            "n_steps": N_STEPS,
            "batch_size": 2,
            "learning_rate": 1e-3,
            "save_steps": 1,
            "save_total_limit": 3,
            "sample_steps": None,
        }
        return DPOConfig(**{**options, **changes})

    return make


@pytest.fixture(scope="module")
def runs(tmp_path_factory, configure):
    """The summary of a whole run, and the folder of one that stopped after its third step."""
    folder = tmp_path_factory.mktemp("runs")
    whole = dpo.train(configure(folder / "whole"))
    with pytest.MonkeyPatch.context() as monkeypatch:
        stop(monkeypatch, dpo.train, configure(folder / "run"), 3)
    return whole, (folder / "run").rename(folder / "stopped")


@pytest.fixture
def stopped(runs):
    """The folder of the run that stopped, with checkpoints of steps 1, 2 and 3; it is the same for each test."""
    folder = runs[1].parent / "run"  # delta_log_dir may not change
    shutil.copytree(runs[1], folder)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def resume(configure, stopped):
    """`resume()` resumes the copy."""

    def go_on(**changes):
        return dpo.train(configure(stopped, resume=True, **changes))

    return go_on


def checkpoint(stopped: Path, step: int) -> Path:
    return stopped / "run" / "checkpoints" / f"step_{step:08d}"


def remove_tensor(folder: Path) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.norm.weight"]
    save_file(tensors, file, metadata={"format": "pt"})


def append(file: Path, content: bytes = b"\0") -> None:
    with file.open("ab") as stream:
        stream.write(content)


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def edit_manifest(folder: Path, **changes: object) -> None:
    file = folder / "manifest.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


DAMAGES = {
    "bit of weights": (lambda f: flip_a_bit(f / "model.safetensors"), "model.safetensors has digest"),
    "bit of state": (lambda f: flip_a_bit(f / "training_state.pt"), "training_state.pt has digest"),
    "no tensor": (remove_tensor, "model.safetensors has"),
    "no config": (lambda f: (f / "config.json").unlink(), "config.json is missing"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "model.safetensors is missing"),
    "no tokenizer": (lambda f: (f / "tokenizer.json").unlink(), "tokenizer.json is missing"),
    "more bytes": (lambda f: append(f / "config.json"), "config.json has .* bytes, expected"),
    "fewer bytes": (lambda f: cut(f / "training_state.pt"), "training_state.pt has .* bytes, expected"),
    "another file": (lambda f: append(f / "adapter_config.json"), "adapter_config.json is not in its manifest.json"),
    "no manifest": (lambda f: (f / "manifest.json").unlink(), "has no manifest.json"),
    "empty manifest": (lambda f: (f / "manifest.json").write_bytes(b""), "manifest.json cannot be read"),
    "binary manifest": (lambda f: (f / "manifest.json").write_bytes(bytes(range(256))), "manifest.json cannot be"),
    "cut manifest": (lambda f: cut(f / "manifest.json") or cut(f / "manifest.json"), "manifest.json cannot be read"),
    "list as manifest": (lambda f: (f / "manifest.json").write_text("[]"), "manifest.json does not have its own dig"),
    "edited manifest": (lambda f: edit_manifest(f, files={}), "manifest.json does not have its own digest"),
    "folder as file": (
        lambda f: ((f / "config.json").unlink(), (f / "config.json").mkdir()),
        "config.json is missing",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_refused_with_the_last_intact_one(stopped, resume, damage):
    harm, message = DAMAGES[damage]
    harm(checkpoint(stopped, 3))
    before = (stopped / "run" / "metrics.jsonl").read_bytes()
    with pytest.raises(
        DataError, match=f"step_00000003: .*{message}.*the last intact checkpoint is step_00000002: --res"
    ):
        resume()
    flip_a_bit(checkpoint(stopped, 2) / "config.json")
    with pytest.raises(DataError, match="the last intact checkpoint is step_00000001: --resume --resume_step 1$"):
        resume()
    (checkpoint(stopped, 1) / "manifest.json").unlink()
    with pytest.raises(DataError, match="no other checkpoint is intact; --resume --resume_step 0 starts from the beg"):
        resume()
    assert (stopped / "run" / "metrics.jsonl").read_bytes() == before


def test_hidden_files_are_no_part_of_a_checkpoint(runs, stopped, resume):
    append(checkpoint(stopped, 3) / ".DS_Store")
    assert_same_run(runs[0], resume())


@pytest.mark.parametrize("step", [0, 1, 2, 3])
def test_a_run_goes_on_from_an_earlier_checkpoint(runs, stopped, resume, step):
    flip_a_bit(checkpoint(stopped, 3) / "model.safetensors")
    if step == 3:
        with pytest.raises(DataError, match="step_00000003: damaged: model.safetensors"):
            resume(resume_step=3)
        return
    assert_same_run(runs[0], resume(resume_step=step))
    logs = [DeltaLog.open(Path(folder) / "log") for folder in (runs[1].parent / "whole", stopped)]
    assert [logs[0].digest(s) for s in logs[0].steps] == [logs[1].digest(s) for s in logs[1].steps]
    # Later checkpoints are written again, or removed.
    left = sorted((stopped / "run" / "checkpoints").iterdir())
    assert [path.name for path in left] == ["step_00000001", "step_00000002", "step_00000003"]


def contents(folder: Path) -> dict[Path, bytes]:
    """The bytes of all files below a folder, without the lock of a run that is going on."""
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != "run.lock"}


def test_a_restore_that_fails_loses_no_later_checkpoint(runs, stopped, resume):
    folder = checkpoint(stopped, 2)
    state = torch.load(folder / "training_state.pt", weights_only=True)
    del state["states"]["optimizer"]["masters"]
    torch.save(state, folder / "training_state.pt")
    write_manifest(folder)
    before = contents(stopped)
    with pytest.raises(DataError, match="training_state.pt: optimizer: KeyError: 'masters'"):
        resume(resume_step=2)
    assert contents(stopped) == before
    assert_same_run(runs[0], resume(resume_step=3))


@pytest.mark.parametrize("error", [KeyboardInterrupt, torch.OutOfMemoryError])
def test_nothing_changes_on_disk_until_the_checkpoint_is_restored(monkeypatch, configure, pairs_file, tmp_path, error):
    pytest.importorskip("tensorboard")
    config = configure(
        tmp_path,
        log_margins=True,
        report_to=["tensorboard"],
        sample_steps=1,
        eval_dataset=str(pairs_file),
        eval_subset_size=2,
        eval_steps=1,
    )
    stop(monkeypatch, dpo.train, config, 3)
    before, during = contents(tmp_path), []

    def fail(*args, **kwargs):
        during.append(contents(tmp_path))
        raise error

    with monkeypatch.context() as patch:
        patch.setattr("sparse_opt.trainers.run.resuming.checkpoints.load_pretrained", fail)
        with pytest.raises(error):
            dpo.train(dataclasses.replace(config, resume=True, resume_step=1))
    assert during == [before]  # so that a kill changes nothing either
    assert contents(tmp_path) == before
    dpo.train(dataclasses.replace(config, resume=True, resume_step=1))
    for name in ("metrics", "evaluations", "samples", "logs/margins/margins_log"):
        steps = {row["step"] for row in rows(tmp_path / "run" / f"{name}.jsonl")}
        assert steps - {0} == {1, 2, 3, 4}, name


def test_a_delta_log_of_other_weights_loses_no_later_checkpoint(runs, stopped, resume):
    shutil.copytree(checkpoint(stopped, 2), checkpoint(stopped, 1), dirs_exist_ok=True)
    state = torch.load(checkpoint(stopped, 1) / "training_state.pt", weights_only=True)
    torch.save({**state, "step": 1}, checkpoint(stopped, 1) / "training_state.pt")
    write_manifest(checkpoint(stopped, 1))
    before = contents(stopped)
    with pytest.raises(DeltaLogError, match="step 1 is not what the checkpoint of that step holds"):
        resume(resume_step=1)
    assert contents(stopped) == before
    assert_same_run(runs[0], resume())


def test_an_old_checkpoint_without_a_manifest_is_taken_when_it_is_named(runs, stopped, resume):
    (checkpoint(stopped, 3) / "manifest.json").unlink()
    with pytest.raises(DataError, match="--resume --resume_step 3 resumes from it unverified"):
        resume()
    with pytest.warns(UserWarning, match="step_00000003: has no manifest.json.*its files are not verified"):
        assert_same_run(runs[0], resume(resume_step=3))


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (remove_tensor, r"no weights for 1 tensors of a LlamaForCausalLM, among them model\.norm\.weight"),
        (lambda f: (f / "config.json").unlink(), "the folder has no config.json"),
        (lambda f: (f / "training_state.pt").write_text("state"), "cannot read training_state.pt"),
        (lambda f: torch.save([1, 2], f / "training_state.pt"), "training_state.pt holds list; expected step and sta"),
        (lambda f: torch.save({"step": 3}, f / "training_state.pt"), "training_state.pt holds step; expected step and"),
        (
            lambda f: torch.save({"step": 2, "states": {}}, f / "training_state.pt"),
            "training_state.pt is of step 2, expected 3",
        ),
        (
            lambda f: torch.save({"step": 3, "states": {"schedule": {}}}, f / "training_state.pt"),
            "holds schedule; expected optimizer, schedule",
        ),
        (
            lambda f: torch.save({"step": 3, "states": {"schedule": {}, "optimizer": 7}}, f / "training_state.pt"),
            "training_state.pt: optimizer: TypeError",
        ),
    ],
)
def test_what_an_unverified_checkpoint_lacks_is_named(stopped, resume, harm, message):
    folder = checkpoint(stopped, 3)
    (folder / "manifest.json").unlink()
    harm(folder)
    with pytest.warns(UserWarning, match="not verified"), pytest.raises(DataError, match=message):
        resume(resume_step=3)


def test_adapters_that_are_missing_are_named(monkeypatch, configure, tmp_path):
    config = configure(tmp_path, mode="lora", delta_log_dir=None)
    stop(monkeypatch, dpo.train, config, 1)
    folder = checkpoint(tmp_path, 1)
    tensors = load_file(folder / "adapter_model.safetensors")
    name = min(tensors)
    del tensors[name]
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    write_manifest(folder)
    with pytest.raises(DataError, match=f"has no adapter weights {name}"):
        dpo.train(dataclasses.replace(config, resume=True))


def test_a_step_that_is_not_there(stopped, resume, configure, tmp_path):
    with pytest.raises(ConfigError, match="'resume_step' is 7: no checkpoint of this step in .*; there are 1, 2, 3$"):
        resume(resume_step=7)
    with pytest.raises(ConfigError, match="'resume_step' is 1: there is no run in .*new/run"):
        dpo.train(configure(tmp_path / "new", resume=True, resume_step=1))
    with pytest.raises(ConfigError, match="'resume_step' is 1: it is used with --resume only"):
        configure(tmp_path / "new", resume_step=1)


def test_rows_that_a_checkpoint_has_outlived_are_named(stopped, resume):
    file = stopped / "run" / "metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    file.write_text(lines[0] + lines[2])
    with pytest.raises(DataError, match="metrics.jsonl: has no row of step 2, and the checkpoint is of step 3"):
        resume()
    resume(resume_step=1)
    assert [row["step"] for row in rows(file)] == [1, 2, 3, 4]
