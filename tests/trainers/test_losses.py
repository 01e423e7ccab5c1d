"""The losses of DPO as the papers print them, and all of a step as in TRL's DPOTrainer."""

import copy
import math
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from sparse_opt.trainers.batches import TokenSequence, collate, load_examples
from sparse_opt.trainers.dpo import dpo_loss
from sparse_opt.trainers.grpo import group_advantages, grpo_loss, grpo_step
from sparse_opt.trainers.logprobs import completion_logprobs, token_logprobs
from sparse_opt.trainers.models import disable_dropout
from sparse_opt.trainers.modes import Trained
from sparse_opt.trainers.sampling import Rollout

LOGPROBS = torch.randn(4, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 10 - 40


def papers_loss(loss_type, h, beta, e=0.0):
    """The formulas as the papers print them, in fp64."""
    right, wrong = np.log1p(np.exp(-beta * h)), np.log1p(np.exp(beta * h))
    if loss_type == "sigmoid":
        return (1 - e) * right + e * wrong
    if loss_type == "robust":
        return ((1 - e) * right - e * wrong) / (1 - 2 * e)
    if loss_type == "hinge":
        return np.maximum(0.0, 1 - beta * h)
    return (h - 1 / (2 * beta)) ** 2


CASES = [("sigmoid", 0.0), ("sigmoid", 0.1), ("sigmoid", 0.4), ("robust", 0.0), ("robust", 0.4), ("hinge", 0.0),
         ("ipo", 0.0)]  # fmt: skip


@pytest.mark.parametrize("beta", [0.01, 0.1, 1.0])
@pytest.mark.parametrize(("loss_type", "e"), CASES)
def test_losses_and_gradients_are_the_papers(loss_type, e, beta):
    policy_chosen, policy_rejected = LOGPROBS[0].clone().requires_grad_(), LOGPROBS[1].clone().requires_grad_()
    losses, *rewards = dpo_loss(policy_chosen, policy_rejected, LOGPROBS[2], LOGPROBS[3], beta, loss_type, e)
    losses.sum().backward()
    for reward, policy, reference in zip(rewards, LOGPROBS[:2], LOGPROBS[2:], strict=True):
        torch.testing.assert_close(reward, beta * (policy - reference), rtol=1e-12, atol=0)
    h = (LOGPROBS[0] - LOGPROBS[2] - LOGPROBS[1] + LOGPROBS[3]).numpy()
    np.testing.assert_allclose(losses.detach().numpy(), papers_loss(loss_type, h, beta, e), rtol=1e-12, atol=1e-12)
    step = 1e-5
    slope = (papers_loss(loss_type, h + step, beta, e) - papers_loss(loss_type, h - step, beta, e)) / (2 * step)
    # A central difference errs by step^2 times a third derivative of 1 at most, and by the losses' rounding over step.
    rounding = 4 * 2**-53 * losses.detach().abs().max().item() / step
    np.testing.assert_allclose(policy_chosen.grad.numpy(), slope, rtol=0, atol=1e-10 + rounding)
    np.testing.assert_allclose(policy_rejected.grad.numpy(), -slope, rtol=0, atol=1e-10 + rounding)


@pytest.mark.parametrize(("loss_type", "e"), CASES)
def test_finite_far_from_the_reference(loss_type, e):
    far = torch.tensor([1e4, -1e4])
    losses, *_ = dpo_loss(far, -far, -far, far, 0.1, loss_type, e)
    assert torch.isfinite(losses).all()


FP32_EPS = 2**-23
# Sums of at most 25 log-probabilities of up to 8 in fp32, each from a log-softmax over 320 logits that the two sides
# chunk and reduce in different orders: a few roundings each.
LOGPROB_TOLERANCE = 25 * 8 * 4 * FP32_EPS
BETA = 0.3


@pytest.fixture(params=["text", "chat"])
def setting(request, tmp_path, model, tokenizer, chat_tokenizer, pairs):
    """(TRL's trainer with a reference unlike the policy, our examples) for text or for messages."""
    trl = pytest.importorskip("trl", reason="needs trl")
    from datasets import Dataset

    tokenizer, max_length = (chat_tokenizer, 20) if request.param == "chat" else (tokenizer, 14)
    if request.param == "chat":
        roles = {"prompt": "user", "chosen": "assistant", "rejected": "assistant"}
        pairs = [{key: [{"role": roles[key], "content": row[key]}] for key in row} for row in pairs]
    rows = Dataset.from_list(pairs)
    rows.to_parquet(tmp_path / "rows.parquet")
    reference = copy.deepcopy(model)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.02)
    trainer = trl.DPOTrainer(
        model,
        reference,
        args=trl.DPOConfig(
            output_dir=str(tmp_path / "trl"), beta=BETA, max_length=max_length, use_cpu=True, bf16=False, report_to=[]
        ),
        processing_class=tokenizer,
        train_dataset=rows,
    )  # fmt: skip
    examples = load_examples("preference", str(tmp_path / "rows.parquet"), "train", tokenizer, max_length=max_length)
    lengths = [len(sequence.ids) for example in examples for sequence in example]
    assert min(lengths) < max_length == max(lengths)  # some are cut, and some padded
    return trainer, examples


