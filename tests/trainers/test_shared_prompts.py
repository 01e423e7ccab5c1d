"""Rows that hold a prompt once and both completions of a pair: what is in them, and that they train like two rows."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from small_models import assert_same_gradients, small
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    GPT2Config,
    GPTNeoConfig,
    JambaConfig,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    MixtralConfig,
    OpenAIGPTConfig,
    Qwen2Config,
)

from sparse_opt.errors import ConfigError
from sparse_opt.trainers.data import shared_prompts
from sparse_opt.trainers.data.encoding import TokenSequence, collate_examples
from sparse_opt.trainers.data.shared_prompts import (
    check_shared_prompts,
    collate_shared_prompts,
    n_row_tokens,
    n_shared_tokens,
)
from sparse_opt.trainers.dpo import dpo_loss
from sparse_opt.trainers.policy import branch_attention
from sparse_opt.trainers.policy import logprobs as logprobs_module
from sparse_opt.trainers.policy.adapters import add_lora
from sparse_opt.trainers.policy.branch_attention import Pieces, SeparateRows
from sparse_opt.trainers.policy.logprobs import completion_logprobs, fused, token_logprobs, token_logprobs_and_states
from sparse_opt.trainers.policy.models import attends_without_masks, compile_layers, make_masks_skippable

EPS = 2**-23
PAD = 0
EAGER = {"attn_implementation": "eager"}
MODELS = {
    "llama": (LlamaConfig, {}),
    "llama-eager": (LlamaConfig, EAGER),
    "qwen2": (Qwen2Config, {}),
    "gpt2": (GPT2Config, {}),  # learned positions, and an output layer tied to the embedding
    "gpt2-eager": (GPT2Config, EAGER),
    "mistral-window": (MistralConfig, {"sliding_window": 40}),
    "mixtral": (MixtralConfig, {"num_local_experts": 4}),
}


def tokens(n, seed):
    return torch.randint(3, 211, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


def pair(prompt, chosen, rejected):
    return [TokenSequence(prompt + completion, len(prompt)) for completion in (chosen, rejected)]


PROMPT = tokens(9, 0)
# name -> (pair, tokens that its row computes once)
PAIRS = {
    "rejected shorter": (pair(PROMPT, tokens(8, 1), tokens(3, 2)), 8),
    "rejected longer": (pair(PROMPT, tokens(4, 3), tokens(11, 4)), 8),
    "one token each": (pair(PROMPT, tokens(1, 5), tokens(1, 6)), 8),
    "equal completions": (pair(PROMPT, tokens(5, 7), tokens(5, 7)), 8),
    "completions begin alike": (pair(PROMPT, [7, 8, *tokens(3, 8)], [7, 8, *tokens(4, 9)]), 8),
    "chosen continues rejected": (pair(PROMPT, [7, 8, 9, 10], [7, 8]), 8),
    "long prompt": (pair(tokens(23, 10), tokens(2, 11), tokens(3, 12)), 22),
    "prompt of two tokens": (pair([5, 6], tokens(6, 13), tokens(7, 14)), 1),
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
LONGEST_ROW = max(map(n_row_tokens, ALL))


@pytest.fixture(params=MODELS)
def model(request):
    """As the loops load it."""
    config_class, changes = MODELS[request.param]
    found = small(config_class, **changes)
    assert make_masks_skippable(found) == (request.param in ("llama", "qwen2"))
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


def test_counts_of_a_batch():
    batch, separate = collate_shared_prompts(ALL, PAD), collate_examples(ALL, PAD)
    assert batch.n_trained == separate.n_trained == int(batch.completion_mask.sum())
    assert batch.n_tokens == sum(map(n_row_tokens, ALL)) == separate.n_tokens - sum(n for _, n in PAIRS.values())
    assert batch.first_trained == int(batch.completion_mask.any(dim=0).nonzero()[0])
    expected = [sequence.n_trained for column in zip(*ALL, strict=True) for sequence in column]
    assert batch.n_trained_of_sequences().tolist() == separate.n_trained_of_sequences().tolist() == expected


def test_rows_are_padded_to_a_multiple():
    plain, padded = collate_shared_prompts(ALL, PAD), collate_shared_prompts(ALL, PAD, 12, separate_rows=True)
    width, longest = plain.input_ids.shape[1], max(map(n_row_tokens, ALL))
    assert padded.input_ids.shape == (len(ALL), longest + -longest % 24)  # of 12, and of 8 in any case
    for name in ("input_ids", "attention_mask", "completion_mask", "position_ids"):
        n = min(width, padded.input_ids.shape[1])
        assert torch.equal(getattr(padded, name)[:, :n], getattr(plain, name)[:, :n])
        assert not getattr(padded, name)[:, n:].any()
    assert padded.first_trained == max(plain.first_trained // 12 * 12, 1)
    assert (padded.n_tokens, padded.n_trained) == (plain.n_tokens, plain.n_trained)
    assert collate_shared_prompts([], PAD, 12, separate_rows=True).input_ids.shape == (0, 24)


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


def test_no_pairs():
    batch = collate_shared_prompts([], PAD)
    assert batch.input_ids.shape[0] == batch.n_tokens == batch.n_trained == 0
    assert batch.sequence_sums(torch.zeros(0, batch.input_ids.shape[1] - batch.first_trained)).shape == (0,)


def test_a_row_of_a_long_prompt_has_five_eighths_of_the_tokens():
    long = pair(tokens(96, 0), tokens(32, 1), tokens(32, 2))
    assert n_row_tokens(long) == 96 + 32 + 32 + 1 and collate_examples([long], PAD).n_tokens == 256


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
    check_shared_prompts(model, LONGEST_ROW)
    assert_trains_like_separate_rows(model, ALL)


@pytest.mark.parametrize("name", PAIRS)
def test_gradients_of_a_pair_alone(name):
    model = small(LlamaConfig)
    make_masks_skippable(model)
    found = []
    for collate in (collate_shared_prompts, collate_examples):
        model.zero_grad()
        # Unlike DPO's, the gradients of equal completions do not cancel.
        (completion_logprobs(model, collate([PAIRS[name][0]], PAD)) * torch.tensor([1.0, -0.5])).sum().backward()
        found.append({name: p.grad.clone() for name, p in model.named_parameters()})
    assert_same_gradients(*found)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_adapters(checkpointing):
    model = add_lora(small(Qwen2Config), 2).train()
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:  # zero at first, which would hide lora_A
            torch.nn.init.normal_(parameter, std=0.1)
    if checkpointing:
        base = model.get_base_model()
        enable = getattr(base, "activation_checkpointing_enable", None) or base.gradient_checkpointing_enable
        enable({"use_reentrant": False})
    check_shared_prompts(model, LONGEST_ROW)
    assert_trains_like_separate_rows(model, ALL)


def test_logits_as_returned(monkeypatch):
    """As of models that modify the product of their output layer."""
    monkeypatch.setattr(logprobs_module, "plain_head", lambda model: None)
    assert_trains_like_separate_rows(small(LlamaConfig), ALL)


def test_compiled_layers(monkeypatch):
    monkeypatch.setattr(fused, "compiled", lambda function: function)  # inductor takes long on a CPU
    model = small(LlamaConfig)
    make_masks_skippable(model)
    for layer in model.model.layers:
        layer.compile(backend="aot_eager")
    check_shared_prompts(model, LONGEST_ROW)
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
    monkeypatch.setattr(branch_attention, "supports", lambda layout, dtype, device: True)
    monkeypatch.setattr(branch_attention, "varlen_attn", attention_by_pieces)
    monkeypatch.setattr(branch_attention, "_OPTIONS", {"window_size": None, "enable_gqa": None})
    monkeypatch.setattr(logprobs_module, "branch_mask", None)  # not called


@pytest.mark.parametrize("config_class", [LlamaConfig, Qwen2Config])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_attention_without_a_mask_is_that_of_separate_rows(config_class, checkpointing, without_mask):
    model = small(config_class).train()
    assert make_masks_skippable(model)
    if checkpointing:
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": False})
    assert_trains_like_separate_rows(model, ALL)
    assert_trains_like_separate_rows(model, [PAIRS["no prompt"][0]])


def test_attention_without_a_mask_of_many_completions(without_mask):
    model = small(LlamaConfig)
    make_masks_skippable(model)
    groups = [[TokenSequence(PROMPT + tokens(3 + i, i), 9) for i in range(n)] for n in (1, 4)]
    batch = collate_shared_prompts(groups, PAD)
    separate = collate_examples([[sequence] for group in groups for sequence in group], PAD)
    found, expected = token_logprobs(model, batch), token_logprobs(model, separate)
    torch.testing.assert_close(found.sum(), expected.sum(), rtol=0, atol=22 * 30 * 8 * EPS)
    assert_same_gradients(grads_of_sum(model, found), grads_of_sum(model, expected))


def grads_of_sum(model, logprobs):
    model.zero_grad()
    logprobs.sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


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
    assert all(branch_attention.supports(batch.branch_layout, torch.bfloat16, device) for batch in batches)
    if compiled:
        compile_layers(model)
    found = [gradients(model, batch) for batch in batches]
    monkeypatch.setattr(branch_attention, "supports", lambda layout, dtype, device: False)
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


def test_under_autocast():
    assert_as_good_under_autocast(small(LlamaConfig))


def test_without_a_mask_under_autocast(without_mask):
    model = small(LlamaConfig)
    make_masks_skippable(model)
    assert_as_good_under_autocast(model)


def assert_as_good_under_autocast(model):
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        shared, separate = (
            completion_logprobs(model, collate(ALL, PAD)) for collate in (collate_shared_prompts, collate_examples)
        )
    exact = completion_logprobs(model, collate_examples(ALL, PAD)).detach()
    # No further from the fp32 values than twice the separate rows in bf16 are.
    assert (shared - exact).norm() <= 2 * (separate - exact).norm()


def test_states_are_those_that_predict():
    model = small(LlamaConfig)
    batch = collate_shared_prompts(ALL, PAD)
    logprobs, states = token_logprobs_and_states(model, batch)
    labels = batch.input_ids[:, batch.first_trained :]
    expected = model.lm_head(states).log_softmax(-1).gather(-1, labels[..., None])[..., 0]
    trained = batch.completion_mask[:, batch.first_trained :]
    torch.testing.assert_close(logprobs[trained], expected[trained], rtol=0, atol=30 * 8 * EPS)


@pytest.mark.parametrize("branch", [1, 2])
def test_no_token_sees_the_other_completion(model, branch):
    batch = collate_shared_prompts(ALL, PAD)
    of_branch = (batch.branches == branch) & batch.attention_mask.bool()
    changed = dataclasses.replace(batch, input_ids=torch.where(of_branch, (batch.input_ids + 1) % 211, batch.input_ids))
    with torch.no_grad():
        before, after = token_logprobs(model, batch), token_logprobs(model, changed)
    others = batch.branches[:, batch.first_trained :] != branch
    # Bits, but in a mixture of experts the number of tokens of an expert changes.
    atol = 30 * 8 * EPS if model.config.model_type == "mixtral" else 0
    torch.testing.assert_close(after[others], before[others], rtol=0, atol=atol)
    assert not torch.equal(before[~others], after[~others])


def causal_mask_only(branches, dtype):
    """A wrong mask, under which the second completion sees the first."""
    n = branches.shape[1]
    mask = torch.full((n, n), torch.finfo(dtype).min, dtype=dtype).triu_(1)
    return mask.expand(len(branches), 1, n, n)


def test_a_mask_without_branches_is_detected(monkeypatch):
    model = small(LlamaConfig)
    with monkeypatch.context() as patch:
        patch.setattr(logprobs_module, "branch_mask", causal_mask_only)
        with pytest.raises(AssertionError, match="not close"):
            assert_trains_like_separate_rows(model, ALL)
    monkeypatch.setattr(shared_prompts, "branch_mask", causal_mask_only)
    with pytest.raises(ConfigError, match="LlamaForCausalLM lets a completion depend on the other one in its row"):
        check_shared_prompts(model, LONGEST_ROW)


# Models for which it would be wrong


def tiny(config_class, **sizes):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config_class(vocab_size=64, **sizes))


@pytest.mark.parametrize(
    ("make", "cause"),
    [
        (
            lambda: small(MistralConfig, sliding_window=LONGEST_ROW - 1),
            f"MistralForCausalLM attends to a window of {LONGEST_ROW - 1} tokens .sliding_window., and a row has up to "
            f"{LONGEST_ROW}",
        ),
        (
            lambda: small(Qwen2Config, sliding_window=4, use_sliding_window=True, max_window_layers=1),
            "Qwen2ForCausalLM attends to a window of 4 tokens",
        ),
        (
            lambda: tiny(
                GPTNeoConfig, hidden_size=16, num_layers=2, num_heads=2, window_size=8,
                attention_types=[[["global", "local"], 1]],
            ),
            "GPTNeoForCausalLM attends to a window of 8 tokens .window_size.",
        ),
        (lambda: tiny(BloomConfig, hidden_size=16, n_layer=1, n_head=2), "BloomForCausalLM takes no position ids"),
        (
            lambda: tiny(MambaConfig, hidden_size=16, num_hidden_layers=1, state_size=4),
            "MambaForCausalLM takes no position ids",
        ),
        (
            lambda: tiny(
                JambaConfig, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
                num_key_value_heads=2, use_mamba_kernels=False,
            ),
            "JambaForCausalLM has layers of linear_attention",
        ),
        (
            lambda: tiny(OpenAIGPTConfig, n_embd=16, n_layer=1, n_head=2),
            "OpenAIGPTLMHeadModel fails with a 4D mask and position ids",
        ),
    ],
    ids=["window", "window of some layers", "local layers", "alibi", "recurrent", "hybrid", "2D masks only"],
)  # fmt: skip
def test_a_model_is_refused_with_the_cause(make, cause):
    with pytest.raises(ConfigError, match=f"option 'share_prompts': {cause}.*leave it out"):
        check_shared_prompts(make(), LONGEST_ROW)


def test_a_window_that_is_not_used_is_no_window():
    check_shared_prompts(small(Qwen2Config, sliding_window=4, use_sliding_window=False), LONGEST_ROW)


def test_attention_that_takes_no_4d_mask_is_refused():
    model = small(LlamaConfig)
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(
        ConfigError, match="LlamaForCausalLM runs with attention 'flash_attention_2', which takes no 4D"
    ):
        check_shared_prompts(model, LONGEST_ROW)


def test_a_model_that_counts_positions_on_is_refused(monkeypatch):
    model = small(GPT2Config)
    embed = model.transformer.wpe.forward
    monkeypatch.setattr(model.transformer.wpe, "forward", lambda ids: embed(torch.arange(ids.shape[1])[None]))
    with pytest.raises(ConfigError, match="GPT2LMHeadModel gives a completion other logits than in a row of its own"):
        check_shared_prompts(model, LONGEST_ROW)


def test_a_model_in_bf16_is_accepted():
    check_shared_prompts(small(LlamaConfig).to(torch.bfloat16), LONGEST_ROW)
