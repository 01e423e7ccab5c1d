"""`SparseArguments(save_delta=True)`: the delta next to the weights that a trainer saves and pushes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from sparse_opt import SparseDelta
from sparse_opt.errors import ConfigError
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
                assert torch.equal(model.state_dict()[name], weight), name


def test_options_of_the_delta():
    with pytest.raises(ConfigError, match="save_delta needs keep_base_weights=True"):
        SparseArguments(save_delta=True, keep_base_weights=False)
    options = MaskArguments(mask_density=0.1, save_delta=True).sparse_arguments(has_reference=False, fp16=False)
    assert options.save_delta and options.keep_base_weights
    with pytest.raises(ConfigError, match="--save_delta has no effect without a mask"):
        MaskArguments(save_delta=True).require_used()