def ours(batch_rows, pad_id):
    return collate([sequence for column in zip(*batch_rows, strict=True) for sequence in column], pad_id)


def test_agrees_with_trl(setting):
    trainer, examples = setting
    assert len(trainer.train_dataset) == len(examples)
    theirs = trainer.data_collator([trainer.train_dataset[i] for i in range(6)])
    batch = ours(examples[:6], trainer.processing_class.pad_token_id)
    assert torch.equal(batch.input_ids, theirs["input_ids"])
    assert torch.equal(batch.attention_mask, theirs["attention_mask"])
    assert torch.equal(batch.completion_mask.long(), theirs["completion_mask"])

    policy = trainer.model.eval()
    with torch.no_grad():
        ref_logprobs = completion_logprobs(trainer.ref_model, batch)
        their_ref_logprobs = torch.cat(trainer.compute_ref_log_probs(trainer.ref_model, theirs))
    torch.testing.assert_close(ref_logprobs, their_ref_logprobs, rtol=0, atol=LOGPROB_TOLERANCE)

    their_loss = trainer.compute_loss(policy, theirs)
    their_loss.backward()
    their_grads = {name: parameter.grad.clone() for name, parameter in policy.named_parameters()}
    policy.zero_grad()
    losses, *_ = dpo_loss(*completion_logprobs(policy, batch).chunk(2), *ref_logprobs.chunk(2), BETA)
    losses.mean().backward()
    assert abs(their_loss.item() - 0.6931) > 0.01  # the reference is unlike the policy, or the check would be empty
    # The loss moves by beta * (four log-probabilities' errors) at most.
    assert losses.mean().item() == pytest.approx(their_loss.item(), abs=4 * BETA * LOGPROB_TOLERANCE)
    for name, parameter in policy.named_parameters():
        # Gradients are sums over some 200 tokens of products that the two sides accumulate in different orders.
        scale = their_grads[name].abs().max().item()
        torch.testing.assert_close(parameter.grad, their_grads[name], rtol=0, atol=200 * FP32_EPS * scale, msg=name)


NAN = math.nan
LOSS_TYPES = ("grpo", "bnpo", "dapo", "dr_grpo", "gspo")


# Advantages


def test_advantages_by_hand():
    rewards = torch.tensor([1.0, 0.0, 0.0, 1.0, 2.0, 2.0, 2.0, 2.0])
    std = math.sqrt(4 * 0.25 / 3)  # of 1, 0, 0, 1 with n - 1
    expected = [0.5 / (std + 1e-4), -0.5 / (std + 1e-4), -0.5 / (std + 1e-4), 0.5 / (std + 1e-4), 0, 0, 0, 0]
    assert group_advantages(rewards, 4).tolist() == pytest.approx(expected, rel=1e-6)
    assert group_advantages(rewards, 4, scale="none").tolist() == [0.5, -0.5, -0.5, 0.5, 0, 0, 0, 0]
    std = np.std([1, 0, 0, 1, 2, 2, 2, 2], ddof=1) + 1e-4
    expected = [0.5 / std, -0.5 / std, -0.5 / std, 0.5 / std, 0, 0, 0, 0]
    assert group_advantages(rewards, 4, scale="batch").tolist() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_a_group_without_spread_has_no_advantage_at_all(scale):
    # In fp32 the mean of three times 0.9 is not 0.9.
    advantages = group_advantages(torch.tensor([0.9, 0.9, 0.9, 0.0, 1.0, 2.0]), 3, scale=scale)
    assert advantages[:3].tolist() == [0, 0, 0] and advantages[3] < 0 < advantages[5]


