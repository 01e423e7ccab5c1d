"""The same losses, gradient norms and weights as theirs with `torch.optim.AdamW`, step for step."""

import pytest
import torch
from transformers import TrainerCallback

from sparse_opt import MaskSet, SparseAdamW
from sparse_opt.integrations import SparseArguments

EPS = 2**-23
STEPS = 30
# Losses of order one. A step rounds each weight otherwise than theirs once, and a loss sums some 100 products of them:
# sqrt(100) roundings a step, if they are independent.
LOSS_TOLERANCE = STEPS * 10 * EPS
# Squares of some 26,000 gradients, summed in another order: sqrt(26,000) roundings, and the weights' own error.
NORM_TOLERANCE = 160 * EPS + LOSS_TOLERANCE

CASES = {
    "Trainer": ("Trainer", {}),
    "SFT": ("SFT", {}),
    "DPO": ("DPO", {}),
    "GRPO with a reference": ("GRPO", {"beta": 0.3}),
}


def assert_same_curve(ours, theirs):
    assert len(ours) == len(theirs) == STEPS
    assert max(row["grad_norm"] for row in theirs) > 0.5  # some steps are clipped
    assert len({row["learning_rate"] for row in theirs}) > 20
    assert theirs[-1].get("kl", 1.0) > 100 * LOSS_TOLERANCE  # the policy has left the reference
    for a, b in zip(ours, theirs, strict=True):
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=NORM_TOLERANCE)
        assert a["learning_rate"] == b["learning_rate"]
        for name in {"loss", "entropy", "kl"} & b.keys():
            assert a[name] == pytest.approx(b[name], abs=LOSS_TOLERANCE), name


class SharedCompletions:
    """Ours trains on the completions of theirs.

    A token is the argmax of noise over probabilities. Once in some ten thousand tokens rounding decides it, and after
    that the two are different runs.
    """

    def __init__(self) -> None:
        self.made: list[object] = []
        self.agreed: list[bool] = []

    def record(self, trainer):
        """`trainer`, which keeps what it generates."""
        generate = trainer._generate_single_turn

        def recorded(*args, **kwargs):
            self.made.append(generate(*args, **kwargs))
            return self.made[-1]

        trainer._generate_single_turn = recorded
        return trainer

    def replay(self, trainer):
        """`trainer`, which generates the same again, and then goes on with what was kept."""
        generate = trainer._generate_single_turn

        def replayed(*args, **kwargs):
            kept = self.made[len(self.agreed)]
            self.agreed.append(generate(*args, **kwargs) == kept)
            return kept

        trainer._generate_single_turn = replayed
        return trainer


def run_all(make_theirs, makers_of_ours, is_grpo: bool):
    """Their trainer and ours, trained. One is done before the next is made: making one seeds the random numbers."""
    shared = SharedCompletions() if is_grpo else None
    theirs = shared.record(make_theirs()) if is_grpo else make_theirs()
    theirs.train()
    trained = []
    for make_ours in makers_of_ours:
        ours = shared.replay(make_ours()) if is_grpo else make_ours()
        ours.train()
        trained.append(ours)
        if is_grpo:
            assert len(shared.agreed) == len(shared.made) == STEPS
            assert sum(shared.agreed) > 0.9 * STEPS
            shared.agreed = []
    return theirs, trained


def assert_same_weights(ours, theirs, start):
    moved = 0.0
    for name, p in ours.named_parameters():
        # Adam's step is up to the learning rate, 3e-3, whatever the gradient: rounding moves weights whose gradient
        # is rounding itself by more than it moves losses.
        torch.testing.assert_close(p, theirs.get_parameter(name), rtol=0, atol=1e-4, msg=name)
        moved = max(moved, (p - start.get_parameter(name)).abs().max().item())
    assert moved > 1e-2


class OnlyActive(TrainerCallback):
    """Puts back what weight decay did to inactive weights: decay touches active elements only in ours."""

    def __init__(self, mask: MaskSet) -> None:
        self.mask = mask

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        self.start = {name: p.detach().clone() for name, p in model.named_parameters()}
        for name, p in model.named_parameters():
            active = torch.zeros_like(p, dtype=torch.bool)
            if name in self.mask.indices:
                active.view(-1)[self.mask.indices[name].long()] = True
            self.start[name] = (active, self.start[name])
            p.register_hook(lambda grad, active=active: grad * active)

    def on_optimizer_step(self, args, state, control, model=None, **kwargs):
        with torch.no_grad():
            for name, p in model.named_parameters():
                active, start = self.start[name]
                p.copy_(torch.where(active, p, start))


@pytest.mark.parametrize("case", CASES)
def test_a_tenth_active_equals_theirs_with_masked_gradients(lab, curve, case):
    """With compact gradients, and with dense ones, for which no trainer has code of its own."""
    kind, changes = CASES[case]
    # Without the embedding: a parameter that is frozen in ours and has a gradient of zeros in theirs.
    mask = lab.random_mask(0.1, without=("embed_tokens",))
    makers = [
        lambda grads=grads: lab(kind, mask=mask, sparse=SparseArguments(grads=grads), **changes)
        for grads in (("compact", "dense") if kind == "DPO" else ("compact",))
    ]
    theirs, trained = run_all(
        lambda: lab(kind, given={"callbacks": [OnlyActive(mask)]}, **changes), makers, kind == "GRPO"
    )
    start = lab.model()
    for ours in trained:
        assert_same_curve(curve(ours), curve(theirs))
        assert_same_weights(ours.model, theirs.model, start)
        for name, p in ours.model.named_parameters():
            changed = (p != start.get_parameter(name)).view(-1).nonzero().view(-1)
            assert set(changed.tolist()) <= set(mask.indices[name].tolist() if name in mask.indices else [])


