"""Unsupported settings are refused in one line that gives the reason and an alternative."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from accelerate import ParallelismConfig
from accelerate.utils import DistributedType
from torch.distributed.fsdp import StateDictType
from transformers import Trainer
from trl import DPOTrainer, KTOTrainer, SFTTrainer
from trl.trainer.callbacks import SyncRefModelCallback

from sparse_opt import MaskSet, SparseAdamW
from sparse_opt.errors import ConfigError, MaskError
from sparse_opt.integrations import SparseArguments, checks, sparse_trainer


def refused(lab, message, kind="SFT", error=ConfigError, **options):
    options.setdefault("mask", lab.random_mask(0.1))
    with pytest.raises(error, match=message) as caught:
        lab(kind, **options)
    assert "\n" not in str(caught.value) or error is MaskError


@pytest.mark.parametrize(
    ("trainer_class", "message"),
    [
        (KTOTrainer, "KTOTrainer is not supported, expected .* SFTTrainer, DPOTrainer, GRPOTrainer"),
        (SparseAdamW, "is sparse_opt.optim.adamw.SparseAdamW, expected a subclass of transformers.Trainer"),
    ],
)
def test_other_classes(trainer_class, message):
    with pytest.raises(TypeError, match=message):
        sparse_trainer(trainer_class)


def test_repeated_calls_return_one_class():
    assert sparse_trainer(Trainer) is sparse_trainer(Trainer)
    assert sparse_trainer(DPOTrainer).__name__ == "SparseDPOTrainer"
    with pytest.raises(TypeError, match="SparseTrainer is already a sparse trainer"):
        sparse_trainer(sparse_trainer(Trainer))


def test_classes_with_an_optimizer_of_their_own():
    class Own(SFTTrainer):
        def create_optimizer(self, model=None):
            return torch.optim.SGD(self.model.parameters())

    class Derived(Own):
        pass

    with pytest.raises(TypeError, match=r"Own overrides create_optimizer, which sparse_trainer overrides, too"):
        sparse_trainer(Derived)


@pytest.mark.parametrize("kind", ["DPO", "GRPO"])
def test_classes_that_pass_arguments_on(lab, kind):
    class PassingOn(lab.CLASSES[kind][0]):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)

    class OfItsOwn(lab.CLASSES[kind][0]):
        def __init__(self, model, **kwargs):
            super().__init__(model, args=lab.args(kind, beta=0.3, max_steps=1), **kwargs)

    options = {"train_dataset": lab.rows(kind), "processing_class": lab.tokenizer, "mask": lab.random_mask(0.1)}
    if kind == "GRPO":
        options["reward_funcs"] = lambda completion_ids, **_: [len(set(ids)) for ids in completion_ids]
    for trainer in (
        sparse_trainer(PassingOn)(lab.model(), args=lab.args(kind, beta=0.3, max_steps=1), **options),
        sparse_trainer(OfItsOwn)(lab.model(), **options),
    ):
        assert trainer.beta == trainer.args.beta == 0.3
        assert list(trainer.ref_model.parameters()) == []
        trainer.train()


def test_optimizers_of_the_callers(lab):
    model = lab.model()
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    refused(lab, "sparse_trainer creates it", model=model, given={"optimizers": (optimizer, None)})
    refused(lab, "is bound to another optimizer", model=model, given={"optimizers": (None, scheduler)})
    refused(lab, "sparse_trainer creates it", given={"optimizer_cls_and_kwargs": (torch.optim.SGD, {})})
    refused(lab, "optim is 'sgd', expected adamw_torch or adamw_torch_fused", optim="sgd")


def test_peft_models(lab):
    peft = pytest.importorskip("peft", reason="needs peft: pip install 'sparse-opt[test]'")
    config = peft.LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM")
    refused(lab, "peft_config trains an adapter, but a mask selects", given={"peft_config": config})
    for kind in ("Trainer", "DPO"):
        refused(lab, "with a PEFT adapter.*merge_and_unload", kind, model=peft.get_peft_model(lab.model(), config))
    model = lab.model()
    model.add_adapter(config)
    refused(lab, "a LlamaForCausalLM with a PEFT adapter", model=model)


def test_a_merged_adapter_is_a_model_like_any_other(lab):
    peft = pytest.importorskip("peft", reason="needs peft: pip install 'sparse-opt[test]'")
    config = peft.LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM")
    model = peft.get_peft_model(lab.model(), config).merge_and_unload()
    with pytest.raises(ConfigError, match="embed_tokens.weight', which does not require grad: call"):
        lab("SFT", mask=lab.random_mask(0.1), model=model, max_steps=1)
    lab("SFT", mask=lab.random_mask(0.1), model=model.requires_grad_(True), max_steps=1).train()


@pytest.mark.parametrize("kind", ["DPO", "GRPO"])
def test_a_reference_that_moves_or_is_not_kept(lab, kind):
    beta = {"beta": 0.1}
    refused(lab, "sync_ref_model=True updates the reference", kind, sync_ref_model=True, **beta)
    sparse = SparseArguments(keep_base_weights=False)
    refused(lab, "keep_base_weights is False, expected True", kind, sparse=sparse, **beta)
    if kind == "GRPO":  # without a KL term there is none to keep
        lab(kind, mask=lab.random_mask(0.1), sparse=sparse, max_steps=1).train()
    else:
        given = {"ref_model": lab.model()}
        lab(kind, mask=lab.random_mask(0.1), sparse=sparse, max_steps=1, given=given).train()


def test_the_arguments_keep_their_beta(lab):
    args = lab.args("GRPO", beta=0.25)
    trainer = lab("GRPO", mask=lab.random_mask(0.1), given={"args": args})
    assert trainer.args is args
    assert args.beta == trainer.beta == 0.25
    args.sync_ref_model = True
    with pytest.raises(ConfigError):
        lab("GRPO", mask=lab.random_mask(0.1), given={"args": args})
    args.sync_ref_model = False
    with pytest.raises(AttributeError):  # in TRL's constructor
        lab("GRPO", mask=lab.random_mask(0.1), given={"args": args, "reward_funcs": 3})
    assert args.beta == 0.25


def test_masks_of_other_models(lab):
    foreign = MaskSet.from_bool({"model.elsewhere.weight": torch.ones(3, dtype=torch.bool)})
    refused(lab, "model.elsewhere.weight", mask=foreign, error=MaskError)
    refused(lab, "no-such-mask.safetensors", mask="no-such-mask.safetensors", error=MaskError)
    refused(lab, "mask density is 3.0, expected 0 to 1", mask=3, error=MaskError)
    refused(lab, "mask is a list, expected ", mask=[3], error=TypeError)
    sparse = sparse_trainer(SFTTrainer)
    with pytest.raises(TypeError, match="mask"):
        sparse(lab.model(), args=lab.args("SFT"))


def test_casts_of_the_trained_weights_in_place(lab):
    refused(
        lab,
        r"use_transformers_continuous_batching=True casts the trained weights to torch.bfloat16 in place, and "
        r"model.embed_tokens.weight is torch.float32: load the model in torch.bfloat16",
        "GRPO",
        use_transformers_continuous_batching=True,
        bf16=True,
    )
    refused(lab, "bf16_full_eval=True casts the trained weights to torch.bfloat16", bf16_full_eval=True)
    lab("SFT", mask=lab.random_mask(0.1), model=lab.model(torch.bfloat16), bf16_full_eval=True)


def test_a_log_refuses_runs_that_restart(lab, tmp_path):
    sparse = SparseArguments(delta_log_dir=tmp_path / "log")
    refused(lab, "auto_find_batch_size restarts the run", sparse=sparse, auto_find_batch_size=True)


COMPACT, DENSE, SCALED = SparseArguments(), SparseArguments(grads="dense"), SparseArguments(amp_scaling=True)


@pytest.mark.parametrize(
    ("distributed", "precision", "n_gpu", "sparse", "message"),
    [
        ("DEEPSPEED", "no", 1, DENSE, "DEEPSPEED keeps weights and gradients in its own buffers"),
        ("FSDP", "no", 1, DENSE, r"FSDP keeps weights and gradients.*`accelerate launch --multi_gpu`.* FSDP2"),
        ("FSDP2", "no", 1, COMPACT, None),
        ("FSDP2", "no", 1, DENSE, "grads is 'dense', expected 'compact' with FSDP2"),
        ("MULTI_GPU", "no", 1, COMPACT, None),
        ("NO", "no", 2, COMPACT, "2 GPUs in one process use DataParallel: start with `accelerate launch`"),
        ("NO", "fp16", 1, COMPACT, r"fp16 .* use SparseArguments\(amp_scaling=True\), grads='dense', or bf16"),
        ("NO", "fp16", 1, SCALED, None),
        ("NO", "bf16", 1, COMPACT, None),
    ],
)
def test_ways_of_running(distributed, precision, n_gpu, sparse, message):
    """With fake accelerators, because most real ones need GPUs."""
    accelerator = fake_accelerator(distributed, precision)
    args = fake_arguments(n_gpu=n_gpu)
    with pytest.raises(ConfigError, match=message) if message else nullcontext():
        checks.of_accelerator(accelerator, args, sparse)


def fake_arguments(**changes):
    fields = {"n_gpu": 1, "save_strategy": "steps", "save_only_model": False, "load_best_model_at_end": False}
    return SimpleNamespace(**{**fields, **changes})


def fsdp_state(state_dict_type):
    return SimpleNamespace(fsdp_plugin=SimpleNamespace(state_dict_type=state_dict_type))


def fake_accelerator(distributed, precision="no", **changes):
    fields = {
        "distributed_type": DistributedType(distributed.removesuffix("2")),
        "is_fsdp2": distributed == "FSDP2",
        "mixed_precision": precision,
        "state": fsdp_state(StateDictType.SHARDED_STATE_DICT),
    }
    return SimpleNamespace(**{**fields, **changes})


FULL = {"state": fsdp_state(StateDictType.FULL_STATE_DICT)}


@pytest.mark.parametrize(
    ("distributed", "changes", "arguments", "message"),
    [
        ("FSDP2", FULL, {}, "fsdp_state_dict_type is FULL_STATE_DICT, expected SHARDED_STATE_DICT"),
        ("FSDP2", FULL, {"save_strategy": "no"}, None),
        ("FSDP2", {}, {"load_best_model_at_end": True}, "load_best_model_at_end is True, expected False with FSDP2"),
        ("MULTI_GPU", {"parallelism_config": ParallelismConfig(tp_size=2)}, {}, "parallelism_config has tensor"),
    ],
)
def test_checkpoints_and_parallelism(distributed, changes, arguments, message):
    with pytest.raises(ConfigError, match=message) if message else nullcontext():
        checks.of_accelerator(fake_accelerator(distributed, **changes), fake_arguments(**arguments), COMPACT)


def test_a_sharded_model():
    model = SimpleNamespace(is_distributed_loading_by_transformers=True)
    with pytest.raises(ConfigError, match="sharded over devices"):
        checks.of_model(model)


def test_a_reference_of_base_weights_is_not_synchronized(lab):
    trainer = lab("DPO", mask=lab.random_mask(0.1), max_steps=1)
    trainer.add_callback(SyncRefModelCallback(trainer.ref_model, trainer.accelerator))
    with pytest.raises(ConfigError, match="SyncRefModelCallback updates the reference, but base weights are constant"):
        trainer.train()
