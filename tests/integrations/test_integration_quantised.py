"""Trainers of a model that bitsandbytes has quantised."""

import math

import pytest
import torch

from sparse_opt import MaskSet, RandomMask, SparseDelta
from sparse_opt.errors import ConfigError
from sparse_opt.integrations import SparseArguments
from sparse_opt.optim.quantised import overlay_of

bnb = pytest.importorskip("bitsandbytes", reason="needs bitsandbytes: pip install 'sparse-opt[test]'")


@pytest.fixture
def load(lab):
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    def make():
        config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16)
        options = {"quantization_config": config, "device_map": {"": 0 if lab.device.type == "cuda" else "cpu"}}
        return AutoModelForCausalLM.from_pretrained(lab.folder, dtype=torch.bfloat16, **options)

    return make


def test_dpo_starts_at_ln_2_resumes_and_saves_merged_weights(lab, load, curve):
    from transformers import AutoModelForCausalLM

    model = load()
    mask = MaskSet.random(model, density=0.1, seed=7)
    options = {"mask": mask, "max_steps": 4, "save_strategy": "steps", "save_steps": 2, "learning_rate": 1e-2}
    trainer = lab("DPO", model=model, **options)
    trainer.train()
    losses = [row["loss"] for row in curve(trainer)]
    assert losses[0] == pytest.approx(math.log(2), abs=1e-6) and losses[-1] < losses[0]  # the log is rounded
    assert len(trainer.sparse_optimizer.quantised_parameters) == 14

    resumed = lab("DPO", model=load(), **options)
    resumed.train(resume_from_checkpoint=f"{trainer.args.output_dir}/checkpoint-2")
    assert [row["loss"] for row in curve(resumed)] == losses
    trained = {}
    for each in (trainer, resumed):
        each.save_model(each.args.output_dir)
        plain = AutoModelForCausalLM.from_pretrained(each.args.output_dir, dtype=torch.bfloat16)
        assert not getattr(plain, "is_quantized", False)
        trained[each] = plain.state_dict()
    assert all(torch.equal(weight, trained[resumed][name]) for name, weight in trained[trainer].items())
    name, layer = next((n, m) for n, m in model.named_modules() if isinstance(m, bnb.nn.Linear4bit))
    with overlay_of(layer).merged() as merged:
        assert torch.equal(merged.cpu(), trained[trainer][f"{name}.weight"])


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
    for sparse, changes, option in (
        (SparseArguments(delta_log_dir=tmp_path / "log"), {}, "delta_log_dir"),
        (None, {"load_best_model_at_end": True, "eval_strategy": "no", "save_strategy": "no"}, "load_best_model"),
    ):
        with pytest.raises(ConfigError, match=rf"{option}.* is set, and 'model.*' is quantised"):
            lab("DPO", model=load(), mask=RandomMask(0.1), sparse=sparse, **changes)
