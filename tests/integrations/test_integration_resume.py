"""Checkpoints continue the identical run, and delta logs rebuild every logged step of it."""

import pytest
import torch
from safetensors.torch import load_file
from transformers import TrainerCallback

from sparse_opt import DeltaLog
from sparse_opt.errors import ConfigError, DeltaLogError
from sparse_opt.integrations import SparseArguments
from sparse_opt.optim import SparseAdamW
from sparse_opt.optim.base_weights import InBaseWeights

STEPS = 8

CASES = {
    "Trainer": ("Trainer", torch.float32, SparseArguments(), {}),
    "SFT, bf16, masters": ("SFT", torch.bfloat16, SparseArguments(master_weights=True), {}),
    "SFT, bf16, stochastic rounding": (
        "SFT",
        torch.bfloat16,
        SparseArguments(stochastic_rounding=True, state_dtype=torch.bfloat16),
        {},
    ),
    "DPO": ("DPO", torch.float32, SparseArguments(), {}),
    "GRPO": ("GRPO", torch.float32, SparseArguments(), {"beta": 0.3}),
}


def saving(every: int = 1) -> dict[str, object]:
    return {"max_steps": STEPS, "save_strategy": "steps", "save_steps": every}


def checkpoint(trainer, step: int) -> str:
    return f"{trainer.args.output_dir}/checkpoint-{step}"


def same_bits(a, b) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def state_of(optimizer: SparseAdamW) -> dict[str, torch.Tensor]:
    state = optimizer.state_dict()["state"]
    return {f"{i}.{name}": value.clone() for i, values in state.items() for name, value in values.items()}


@pytest.mark.parametrize("case", CASES)
def test_stopped_and_resumed_at_any_step_is_the_same_run(lab, weights, curve, case):
    kind, dtype, sparse, changes = CASES[case]
    mask = lab.random_mask(0.1)
    whole = lab(kind, mask=mask, sparse=sparse, model=lab.model(dtype), **saving(), **changes)
    whole.train()
    # Trainer, SFT and DPO: 9 rows are 5 micro-batches, so that steps 3 and 6 end an epoch with one instead of two. GRPO
    # takes 2 prompts a step, and drops the ninth: step 4 ends an epoch.
    for step in (1, 4 if kind == "GRPO" else 3, 7):
        resumed = lab(kind, mask=mask, sparse=sparse, model=lab.model(dtype), max_steps=STEPS, **changes)
        resumed.train(resume_from_checkpoint=checkpoint(whole, step))
        assert same_bits(weights(resumed.model), weights(whole.model)), step
        assert same_bits(state_of(resumed.sparse_optimizer), state_of(whole.sparse_optimizer)), step
        ours, theirs = curve(resumed), curve(whole)
        assert [(r["loss"], r["grad_norm"]) for r in ours] == [(r["loss"], r["grad_norm"]) for r in theirs]
        with resumed.base_weights():
            assert same_bits(weights(resumed.model), weights(lab.model(dtype)))
        # The optimizer's own: a context manager around it could be interrupted where this one can't.
        assert isinstance(resumed.base_weights(), InBaseWeights)


def test_grpo_resumes_only_where_completions_begin(lab, weights):
    mask, reused = lab.random_mask(0.1), {"num_iterations": 2, "max_steps": STEPS}
    whole = lab("GRPO", mask=mask, **saving(), num_iterations=2)
    whole.train()
    resumed = lab("GRPO", mask=mask, **reused)
    with pytest.raises(ConfigError, match="step 3 is between two generations.*a multiple of 4 batches"):
        resumed.train(resume_from_checkpoint=checkpoint(whole, 3))
    for step in (2, 4):
        resumed = lab("GRPO", mask=mask, **reused)
        resumed.train(resume_from_checkpoint=checkpoint(whole, step))
        assert same_bits(weights(resumed.model), weights(whole.model)), step


def test_a_checkpoint_without_its_optimizer_is_refused(lab):
    mask = lab.random_mask(0.1)
    trainer = lab("SFT", mask=mask, max_steps=2, save_strategy="steps", save_steps=1, save_only_model=True)
    trainer.train()
    with pytest.raises(FileNotFoundError, match="checkpoint-1 has no optimizer.pt, which is needed to resume"):
        lab("SFT", mask=mask, max_steps=2).train(resume_from_checkpoint=checkpoint(trainer, 1))


def test_master_weights_follow_the_best_model(lab, weights):
    mask, sparse = lab.random_mask(0.1), SparseArguments(master_weights=True)
    trainer = lab(
        "SFT",
        mask=mask,
        sparse=sparse,
        model=lab.model(torch.bfloat16),
        given={"eval_dataset": lab.rows("SFT")},
        max_steps=4,
        save_strategy="steps",
        save_steps=2,
        eval_strategy="steps",
        eval_steps=2,
        load_best_model_at_end=True,
        metric_for_best_model="eval_loss",
        greater_is_better=True,  # so that the best is not the last
    )
    trainer.train()
    best = load_file(f"{trainer.state.best_model_checkpoint}/model.safetensors")
    assert trainer.state.best_model_checkpoint == checkpoint(trainer, 2)
    optimizer = trainer.sparse_optimizer
    for name, p in trainer.model.named_parameters():
        assert torch.equal(p.cpu(), best[name])
        assert torch.equal(optimizer.state[p]["master"].bfloat16(), p.view(-1)[mask[name].long()])


