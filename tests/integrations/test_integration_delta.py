"""`SparseArguments(save_delta=True)`: the delta next to the weights that a trainer saves and pushes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from sparse_opt import SparseDelta
from sparse_opt.errors import ConfigError, DeltaError
from sparse_opt.integrations import SparseArguments
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