def test_dpo_by_base_weights_equals_a_separate_reference_model(lab, curve, weights):
    mask, sparse, dtype = lab.random_mask(0.1), SparseArguments(master_weights=True), torch.bfloat16
    runs = []
    # TRL takes only modules' dropout away: what attention drops must not reach the reference.
    for reference in (None, lab.model(dtype, attention_dropout=0.1)):
        trainer = lab(
            "DPO",
            mask=mask,
            sparse=sparse,
            model=lab.model(dtype, attention_dropout=0.1),
            given={"ref_model": reference, "eval_dataset": lab.rows("DPO")},
        )
        before = trainer.evaluate()
        trainer.train()
        after = trainer.evaluate()
        runs.append((curve(trainer), weights(trainer.model), before["eval_loss"], after["eval_loss"]))
        assert (reference is None) == (sum(p.numel() for p in trainer.ref_model.parameters()) == 0)
    (by_base, p, *evaluated), (by_model, q, *evaluated_too) = runs
    assert [row["loss"] for row in by_base] == [row["loss"] for row in by_model]
    assert all(torch.equal(p[name], q[name]) for name in p)
    assert evaluated == evaluated_too
    assert evaluated[0] == pytest.approx(0.6931, abs=5e-3)  # the policy is W0
    assert evaluated[1] < evaluated[0] - 0.05


def test_precomputed_references_are_those_of_the_base_weights(lab, curve):
    mask, rows = lab.random_mask(0.1), lab.rows("DPO")
    losses = {}
    for precompute in (False, True):
        trainer = lab("DPO", mask=mask, max_steps=6, precompute_ref_log_probs=precompute)
        trainer.train()
        # Rows that are added after construction: the reference computes them after training.
        losses[precompute] = [*(row["loss"] for row in curve(trainer)), trainer.evaluate(rows)["eval_loss"]]
    assert losses[True] == pytest.approx(losses[False], abs=LOSS_TOLERANCE)


def test_parameter_groups_are_the_trainers(lab):
    theirs, ours = lab("Trainer"), lab("Trainer", mask=lab.random_mask(1.0))
    names = {p: name for name, p in theirs.model.named_parameters()}
    expected = [
        (group["weight_decay"], group["lr"], [names[p] for p in group["params"]])
        for group in theirs.create_optimizer().param_groups
    ]
    groups = ours.create_optimizer().param_groups
    assert [(group["weight_decay"], group["lr"], group["param_names"]) for group in groups] == expected
    assert all(names for *_, names in expected)


def test_a_reentrant_checkpoint_behind_a_frozen_embedding_has_gradients(lab, weights):
    mask = lab.random_mask(0.1, without=("embed_tokens",))
    ends = []
    for reentrant in (False, True):
        trainer = lab(
            "SFT",
            mask=mask,
            max_steps=3,
            gradient_checkpointing=True,
            gradient_checkpointing_kwargs={"use_reentrant": reentrant},
        )
        trainer.train()
        ends.append(weights(trainer.model))
    start = lab.model()
    name = "model.layers.0.self_attn.q_proj.weight"
    assert not torch.equal(ends[0][name], start.get_parameter(name).cpu())
    assert all(torch.equal(p, ends[1][n]) for n, p in ends[0].items())


class Stumbles(TrainerCallback):
    """Fails after the first micro-batch of the first run; `gradients` are those at the first step of the second."""

    gradients = None

    def on_substep_end(self, args, state, control, **kwargs):
        if self.gradients is None:
            raise FloatingPointError("out of luck")

    def on_step_begin(self, args, state, control, model=None, optimizer=None, **kwargs):
        if state.global_step == 0 and hasattr(self, "trainer"):
            self.gradients = [self.trainer.sparse_optimizer.compact_grad(p) for p in model.parameters()]


def test_gradients_of_a_loop_that_was_left_are_not_added_to(lab):
    stumbles = Stumbles()
    trainer = lab("SFT", mask=lab.random_mask(0.1), max_steps=1, given={"callbacks": [stumbles]})
    with pytest.raises(FloatingPointError):
        trainer.train()
    stumbles.trainer = trainer
    assert any(trainer.sparse_optimizer.compact_grad(p) is not None for p in trainer.model.parameters())
    trainer.train()
    assert stumbles.gradients and all(gradient is None for gradient in stumbles.gradients)


def test_the_buffers_are_those_of_the_optimizer_alone(lab, monkeypatch):
    """Accelerate takes an optimizer's state out and loads it again, which holds parts of it twice for a while."""
    mask, model = lab.random_mask(0.1), lab.model()
    trainer = lab("SFT", mask=mask, max_steps=1)
    monkeypatch.setattr(SparseAdamW, "load_state_dict", lambda *_: pytest.fail("a state was loaded"))
    trainer.train()
    assert all(p.grad is None for p in trainer.model.parameters())
    assert trainer.sparse_optimizer.nbytes() == SparseAdamW(model.named_parameters(), mask).nbytes()