def test_master_weights_follow_weights_that_were_set_between_runs(lab, weights):
    mask = lab.random_mask(0.1)
    trainer = lab(
        "SFT",
        mask=mask,
        sparse=SparseArguments(master_weights=True),
        model=lab.model(torch.bfloat16),
        max_steps=2,
    )
    trainer.train()
    weight = trainer.model.model.layers[0].self_attn.q_proj.weight
    name = "model.layers.0.self_attn.q_proj.weight"
    slot, position = 0, int(mask[name][0])
    kept = trainer.sparse_optimizer.state[weight]["master"][1:].clone()
    with torch.no_grad():
        weight.view(-1)[position] = 1.5
    trainer.sparse_optimizer.attach()
    masters = trainer.sparse_optimizer.state[weight]["master"]
    assert masters[slot] == 1.5
    assert torch.equal(masters[1:], kept)  # with what they hold beyond the weight


# Delta logs


@pytest.fixture
def logged(lab, tmp_path):
    """`logged(every=2, folder="log", changes...)`: a trainer that keeps a delta log and all its checkpoints."""

    def make(*, every: int = 3, folder: str = "log", **changes):
        sparse = SparseArguments(delta_log_dir=tmp_path / folder, delta_log_steps=f"every:{every},last")
        return lab("DPO", mask=lab.random_mask(0.1), sparse=sparse, **{**saving(), **changes})

    return make


def assert_log_holds(log: DeltaLog, trainer, steps: tuple[int, ...]) -> None:
    assert log.steps == steps
    assert log.verify() == []
    for step in steps[1:]:
        saved = load_file(f"{checkpoint(trainer, step)}/model.safetensors")
        assert same_bits(log.load(step), saved), step


def test_a_delta_log_has_the_weights_of_its_steps(lab, logged, weights, tmp_path):
    trainer = logged()
    trainer.train()
    log = DeltaLog.open(tmp_path / "log")
    assert_log_holds(log, trainer, (0, 3, 6, 8))  # every third, and the last
    assert same_bits(log.load(0), weights(lab.model()))
    assert log.metadata["method"] == "SparseDPOTrainer"
    assert [info.kind for info in log.info()] == ["keyframe", "patch", "patch", "patch"]
    assert all(info.masked for info in log.info()[1:])
    DeltaLog.open(tmp_path / "log").append(9, trainer.model)  # nobody holds it any more


class StopAt(TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step >= self.step


def test_a_run_that_a_callback_stops_has_its_last_weights_in_the_log(lab, logged, weights, tmp_path):
    trainer = logged(given={"callbacks": [StopAt(5)]}, save_strategy="no")
    trainer.train()
    log = DeltaLog.open(tmp_path / "log")
    assert log.steps == (0, 3, 5)
    assert same_bits(log.load(5), weights(trainer.model))


def test_a_run_that_fails_releases_its_log(logged, tmp_path):
    class Fails(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 4:
                raise FloatingPointError("out of luck")

    trainer = logged(given={"callbacks": [Fails()]}, save_strategy="no")
    with pytest.raises(FloatingPointError):
        trainer.train()
    DeltaLog.open(tmp_path / "log").append(9, trainer.model)  # nobody holds it any more


def test_a_resumed_run_may_begin_a_log_at_its_base_weights(lab, logged, weights, tmp_path):
    whole = logged()
    whole.train()
    logged(folder="second", save_strategy="no").train(resume_from_checkpoint=checkpoint(whole, 4))
    log = DeltaLog.open(tmp_path / "second")
    assert_log_holds(log, whole, (0, 6, 8))
    assert same_bits(log.load(0), weights(lab.model()))


def test_a_log_of_other_weights_is_refused(logged, lab, tmp_path):
    whole = logged()
    whole.train()
    with pytest.raises(DeltaLogError, match="holds a delta log already"):
        logged().train()
    with pytest.raises(DeltaLogError, match="log: step 6 differs from the weights of the resumed run at that step"):
        logged(beta=0.5).train(resume_from_checkpoint=checkpoint(whole, 4))
    DeltaLog.create(tmp_path / "foreign", doubled(lab.model())).close()
    with pytest.raises(DeltaLogError, match="foreign: step 0 differs from the weights that this run started from"):
        logged(folder="foreign").train(resume_from_checkpoint=checkpoint(whole, 4))


def doubled(model):
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(2)
    return model


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"delta_log_dir": "log", "delta_log_steps": "every:0"}, "step schedule 'every:0': cannot read 'every:0'"),
        ({"delta_log_steps": "every:5"}, "delta_log_steps has no effect without delta_log_dir"),
        ({"delta_log_dir": "log", "keep_base_weights": False}, "delta_log_dir needs keep_base_weights=True"),
    ],
)
def test_log_options_that_can_not_be(options, message):
    with pytest.raises(ConfigError, match=message):
        SparseArguments(**options)
