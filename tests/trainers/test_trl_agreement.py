"""The same rows, tokens, log-probabilities, losses and gradients as TRL's DPOTrainer."""

from __future__ import annotations

import copy

import pytest
import torch

from sparse_opt.trainers.batches import collate, load_examples
from sparse_opt.trainers.dpo import dpo_loss
from sparse_opt.trainers.logprobs import completion_logprobs

trl = pytest.importorskip("trl")

FP32_EPS = 2**-23
# Sums of at most 25 log-probabilities of up to 8 in fp32, each from a log-softmax over 320 logits that the two sides
# chunk and reduce in different orders: a few roundings each.
LOGPROB_TOLERANCE = 25 * 8 * 4 * FP32_EPS
BETA = 0.3


@pytest.fixture(params=["text", "chat"])
def setting(request, tmp_path, model, tokenizer, chat_tokenizer, pairs):
    """(TRL's trainer with a reference unlike the policy, our examples) for text or for messages."""
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
