"""Deltas next to saved weights (`save_delta=True`), and DeltaLogCallback: a log of any trainer's run in one line."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from sparse_opt import DeltaLog, MaskSet, SparseDelta
from sparse_opt import files as atomic_files
from sparse_opt.errors import ConfigError, DeltaError, DeltaLogError
from sparse_opt.integrations import DeltaLogCallback, SparseArguments
from sparse_opt.integrations.trl.mask_arguments import MaskArguments


@pytest.mark.parametrize("kind", ["SFT", "DPO"])
def test_checkpoints_and_the_saved_model_have_deltas(lab, kind, monkeypatch):
    saving = {"save_strategy": "steps", "save_steps": 2, "max_steps": 3}
    trainer = lab(kind, mask=lab.random_mask(0.1), sparse=SparseArguments(save_delta=True), **saving)
    trainer.train()
    output = Path(trainer.args.output_dir)
    uploaded = []

    def upload_folder(*, folder_path, ignore_patterns, **options):
        uploaded.extend(path.name for path in Path(folder_path).iterdir())
        return SimpleNamespace(commit_url="url")

    hub = SimpleNamespace(create_repo=lambda *_, **__: SimpleNamespace(repo_id="user/m"), upload_folder=upload_folder)
    monkeypatch.setattr("transformers.trainer.hf_api", lambda: hub)
    trainer.push_to_hub()
    assert {"delta.safetensors", "delta_config.json", "model.safetensors"} <= set(uploaded)
    for folder in (output / "checkpoint-2", output):
        model, trained = lab.model(), type(lab.model()).from_pretrained(folder)
        delta = SparseDelta.from_pretrained(folder)
        assert delta.metadata["base_model"] == str(lab.folder)
        assert 0 < delta.changed <= trainer.sparse_mask.nnz
        with delta.active(model):
            for name, weight in trained.state_dict().items():
                assert torch.equal(model.state_dict()[name].cpu(), weight), name


def test_a_run_resumes_from_a_delta_in_place_of_weights(lab, tmp_path):
    saving = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4, "output_dir": str(tmp_path / "run")}
    options = {"mask": lab.random_mask(0.1), "sparse": SparseArguments(save_delta=True, save_weights=False)}
    trainer = lab("DPO", **options, **saving)
    trainer.train()
    checkpoint = tmp_path / "run" / "checkpoint-2"
    assert not list(checkpoint.glob("model*"))
    assert {"config.json", "tokenizer.json", "delta.safetensors"} <= {path.name for path in checkpoint.iterdir()}
    again = lab("DPO", **options, **saving)
    again.train(resume_from_checkpoint=str(checkpoint))
    for (name, weight), other in zip(trainer.model.named_parameters(), again.model.parameters(), strict=True):
        assert torch.equal(weight, other), name
    other = lab.model()
    with torch.no_grad():
        other.model.norm.weight[0] += 1
    with pytest.raises(DeltaError, match=r"model\.norm\.weight has the digest"):
        lab("DPO", model=other, **options, **saving).train(resume_from_checkpoint=str(checkpoint))
    rows = {"eval_dataset": lab.rows("DPO")}
    with pytest.raises(ConfigError, match="load_best_model_at_end is True"):
        lab("DPO", **options, **saving, given=rows, load_best_model_at_end=True, eval_strategy="steps", eval_steps=2)


def test_options_of_the_delta():
    with pytest.raises(ConfigError, match="save_delta needs keep_base_weights=True"):
        SparseArguments(save_delta=True, keep_base_weights=False)
    with pytest.raises(ConfigError, match="save_weights=False needs save_delta=True"):
        SparseArguments(save_weights=False)
    options = MaskArguments(mask_density=0.1, save_delta=True).sparse_arguments(has_reference=False, fp16=False)
    assert options.save_delta and options.keep_base_weights
    with pytest.raises(ConfigError, match="--save_delta has no effect without a mask"):
        MaskArguments(save_delta=True).require_used()


def assert_log_holds(log: DeltaLog, kept: dict) -> None:
    assert log.verify() == []
    for step, weights in kept.items():
        state = log.load(step)
        for name, tensor in weights.items():
            assert torch.equal(state[name].view(torch.int32), tensor.cpu().view(torch.int32)), (step, name)


def test_options_are_those_of_the_log(lab, tmp_path):
    trainer = lab("Trainer", max_steps=3)
    mask = MaskSet.random(trainer.model, density=1.0)
    options = {"keyframe_every": 3, "mask": mask, "metadata": {"seed": "3"}}
    trainer.add_callback(DeltaLogCallback(tmp_path / "log", **options))
    trainer.train()
    log = DeltaLog.open(tmp_path / "log")
    assert log.steps == (0, 1, 2, 3)
    assert log.keyframe_every == 3
    assert log.mask_digest == mask.digest
    assert log.metadata == {"model": str(lab.folder), "seed": "3"}


def test_a_resumed_run_appends(lab, watch, tmp_path):
    whole, watched = lab("Trainer", max_steps=6, save_strategy="steps", save_steps=1), watch(6)
    whole.add_callback(watched)
    whole.add_callback(DeltaLogCallback(tmp_path / "log"))
    whole.train()
    # As if the run had ended after step 4, and gone back to the checkpoint of step 2.
    for step in (5, 6):
        next((tmp_path / "log").glob(f"step_{step:08d}.*")).unlink()
    resumed = lab("Trainer", max_steps=6)
    resumed.add_callback(DeltaLogCallback(tmp_path / "log"))
    resumed.train(resume_from_checkpoint=f"{whole.args.output_dir}/checkpoint-2")
    log = DeltaLog.open(tmp_path / "log")
    assert log.steps == tuple(range(7))
    assert_log_holds(log, watched.weights)
    late = lab("Trainer", max_steps=6)
    late.add_callback(DeltaLogCallback(tmp_path / "late"))
    with pytest.raises(DeltaLogError, match="late: holds no delta log, but the run resumes after step 2"):
        late.train(resume_from_checkpoint=f"{whole.args.output_dir}/checkpoint-2")
    assert not (tmp_path / "late").exists()


def full_from(step: int):
    """A `save_file` for which the disk is full from this step of the log on, whenever its writer comes to it."""
    save_file = atomic_files.save_file

    def save(tensors, path, metadata):
        if int(re.search(r"step_(\d+)", path.name)[1]) >= step:
            raise OSError(28, "No space left on device")
        save_file(tensors, path, metadata=metadata)

    return save


def test_a_full_disk(lab, watch, tmp_path, monkeypatch):
    trainer, watched = lab("Trainer", max_steps=6), watch(6)
    trainer.add_callback(watched)
    trainer.add_callback(DeltaLogCallback(tmp_path / "log"))
    monkeypatch.setattr(atomic_files, "save_file", full_from(3))
    with pytest.raises(DeltaLogError, match="step 3: cannot be written: No space left on device"):
        trainer.train()
    log = DeltaLog.open(tmp_path / "log")
    assert log.steps == (0, 1, 2)
    assert_log_holds(log, {step: watched.weights[step] for step in (1, 2)})