def test_completions_without_a_reward_have_no_part():
    rewards = torch.tensor([1.0, NAN, 3.0, 2.0, NAN, 5.0, NAN, NAN, NAN])
    advantages = group_advantages(rewards, 3)
    assert advantages.tolist()[:2] == pytest.approx([-1 / (math.sqrt(2) + 1e-4), 0], rel=1e-6)
    spread = 1.5 / (math.sqrt(4.5) + 1e-4)  # of 2 and 5
    assert advantages.tolist()[3:] == pytest.approx([-spread, 0, spread, 0, 0, 0], rel=1e-6)


@pytest.mark.parametrize(("n_rewards", "n_generations"), [(4, 1), (5, 2)])
def test_rewards_that_make_no_groups(n_rewards, n_generations):
    with pytest.raises(ValueError, match=rf"n_generations (is )?{n_generations}"):
        group_advantages(torch.zeros(n_rewards), n_generations)


# Calls that are wrong

MASK = torch.tensor([[True, True, True], [True, False, False]])
ADVANTAGES = torch.tensor([2.0, -1.0])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"loss_type": "ppo"}, "loss_type is 'ppo', expected grpo, bnpo, dapo, dr_grpo or gspo"),
        ({"loss_type": "dr_grpo"}, "needs max_completion_length"),
        ({"beta": 0.1}, "beta is 0.1, which needs ref_logprobs"),
        ({"advantages": torch.zeros(3)}, r"have shapes \[\[2, 3\], \[2, 3\], \[2, 3\], \[3\]\]"),
    ],
)
def test_wrong_arguments(changes, message):
    arguments = {"advantages": ADVANTAGES} | changes
    with pytest.raises(ValueError, match=message):
        grpo_loss(torch.zeros(2, 3), torch.zeros(2, 3), mask=MASK, **arguments)


# Optimizer steps on a rollout, compared with TRL


PROMPT_LENGTHS = [3, 1, 4, 2, 2, 3, 1, 3]
COMPLETION_LENGTHS = [9, 4, 7, 1, 5, 9, 2, 3]
STEP_ADVANTAGES = torch.tensor([1.0, -1.0, 0.5, -0.5, -1.2, 0.7, 1.5, -1.0])


@pytest.fixture(scope="module")
def trl_trainer(tmp_path_factory, model_folder, tokenizer):
    trl = pytest.importorskip("trl", reason="needs trl")
    from datasets import Dataset

    model = AutoModelForCausalLM.from_pretrained(model_folder)
    disable_dropout(model)
    trainer = trl.GRPOTrainer(
        model,
        reward_funcs=lambda completions, **_: [float(len(text)) for text in completions],
        args=trl.GRPOConfig(
            output_dir=str(tmp_path_factory.mktemp("trl")),
            num_generations=4,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            max_completion_length=9,
            epsilon_high=0.28,
            use_cpu=True,
            bf16=False,
            report_to=[],
        ),
        processing_class=tokenizer,
        train_dataset=Dataset.from_list([{"prompt": "What is 1 plus 1?"}]),
    )
    trainer.current_gradient_accumulation_steps = 2
    trainer.model.train()
    return trainer


