"""GRPO's advantages, loss and rollout: by hand, beside TRL, and against the model itself."""

from __future__ import annotations

import math

import pytest
import torch

from sparse_opt.trainers.encoding import TokenSequence, collate
from sparse_opt.trainers.grpo import group_advantages, grpo_loss, right_padded, rollout
from sparse_opt.trainers.logprobs import token_logprobs
from sparse_opt.trainers.models import disable_dropout

FP32_EPS = 2**-23


def test_advantages_by_hand():
    rewards = torch.tensor([1.0, 0.0, 0.0, 1.0, 2.0, 2.0, 2.0, 2.0])
    std = math.sqrt(4 * 0.25 / 3)  # of 1, 0, 0, 1 with n - 1
    expected = [0.5 / (std + 1e-4), -0.5 / (std + 1e-4), -0.5 / (std + 1e-4), 0.5 / (std + 1e-4), 0, 0, 0, 0]
    assert group_advantages(rewards, 4).tolist() == pytest.approx(expected, rel=1e-6)
    assert group_advantages(rewards, 4, scale=False).tolist() == [0.5, -0.5, -0.5, 0.5, 0, 0, 0, 0]


@pytest.mark.parametrize(("n_rewards", "n_generations"), [(4, 1), (5, 2)])
def test_rewards_that_make_no_groups(n_rewards, n_generations):
    with pytest.raises(ValueError, match=rf"n_generations (is )?{n_generations}"):
        group_advantages(torch.zeros(n_rewards), n_generations)


# Two completions of 3 and 1 tokens: ratios 1.5, 1, 0.5 with advantage 2, and 0.5 with advantage -1.
RATIOS = torch.tensor([[1.5, 1.0, 0.5], [0.5, 1.0, 1.0]])
MASK = torch.tensor([[True, True, True], [True, False, False]])
ADVANTAGES = torch.tensor([2.0, -1.0])
# min(1.5 * 2, 1.2 * 2), 1 * 2, min(0.5 * 2, 0.8 * 2); min(0.5 * -1, 0.8 * -1)
PER_TOKEN = [[-2.4, -2.0, -1.0], [0.8]]


@pytest.mark.parametrize(
    ("loss_type", "expected"),
    [
        ("grpo", (sum(PER_TOKEN[0]) / 3 + PER_TOKEN[1][0]) / 2),
        ("bnpo", (sum(PER_TOKEN[0]) + PER_TOKEN[1][0]) / 4),
        ("dapo", (sum(PER_TOKEN[0]) + PER_TOKEN[1][0]) / 10),
        ("dr_grpo", (sum(PER_TOKEN[0]) + PER_TOKEN[1][0]) / (2 * 8)),
    ],
)
def test_loss_by_hand(loss_type, expected):
    logprobs = RATIOS.log().requires_grad_()
    loss, ratios, k3 = grpo_loss(
        logprobs,
        torch.zeros(2, 3),
        ADVANTAGES,
        MASK,
        loss_type=loss_type,
        n_tokens=10 if loss_type == "dapo" else None,
        max_completion_length=8,
    )
    assert loss.item() == pytest.approx(expected, rel=1e-6)
    assert k3 is None
    torch.testing.assert_close(ratios, torch.where(MASK, RATIOS, 1.0))
    loss.backward()
    # Where the clipped term is the smaller, and outside the mask, no gradient flows; else -ratio * A, by its weight.
    weight = {"grpo": 1 / 6, "bnpo": 1 / 4, "dapo": 1 / 10, "dr_grpo": 1 / 16}[loss_type]
    torch.testing.assert_close(logprobs.grad, weight * torch.tensor([[0.0, -2.0, -1.0], [0.0, 0.0, 0.0]]))


