"""Trainers of a quantised model."""

import json
import math
import runpy
from pathlib import Path

import pytest
import quantised_models
import torch

from sparse_opt import MaskSet, RandomMask, SparseDelta
from sparse_opt.cli.main import main
from sparse_opt.errors import ConfigError
from sparse_opt.integrations import SparseArguments

pytest.importorskip("bitsandbytes", reason="needs bitsandbytes: pip install 'sparse-opt[test]'")


@pytest.fixture
def load(lab):
    return lambda base="nf4": quantised_models.load(lab.folder, base, lab.device)


@pytest.mark.parametrize("base", ["nf4", "torchao_int8", "fp8"])
def test_dpo_starts_at_ln_2_resumes_and_saves_merged_weights(lab, load, curve, base):
    model = load(base)
    mask = MaskSet.random(model, density=0.1, seed=7)
    options = {"mask": mask, "max_steps": 4, "save_strategy": "steps", "save_steps": 2, "learning_rate": 1e-2}
    trainer = lab("DPO", model=model, **options)
    trainer.train()
    losses = [row["loss"] for row in curve(trainer)]
    assert losses[0] == pytest.approx(math.log(2), abs=1e-6) and losses[-1] < losses[0]  # the log is rounded
    assert len(trainer.sparse_optimizer.quantised_parameters) == 14

    resumed = lab("DPO", model=load(base), **options)
    resumed.train(resume_from_checkpoint=f"{trainer.args.output_dir}/checkpoint-2")
    assert [row["loss"] for row in curve(resumed)] == losses
    merged = []
    for each in (trainer, resumed):
        each.save_model(each.args.output_dir)
        merged.append(quantised_models.load(each.args.output_dir, None, lab.device))
        assert not getattr(merged[-1], "is_quantized", False)
    other = merged[1].state_dict()
    assert all(torch.equal(weight, other[name]) for name, weight in merged[0].state_dict().items())
    ids = torch.arange(20, device=lab.device)[None]
    assert torch.equal(merged[0](input_ids=ids).logits, trainer.model(input_ids=ids).logits)


@pytest.mark.parametrize("save_weights", [True, False])
def test_a_delta_is_saved_with_or_in_place_of_merged_weights(lab, load, tmp_path, save_weights):
    folder = tmp_path / "run"
    options = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "output_dir": str(folder)}
    options["mask"] = MaskSet.random(load(), density=0.1, seed=7)
    options["sparse"] = SparseArguments(save_delta=True, save_weights=save_weights)
    trainer = lab("DPO", model=load(), **options)
    trainer.train()
    trainer.save_model()
    checkpoint = folder / "checkpoint-2"
    assert bool(list(checkpoint.glob("model*"))) == save_weights
    ids, model = torch.arange(20, device=lab.device)[None], load().train()
    with torch.no_grad(), SparseDelta.from_pretrained(folder).active(model):
        assert torch.equal(model(input_ids=ids).logits, trainer.model.train()(input_ids=ids).logits)

    resumed = lab("DPO", model=load(), **options)
    resumed.train(resume_from_checkpoint=str(checkpoint))
    assert resumed.sparse_optimizer.delta().result_digest == trainer.sparse_optimizer.delta().result_digest


def test_what_reads_the_weights_of_the_model_is_refused(lab, load, tmp_path):
    for kind, sparse, changes, option in (
        ("DPO", SparseArguments(delta_log_dir=tmp_path / "log"), {}, "delta_log_dir"),
        ("DPO", None, {"load_best_model_at_end": True, "eval_strategy": "no"}, "load_best_model"),
        ("GRPO", None, {"use_vllm": True}, "use_vllm"),
    ):
        with pytest.raises(ConfigError, match=rf"{option}.* is set, and 'model.*' is quantised"):
            lab(kind, model=load(), mask=RandomMask(0.1), sparse=sparse, **changes)


def test_the_command_line_quantises_a_base_for_a_mask(lab, tmp_path):
    lab.rows("DPO").to_json(tmp_path / "pairs.jsonl")
    options = {
        "model_name_or_path": lab.folder,
        "dataset_name": tmp_path / "pairs.jsonl",
        "output_dir": tmp_path / "run",
    }
    options |= {"load_in_4bit": "true", "dtype": "bfloat16", "mask_density": 0.1, "max_steps": 2, "learning_rate": 1e-2}
    options |= {"per_device_train_batch_size": 2, "logging_steps": 1, "report_to": "none", "save_strategy": "no"}
    assert main(["train", "dpo", *(f"--{name}={value}" for name, value in options.items())]) == 0
    state = json.loads((tmp_path / "run/trainer_state.json").read_text())
    assert state["log_history"][0]["loss"] == pytest.approx(math.log(2), abs=1e-6)
    base = quantised_models.load(lab.folder, "nf4", lab.device)
    merged, name = quantised_models.load(tmp_path / "run", None, lab.device), "model.layers.0.mlp.up_proj"
    trained, before = merged.get_submodule(name).weight, quantised_models.dequantised(base.get_submodule(name))
    assert 0 < (trained != before).float().mean() < 0.2  # the rest is the dequantised base


def test_the_example(lab, tmp_path, curve):
    lab.rows("DPO").to_json(tmp_path / "pairs.jsonl")
    example = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "dpo_over_4bit.py"))
    options = {"model": lab.folder, "dataset": tmp_path / "pairs.jsonl", "output_dir": tmp_path / "run", "max_steps": 2}
    options["density"] = 1.0  # weights of one tile
    trainer = example["main"]([f"--{name}={value}" for name, value in options.items()])
    assert curve(trainer)[0]["loss"] == pytest.approx(math.log(2), abs=1e-6)
    merged = quantised_models.load(tmp_path / "run", None, lab.device)
    ids, base = torch.arange(20, device=lab.device)[None], quantised_models.load(lab.folder, "nf4_double", lab.device)
    expected = merged(input_ids=ids).logits
    with torch.no_grad(), SparseDelta.from_pretrained(tmp_path / "run" / "delta").active(base):
        assert torch.equal(base(input_ids=ids).logits, expected)