def make_rollout(model):
    """A rollout whose ratios leave the clip range on either side, token by token and as sequences."""
    torch.manual_seed(0)
    sequences = [
        TokenSequence(torch.randint(6, 300, (prompt + completion,)).tolist(), prompt)
        for prompt, completion in zip(PROMPT_LENGTHS, COMPLETION_LENGTHS, strict=True)
    ]
    batch = collate(sequences, pad_id=0)
    with torch.no_grad():
        logprobs = token_logprobs(model, batch)
    mask = batch.completion_mask[:, batch.first_trained :]
    shift = torch.tensor([-0.5, 0.5, 0.5, -0.5, 0.0, 0.4, -0.4, 0.0])[:, None]
    old = torch.where(mask, logprobs + shift + 0.2 * torch.randn_like(logprobs), 0.0)
    ref = torch.where(mask, logprobs + 0.3 * torch.randn_like(logprobs), 0.0)
    return Rollout(batch, old, sequences), ref


def trl_inputs(sampled, ref, rows):
    """The rows as TRL has them: prompts padded on the left, completions on the right, in columns of their own."""
    n, width = len(sampled.sequences[rows]), max(PROMPT_LENGTHS)
    shapes = {"prompt_ids": width, "prompt_mask": width, "completion_ids": 9, "completion_mask": 9}
    inputs = {name: torch.zeros(n, columns, dtype=torch.int64) for name, columns in shapes.items()}
    inputs |= {name: torch.zeros(n, 9) for name in ("old_per_token_logps", "ref_per_token_logps")}
    for i, row in enumerate(range(len(sampled))[rows]):
        ids, start = torch.tensor(sampled.sequences[row].ids), sampled.sequences[row].prompt_length
        length, first = len(ids) - start, start - sampled.batch.first_trained
        inputs["prompt_ids"][i, width - start :] = ids[:start]
        inputs["prompt_mask"][i, width - start :] = 1
        inputs["completion_ids"][i, :length] = ids[start:]
        inputs["completion_mask"][i, :length] = 1
        inputs["old_per_token_logps"][i, :length] = sampled.logprobs[row, first : first + length]
        inputs["ref_per_token_logps"][i, :length] = ref[row, first : first + length]
    n_tokens = torch.tensor(sum(COMPLETION_LENGTHS))
    return inputs | {"advantages": STEP_ADVANTAGES[rows], "num_items_in_batch": n_tokens}


@pytest.mark.parametrize("beta", [0.0, 0.05])
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_an_optimizer_step_agrees_with_trl(trl_trainer, loss_type, beta):
    trainer = trl_trainer
    trainer.beta = beta
    trainer.args.use_bias_correction_kl = False  # TRL's factor of k3, which the paper does not have
    trainer.loss_type = "grpo" if loss_type == "gspo" else loss_type
    trainer.importance_sampling_level = "sequence" if loss_type == "gspo" else "token"
    model = trainer.model
    model.zero_grad()
    sampled, ref = make_rollout(model)
    grads: dict[str, torch.Tensor] = {}

    def clip(max_norm):
        grads.update({name: parameter.grad.clone() for name, parameter in model.named_parameters()})
        return torch.zeros(())

    found = grpo_step(
        Trained(model, model, nullcontext, clip, torch.optim.SGD(model.parameters(), lr=0.0)),
        sampled,
        STEP_ADVANTAGES,
        ref if beta else None,
        rows_per_pass=4,
        loss_type=loss_type,
        beta=beta,
        epsilon_high=0.28,
        max_completion_length=9,
    )
    losses = [trainer._compute_loss(model, trl_inputs(sampled, ref, rows)) for rows in (slice(0, 4), slice(4, 8))]
    their_loss = sum(losses)
    their_loss.backward()
    # Per-token losses of about 1, from log-probabilities of up to 8, each from 320 logits reduced in another order.
    assert found["loss"].item() == pytest.approx(their_loss.item(), abs=8 * 8 * FP32_EPS)
    assert found["ratio_error"] > 0.28 and ("k3" in found) == (beta > 0)
    for name, parameter in model.named_parameters():
        scale = parameter.grad.abs().max().item()
        torch.testing.assert_close(grads[name], parameter.grad, rtol=0, atol=200 * FP32_EPS * scale, msg=name)