def test_clip_higher_and_the_divergence_by_hand():
    ref = torch.tensor([[0.3, -0.2, 0.0], [0.1, 50.0, 50.0]])  # what stands outside the mask must not matter
    loss, _, k3 = grpo_loss(
        RATIOS.log(), torch.zeros(2, 3), ADVANTAGES, MASK, ref_logprobs=ref, beta=0.5, epsilon_high=0.28
    )
    expected = []
    for row in range(2):
        for column in range(3 if row == 0 else 1):
            d = ref[row, column].item() - math.log(RATIOS[row, column].item())
            expected.append(math.exp(d) - d - 1)
    assert torch.masked_select(k3, MASK).tolist() == pytest.approx(expected, rel=1e-5)
    assert k3[1, 1:].tolist() == [0, 0]
    policy = -2.56 - 2.0 - 1.0 + 0.8
    assert loss.item() == pytest.approx((policy + 0.5 * sum(expected)) / 4, rel=1e-6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"loss_type": "ppo"}, "loss_type is 'ppo', wanted grpo, bnpo, dapo or dr_grpo"),
        ({"loss_type": "dr_grpo"}, "wants max_completion_length"),
        ({"beta": 0.1}, "beta is 0.1, which wants ref_logprobs"),
        ({"advantages": torch.zeros(3)}, r"have shapes \[\[2, 3\], \[2, 3\], \[2, 3\], \[3\]\]"),
    ],
)
def test_wrong_arguments(changes, message):
    arguments = {"advantages": ADVANTAGES} | changes
    with pytest.raises(ValueError, match=message):
        grpo_loss(torch.zeros(2, 3), torch.zeros(2, 3), mask=MASK, **arguments)


@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dapo", "dr_grpo"])
@pytest.mark.parametrize("correct_k3", [False, True])
def test_agrees_with_trl(tmp_path, model, tokenizer, loss_type, correct_k3):
    trl = pytest.importorskip("trl", reason="needs trl")
    from datasets import Dataset

    disable_dropout(model)
    trainer = trl.GRPOTrainer(
        model,
        reward_funcs=lambda completions, **_: [float(len(text)) for text in completions],
        args=trl.GRPOConfig(
            output_dir=str(tmp_path / "trl"),
            num_generations=2,
            per_device_train_batch_size=4,
            max_completion_length=9,
            loss_type=loss_type,
            use_bias_correction_kl=correct_k3,
            epsilon_high=0.28,
            use_cpu=True,
            bf16=False,
            report_to=[],
        ),
        processing_class=tokenizer,
        train_dataset=Dataset.from_list([{"prompt": "What is 1 plus 1?"}]),
    )
    trainer.beta = 0.05
    trainer.current_gradient_accumulation_steps = 1

    torch.manual_seed(0)
    prompt_ids, completion_ids = torch.randint(6, 300, (4, 3)), torch.randint(6, 300, (4, 9))
    lengths = torch.tensor([9, 4, 7, 1])
    mask = torch.arange(9) < lengths[:, None]
    sequences = [
        TokenSequence([*prompt.tolist(), *completion.tolist()[:length]], 3)
        for prompt, completion, length in zip(prompt_ids, completion_ids, lengths, strict=True)
    ]
    logprobs = token_logprobs(model, collate(sequences, pad_id=0))
    old = logprobs.detach() + 0.3 * torch.randn(4, 9)  # some ratios leave the clip range on either side
    ref = logprobs.detach() + 0.3 * torch.randn(4, 9)
    advantages = torch.tensor([1.0, -1.0, 0.5, -0.5])
    ours, ratios, _ = grpo_loss(
        logprobs,
        old,
        advantages,
        mask,
        ref_logprobs=ref,
        beta=0.05,
        correct_k3=correct_k3,
        epsilon_high=0.28,
        loss_type=loss_type,
        max_completion_length=9,
    )
    assert (ratios[mask] < 0.8).any() and (ratios[mask] > 1.28).any()
    inputs = {
        "prompt_ids": prompt_ids,
        "prompt_mask": torch.ones_like(prompt_ids),
        "completion_ids": completion_ids,
        "completion_mask": mask.long(),
        "advantages": advantages,
        "old_per_token_logps": old,
        "ref_per_token_logps": ref,
        "num_items_in_batch": lengths.sum(),
    }
    theirs = trainer._compute_loss(trainer.model, inputs)
    # Per-token losses of about 1, from log-probabilities of up to 8, each from 320 logits reduced in another order.
    tolerance = 8 * 8 * FP32_EPS
    assert ours.item() == pytest.approx(theirs.item(), abs=tolerance)
    our_grads = torch.autograd.grad(ours, list(model.parameters()))
    their_grads = torch.autograd.grad(theirs, list(model.parameters()))
    for a, b in zip(our_grads, their_grads, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=200 * FP32_EPS * b.abs().max().item())


