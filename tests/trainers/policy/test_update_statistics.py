"""The update's statistics compared with plain numpy, for plain, tied and frozen weights and for adapters."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from small_models import small
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig

from sparse_opt.analysis.update_statistics import UpdateStatistics
from sparse_opt.errors import DataError
from sparse_opt.trainers import dpo
from sparse_opt.trainers.policy.adapters import add_lora


def moved(model, size: float, share: float, seed: int = 0) -> dict[str, np.ndarray]:
    """Moves a share of the elements by about `size`; name -> the change as it was stored, fp64."""
    generator = torch.Generator().manual_seed(seed)
    changes = {}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            before = parameter.double().numpy().copy()
            chosen = torch.rand(parameter.shape, generator=generator) < share
            parameter.add_((torch.randn(parameter.shape, generator=generator) * size * chosen).to(parameter.dtype))
            changes[name] = parameter.double().numpy() - before
    return changes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("config_class", [LlamaConfig, GPT2Config])  # GPT-2's embedding is its output layer
def test_figures_are_numpys(config_class, dtype):
    model = small(config_class).to(dtype)
    statistics = UpdateStatistics(model, method="exact", tau=3e-6)
    changes = moved(model, 2e-6 if dtype == torch.float32 else 1e-3, 0.3)
    row = statistics.measure(model)
    n_weights = sum(change.size for change in changes.values())
    assert row["n_weights"] == n_weights
    assert row["share_changed"] == sum(int((change != 0).sum()) for change in changes.values()) / n_weights
    for tolerance in (1e-6, 1e-5):
        above = sum(int((np.abs(change) > np.float32(tolerance)).sum()) for change in changes.values())
        assert row[f"share_above_{tolerance:.0e}".replace("e-0", "e-")] == pytest.approx(above / n_weights, abs=1e-4)
    norm = math.sqrt(sum(float((change**2).sum()) for change in changes.values()))
    assert row["frobenius_norm"] == pytest.approx(norm, rel=1e-6)
    if dtype == torch.bfloat16:
        assert row["share_changed_bf16"] is None and row["share_changed_fp32"] is None
    else:
        assert row["share_changed_fp32"] == row["share_changed"]
        assert 0 < row["share_changed_bf16"] < 0.1 * row["share_changed"]
    assert set(row["matrices"]) == {name for name, change in changes.items() if change.ndim == 2}
    for name, matrix in row["matrices"].items():
        values = np.linalg.svd(changes[name], compute_uv=False)
        p = values[values > 0] / values.sum()
        assert matrix["effective_rank"] == pytest.approx(math.exp(-(p * np.log(p)).sum()), rel=1e-5)
        assert matrix["stable_rank"] == pytest.approx((values**2).sum() / values[0] ** 2, rel=1e-5)
        assert matrix["frobenius_norm"] == pytest.approx(math.sqrt((changes[name] ** 2).sum()), rel=1e-6)
        assert matrix["share_changed"] == (changes[name] != 0).mean()
        size = np.abs(changes[name])
        assert matrix["share_above_tau"] == pytest.approx((size > np.float32(3e-6)).mean(), abs=1e-4)
        assert matrix["share_large"] == pytest.approx((size > size.mean() + 2 * size.std()).mean(), abs=1e-2)
        assert matrix["shape"] == list(changes[name].shape)
    in_matrices = np.concatenate([np.abs(change).ravel() for change in changes.values() if change.ndim == 2])
    assert row["share_above_tau"] == pytest.approx((in_matrices > np.float32(3e-6)).mean(), abs=1e-4)
    assert 0 < row["share_large"] < 0.25
    shares = [matrix["effective_rank"] / min(matrix["shape"]) for matrix in row["matrices"].values()]
    assert row["effective_rank_share"] == pytest.approx(sum(shares) / len(shares))


def test_a_model_that_has_not_moved():
    model = small(LlamaConfig)
    row = UpdateStatistics(model).measure(model)
    assert row["share_changed"] == row["share_above_1e-6"] == row["frobenius_norm"] == row["effective_rank_share"] == 0
    assert all(matrix["rank"] == 0 for matrix in row["matrices"].values())


def test_frozen_weights_count_but_are_not_copied():
    model = small(LlamaConfig)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".mlp." in name)
    statistics = UpdateStatistics(model)
    assert all(".mlp." in name for name in statistics._start)
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.add_(1.0)
    n_weights = sum(parameter.numel() for parameter in model.parameters())
    assert statistics.measure(model)["share_changed"] == model.model.layers[0].mlp.up_proj.weight.numel() / n_weights


def test_adapters_count_as_the_weights_they_are_merged_into():
    model = small(LlamaConfig)
    start = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    adapted = add_lora(model, rank=2)
    statistics = UpdateStatistics(adapted)
    assert statistics.measure(adapted)["share_changed"] == 0.0  # adapters start as no change
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(generator=torch.Generator().manual_seed(1))
    row = statistics.measure(adapted)
    merged = dict(adapted.merge_and_unload().named_parameters())
    changed = sum(int((merged[name] != before).sum()) for name, before in start.items())
    n_weights = sum(before.numel() for before in start.values())
    assert row["n_weights"] == n_weights and row["share_changed"] == changed / n_weights > 0.1
    assert set(row["matrices"]) == {name for name in start if "proj" in name}
    for name, matrix in row["matrices"].items():
        assert matrix["frobenius_norm"] == pytest.approx((merged[name] - start[name]).norm().item(), rel=1e-5)
        assert 1.0 < matrix["effective_rank"] < 2.1  # of rank 2, and what rounding adds


def test_patterns_that_choose_nothing_are_refused():
    with pytest.raises(DataError, match=r"no trained weight matrix matches \['\*\.nothing'\]; there are 16"):
        UpdateStatistics(small(LlamaConfig), include=["*.nothing"])


@pytest.mark.parametrize("mode", ["dense", "sparse"])
def test_the_fp32_share_is_that_of_the_master_copies(dpo_options, mask_file, model_folder, mode):
    """Compared with the copies in the checkpoint of step 2; at this rate bf16 weights often do not change."""
    mask = mask_file if mode == "sparse" else None
    options = dpo_options(
        mode=mode, mask=mask, dtype="bf16", learning_rate=1e-5, n_steps=3, save_steps=2, statistics_steps=2
    )
    dpo.train(options)
    row = json.loads((options.output_dir / "update_statistics.jsonl").read_text().splitlines()[0])
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.bfloat16)
    start = {name: weight.detach().float().flatten() for name, weight in model.named_parameters()}
    file = options.output_dir / "checkpoints" / "step_00000002" / "training_state.pt"
    saved = torch.load(file, weights_only=True)["states"]["optimizer"]
    if mode == "dense":
        pairs = zip(start.values(), saved["masters"], strict=True)
        changed = sum(int((weight != copy.flatten()).sum()) for weight, copy in pairs)
    else:
        names = saved["param_groups"][0]["param_names"]
        parts = ((start[names[i]], entry) for i, entry in saved["state"].items())
        changed = sum(int((weight[entry["indices"].long()] != entry["master"]).sum()) for weight, entry in parts)
    assert row["share_changed_fp32"] == changed / sum(weight.numel() for weight in start.values())
    assert 0 < row["share_changed"] < 0.9 * row["share_changed_fp32"]
    assert row["share_changed_bf16"] is None
