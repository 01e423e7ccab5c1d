"""Rows that hold a prompt once and both completions of a pair: what is in them, and that they train like two rows."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from small_models import assert_same_gradients, grads_of, small, with_lora
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import GPT2Config, LlamaConfig, MistralConfig, Qwen2Config

from sparse_opt.errors import ConfigError
from sparse_opt.trainers import shared_prompts
from sparse_opt.trainers.batches import TokenSequence, collate, collate_examples
from sparse_opt.trainers.dpo import dpo_loss
from sparse_opt.trainers.logprobs import completion_logprobs, fused, token_logprobs
from sparse_opt.trainers.models import attends_without_masks, compile_layers, make_masks_skippable
from sparse_opt.trainers.sampling import Rollout
from sparse_opt.trainers.shared_prompts import (
    BranchRow,
    Pieces,
    SeparateRows,
    check_shared_prompts,
    collate_shared_prompts,
    lay_out,
    n_row_tokens,
    n_shared_tokens,
    supports,
)

EPS = 2**-23
PAD = 0
MODELS = {"llama": LlamaConfig, "qwen2": Qwen2Config}


def tokens(n, seed):
    return torch.randint(3, 211, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


def pair(prompt, chosen, rejected):
    return [TokenSequence(prompt + completion, len(prompt)) for completion in (chosen, rejected)]


PROMPT = tokens(9, 0)
# name -> (pair, tokens that its row computes once)
PAIRS = {
    "rejected shorter": (pair(PROMPT, tokens(8, 1), tokens(3, 2)), 8),
    "rejected longer": (pair(PROMPT, tokens(4, 3), tokens(11, 4)), 8),
    "completions begin alike": (pair(PROMPT, [7, 8, *tokens(3, 8)], [7, 8, *tokens(4, 9)]), 8),
    "chosen continues rejected": (pair(PROMPT, [7, 8, 9, 10], [7, 8]), 8),
    "prompt of one token": (pair([5], tokens(6, 15), tokens(7, 16)), 0),
    "no prompt": (pair([], tokens(6, 17), tokens(7, 18)), 0),
    "no prompt, equal starts": (pair([], [7, 8, 9], [7, 8, 10]), 0),
    # After truncation to their ends, sequences begin at different tokens of the prompt.
    "different starts": ([TokenSequence(tokens(12, 19), 5), TokenSequence(tokens(12, 20), 3)], 0),
    "prompts that differ late": (
        [TokenSequence([*PROMPT[:6], 70, *tokens(5, 21)], 7), TokenSequence([*PROMPT[:6], 71, *tokens(4, 22)], 7)],
        5,
    ),
    "a border within the other's prompt": (
        [TokenSequence(PROMPT + tokens(4, 23), 9), TokenSequence(PROMPT + tokens(4, 24), 6)],
        5,
    ),
}
ALL = [found for found, _ in PAIRS.values()]


@pytest.fixture(params=MODELS)
def model(request):
    """As the loops load it."""
    found = small(MODELS[request.param])
    assert make_masks_skippable(found)
    return found


# Rows


@pytest.mark.parametrize("name", PAIRS)
def test_a_row_holds_both_sequences_and_their_common_start_once(name):
    (first, second), n_shared = PAIRS[name]
    assert n_shared_tokens([first, second]) == n_shared
    batch = collate_shared_prompts([[first, second]], PAD)
    row, positions, branches = batch.input_ids[0], batch.position_ids[0], batch.branches[0]
    is_token = batch.attention_mask[0].bool()
    assert n_row_tokens([first, second]) == batch.n_tokens == int(is_token.sum())
    assert len(row) % 8 == 0 and len(row) - batch.n_tokens < 8
    for number, sequence in ((1, first), (2, second)):
        columns = is_token & ((branches == 0) | (branches == number))
        assert row[columns].tolist() == sequence.ids
        assert positions[columns].tolist() == list(range(len(sequence.ids)))
        trained = batch.completion_mask[0] & columns
        assert row[trained].tolist() == sequence.ids[max(sequence.prompt_length, 1) :]
        # A trained token's column follows that of the token before it.
        assert (positions[1:] - positions[:-1])[trained[1:]].unique().tolist() in ([1], [])
    assert not row[~is_token].any() and not batch.completion_mask[0, ~is_token].any()


def test_shapes_of_padded_rows_follow_from_three_lengths():
    """Rows of any prompts and completions, also of pairs that share nothing."""
    generator = torch.Generator().manual_seed(0)
    shapes, lengths = set(), set()
    for i in range(200):
        n_prompt, *n_completions = torch.randint(1, 90, (3,), generator=generator).tolist()
        prompt = tokens(n_prompt, i)
        group = pair(prompt, *(tokens(n, 1000 + i + n) for n in n_completions))
        batch = collate_shared_prompts([group], PAD, 128, separate_rows=True)
        assert isinstance(batch.branch_layout, SeparateRows)
        trained = batch.completion_mask[:, batch.first_trained :]
        shapes.add(tuple(part.shape for part in (batch.input_ids, trained, *batch.branch_layout)))
        longest = max(len(sequence.ids) for sequence in group)
        lengths.add((-(-n_row_tokens(group) // 128), batch.first_trained, -(-longest // 128)))
    assert 1 < len(shapes) == len(lengths) < 10


# Training on them


def gradients(model, batch):
    """Log-probability sums, DPO losses and gradients of the mean loss."""
    model.zero_grad()
    sums = completion_logprobs(model, batch)
    chosen, rejected = sums.chunk(2)
    constant = torch.linspace(-30, -20, len(chosen), device=chosen.device)
    losses, *_ = dpo_loss(chosen, rejected, constant, constant.flip(0), 0.1)
    losses.mean().backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return sums.detach(), losses.detach(), grads


def assert_trains_like_separate_rows(model, pairs):
    sums, losses, grads = gradients(model, collate_shared_prompts(pairs, PAD))
    their_sums, their_losses, their_grads = gradients(model, collate_examples(pairs, PAD))
    # Up to 11 log-probabilities of up to 30, each of a few roundings; beta is 0.1.
    atol = 11 * 30 * 8 * EPS
    torch.testing.assert_close(sums, their_sums, rtol=0, atol=atol)
    torch.testing.assert_close(losses, their_losses, rtol=0, atol=0.2 * atol)
    assert grads.keys() == their_grads.keys()
    assert_same_gradients(grads, their_grads)


def test_sums_losses_and_gradients_are_those_of_separate_rows(model):
    check_shared_prompts(model)
    assert_trains_like_separate_rows(model, ALL)


def enable_checkpointing(model):
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})


@pytest.mark.parametrize("checkpointing", [False, True])
def test_adapters(checkpointing):
    base = small(Qwen2Config)
    make_masks_skippable(base)
    model = with_lora(base).train()
    if checkpointing:
        enable_checkpointing(base)
    check_shared_prompts(model)
    assert_trains_like_separate_rows(model, ALL)


# Attention without a mask


def attention_by_pieces(query, key, value, query_ends, key_ends, most_queries, most_keys, *, scale, **options):
    """`varlen_attn`, which needs a GPU: causal attention of each piece, aligned at its end."""
    assert options == {"window_size": (-1, 0), "enable_gqa": True}
    assert query.dtype == key.dtype == value.dtype
    outputs = []
    for i in range(len(query_ends) - 1):
        q = query[query_ends[i] : query_ends[i + 1]].transpose(0, 1)
        k, v = (part[key_ends[i] : key_ends[i + 1]].transpose(0, 1) for part in (key, value))
        assert q.shape[1] <= most_queries and k.shape[1] <= most_keys
        visible = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).tril(k.shape[1] - q.shape[1])
        found = F.scaled_dot_product_attention(q, k, v, attn_mask=visible, scale=scale, enable_gqa=True)
        outputs.append(found.transpose(0, 1))
    return torch.cat(outputs)


LAYOUTS = {"pieces": Pieces, "separate rows": SeparateRows}


@pytest.fixture(params=LAYOUTS)
def without_mask(request, monkeypatch):
    """Attention in one of the two ways, on a CPU."""
    monkeypatch.setattr(shared_prompts, "lay_out", LAYOUTS[request.param].of)
    monkeypatch.setattr(shared_prompts, "supports", lambda layout, dtype, device: True)
    monkeypatch.setattr(shared_prompts, "varlen_attn", attention_by_pieces, raising=False)
    monkeypatch.setattr(shared_prompts, "_OPTIONS", {"window_size": None, "enable_gqa": None})
    monkeypatch.setattr(shared_prompts, "branch_mask", None)  # not called


@pytest.mark.parametrize("config_class", [LlamaConfig, Qwen2Config])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_attention_without_a_mask_is_that_of_separate_rows(config_class, checkpointing, without_mask):
    model = small(config_class).train()
    assert make_masks_skippable(model)
    if checkpointing:
        enable_checkpointing(model)
    assert_trains_like_separate_rows(model, ALL)
    assert_trains_like_separate_rows(model, [PAIRS["no prompt"][0]])


@pytest.mark.slow
@pytest.mark.parametrize("without_mask", ["separate rows"], indirect=True)
def test_compiled_layers_without_a_mask(without_mask, monkeypatch):
    monkeypatch.setattr(fused, "compiled", lambda function: function)
    model = small(LlamaConfig)
    make_masks_skippable(model)
    torch.compiler.reset()
    counter = CompileCounterWithBackend("aot_eager")
    for layer in model.model.layers:
        layer.compile(backend=counter)
    longer = [*ALL[:4], pair(tokens(40, 25), tokens(30, 26), tokens(20, 27))]
    assert_trains_like_separate_rows(model, ALL)
    assert_trains_like_separate_rows(model, longer)
    n_compiled = counter.frame_count
    for others in (ALL[:5], longer[2:]):  # other numbers of rows and tokens are not compiled again
        gradients(model, collate_shared_prompts(others, PAD))
    assert counter.frame_count == n_compiled
    torch.compiler.reset()


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_attention_without_a_mask_is_as_good_as_with_one(layout, compiled, monkeypatch):
    monkeypatch.setattr(shared_prompts, "lay_out", LAYOUTS[layout].of)
    model = small(LlamaConfig, hidden_size=128).cuda()  # heads of 32
    make_masks_skippable(model)
    pairs = [pair(tokens(200, 0), tokens(90, 1), tokens(150, 2)), pair(tokens(300, 3), tokens(5, 4), tokens(60, 5))]
    device = torch.device("cuda")
    batches = [collate_shared_prompts(pairs[:n], PAD).to(device) for n in (2, 1)]  # also other lengths
    exact = [gradients(model, batch) for batch in batches]  # in fp32, by a mask
    model.bfloat16()
    assert attends_without_masks(model)
    assert all(supports(batch.branch_layout, torch.bfloat16, device) for batch in batches)
    if compiled:
        compile_layers(model)
    found = [gradients(model, batch) for batch in batches]
    monkeypatch.setattr(shared_prompts, "supports", lambda layout, dtype, device: False)
    masked = [gradients(model, batch) for batch in batches]
    for (sums, _, grads), (exact_sums, _, exact_grads), (their_sums, _, their_grads) in zip(
        found, exact, masked, strict=True
    ):
        # No further from the fp32 values than twice the same in bf16 by a mask.
        assert (sums - exact_sums).norm() <= 2 * (their_sums - exact_sums).norm()
        ours, theirs = (
            sum((part[name].float() - grad).square().sum() for name, grad in exact_grads.items()).sqrt()
            for part in (grads, their_grads)
        )
        assert ours <= 2 * theirs


@pytest.mark.parametrize("branch", [1, 2])
def test_no_token_sees_the_other_completion(model, branch):
    batch = collate_shared_prompts(ALL, PAD)
    of_branch = (batch.branches == branch) & batch.attention_mask.bool()
    changed = dataclasses.replace(batch, input_ids=torch.where(of_branch, (batch.input_ids + 1) % 211, batch.input_ids))
    with torch.no_grad():
        before, after = token_logprobs(model, batch), token_logprobs(model, changed)
    others = batch.branches[:, batch.first_trained :] != branch
    assert torch.equal(after[others], before[others])
    assert not torch.equal(before[~others], after[~others])


@pytest.mark.parametrize(("config_class", "changes"), [(GPT2Config, {}), (MistralConfig, {"sliding_window": 40})])
def test_a_model_that_may_not_attend_to_all_tokens_is_refused(config_class, changes):
    model = small(config_class, **changes)
    assert not make_masks_skippable(model)
    with pytest.raises(ConfigError, match=f"'share_prompts': a model of type {model.config.model_type} with attention"):
        check_shared_prompts(model)


# Several completions of a prompt in a row


def group(n_prompt, lengths, seed):
    prompt = tokens(n_prompt, 100 * seed)
    return [TokenSequence(prompt + tokens(n, 100 * seed + i), n_prompt) for i, n in enumerate(lengths, start=1)]


GROUPS = [group(9, [4, 1, 7, 3], 0), group(1, [2, 5, 1, 2], 1), group(14, [6, 6, 2, 9], 2)]


def rollout_of(per_row):
    sequences = [sequence for one in GROUPS for sequence in one]
    batch = collate(sequences, 0)
    zeros = torch.zeros(batch.completion_mask[:, batch.first_trained :].shape)
    return Rollout(batch, zeros, sequences, completions_per_row=per_row)


@pytest.mark.parametrize("per_row", [2, 3, 9])
@pytest.mark.parametrize("name", MODELS)
def test_log_probabilities_and_gradients_are_those_of_separate_rows(name, per_row):
    sequences = [sequence for one in GROUPS for sequence in one]
    batch = collate(sequences, 0)
    factors = torch.randn(batch.completion_mask[:, batch.first_trained :].shape, generator=torch.manual_seed(0))
    alone, grouped = small(MODELS[name]), small(MODELS[name])
    for model in (alone, grouped):
        make_masks_skippable(model)
    expected = token_logprobs(alone, batch, 0.7)
    found = rollout_of(per_row).token_logprobs(grouped, 0.7)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert (found != 0).equal(batch.completion_mask[:, batch.first_trained :])
    assert_same_gradients(grads_of(grouped, found * factors), grads_of(alone, expected * factors))


def test_parts_of_a_rollout_share_rows():
    rollout = rollout_of(4)
    model = small(LlamaConfig)
    whole = rollout.token_logprobs(model, 1.0)
    for rows in (slice(2, 7), slice(0, 12)):
        part = rollout.select(rows)
        assert part.completions_per_row == 4
        torch.testing.assert_close(part.token_logprobs(model, 1.0), rollout.cut(whole, rows), rtol=1e-5, atol=1e-5)


# Which of the two


def row_of(n_shared, n_own):
    """A row of completions with these numbers of tokens."""
    return BranchRow(n_shared, [n_shared + sum(n_own[: i + 1]) for i in range(len(n_own))])


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([row_of(383, [129, 129])] * 16, SeparateRows),
        ([row_of(0, [512, 512])], SeparateRows),
        ([row_of(2047, [129] * 16)], Pieces),
        ([row_of(383, [129, 129]), *[row_of(99, [29, 29])] * 15], Pieces),  # mostly padding
    ],
    ids=["pairs", "nothing shared", "16 completions", "one long pair"],
)
def test_the_way_follows_from_the_numbers_of_pairs(rows, expected):
    assert type(lay_out(rows, max(row.ends[-1] for row in rows))) is expected