def test_padding_moves_to_the_right():
    pad, eos = 0, 1
    generated = torch.tensor(
        [
            [5, 6, 7, 20, eos, pad, pad],  # ends with its EOS
            [pad, pad, 8, 30, 31, 32, 33],  # never ends
            [pad, 9, 1, eos, eos, 40, 41],  # ends at once; its prompt holds an EOS too
        ]
    )
    batch = right_padded(generated, [3, 1, 2], pad_id=pad, eos_id=eos)
    assert batch.input_ids.tolist() == [[5, 6, 7, 20, eos], [8, 30, 31, 32, 33], [9, 1, eos, pad, pad]]
    assert batch.attention_mask.tolist() == [[1, 1, 1, 1, 1], [1, 1, 1, 1, 1], [1, 1, 1, 0, 0]]
    assert batch.completion_mask.int().tolist() == [[0, 0, 0, 1, 1], [0, 1, 1, 1, 1], [0, 0, 1, 0, 0]]
    assert (batch.first_trained, batch.n_tokens, batch.n_trained) == (1, 13, 7)


def test_rollout_keeps_prompts_and_its_log_probabilities_are_the_policys(model, tokenizer):
    prompts = [[5, 9, 11], [7], [12, 13, 14, 15, 16]]
    disable_dropout(model)
    model.train()
    torch.manual_seed(0)
    found = rollout(
        model, prompts, n_generations=4, max_new_tokens=6, pad_id=tokenizer.pad_token_id, eos_id=tokenizer.eos_token_id
    )
    assert model.training
    ids, mask = found.batch.input_ids, found.batch.completion_mask
    assert ids.shape[0] == 12
    for row in range(12):
        prompt = prompts[row // 4]
        assert ids[row, : len(prompt)].tolist() == prompt
        assert not mask[row, : len(prompt)].any()
        n_sampled = int(mask[row].sum())
        assert 1 <= n_sampled <= 6
        with torch.no_grad():
            table = model(ids[row : row + 1, : len(prompt) + n_sampled]).logits[0].log_softmax(-1)
        for offset in range(n_sampled):
            position = len(prompt) + offset
            expected = table[position - 1, ids[row, position]].item()
            found_logprob = found.logprobs[row, position - found.batch.first_trained].item()
            assert found_logprob == pytest.approx(expected, abs=8 * 8 * FP32_EPS)
    assert len({tuple(row) for row in ids.tolist()}) > 6  # sampled, not greedy


def test_rollout_of_a_fixed_length_and_with_a_seed(model):
    def once(seed):
        torch.manual_seed(seed)
        return rollout(
            model, [[5, 9], [7]], n_generations=2, min_new_tokens=5, max_new_tokens=5, pad_id=0, eos_id=2
        ).batch

    assert once(1).completion_mask.sum(dim=1).tolist() == [5] * 4
    assert torch.equal(once(1).input_ids, once(1).input_ids)
    assert not torch.equal(once(1).input_ids, once(2).input_ids)


def test_an_empty_prompt_is_refused(model):
    with pytest.raises(ValueError, match=r"lengths \[2, 0\]"):
        rollout(model, [[1, 2], []], n_generations=2, max_new_tokens=2, pad_id=0, eos_id=1)
