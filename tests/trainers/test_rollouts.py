"""Rollouts by transformers' engines: what is sampled, its log-probabilities, and a model left as it was."""

from __future__ import annotations

import gc
import math

import pytest
import torch
from rollout_models import CONFIGS, greedy_by_hand, plain_table, snapshot, with_lora
from small_models import EPS, small
from transformers import AutoModelForCausalLM, BloomConfig, FalconConfig, GenerationConfig, LlamaConfig

from sparse_opt.config import parse_config
from sparse_opt.errors import ConfigError, SparseOptError
from sparse_opt.trainers.grpo import GRPOConfig
from sparse_opt.trainers.policy.models import make_masks_skippable
from sparse_opt.trainers.rollouts import (
    Completions,
    ContinuousBatchingEngine,
    GenerateEngine,
    Rollout,
    Sampling,
    make_engine,
    rollout,
    stop_ids,
)

ENGINES = {"generate": GenerateEngine, "continuous_batching": ContinuousBatchingEngine}
PROMPTS = [[5, 6, 7], [8], [9] * 11 + [10]]
NEVER = [210]  # an EOS that the tests' greedy completions do not hold


@pytest.fixture(autouse=True, scope="module")
def old_objects_out_of_the_collectors_way():
    """Continuous batching collects garbage several times a call, and a test run has many objects."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(params=ENGINES)
def engine_class(request):
    return ENGINES[request.param]


def sampled(engine, n=1, **sampling):
    return engine.generate(PROMPTS, n, Sampling(**{"max_new_tokens": 6, "temperature": 0.0, **sampling})).ids


@pytest.mark.parametrize("name", CONFIGS)
def test_greedy_completions_do_not_depend_on_the_batch(engine_class, name):
    model = small(CONFIGS[name])
    expected = [greedy_by_hand(model, prompt, 6) for prompt in PROMPTS]
    engine = engine_class(model, pad_id=0, eos_ids=NEVER)
    assert sampled(engine) == expected  # short prompts in a batch with one of 12 tokens
    assert engine.generate([PROMPTS[1]], 1, Sampling(6, temperature=0.0)).ids == [expected[1]]
    backwards = engine.generate(PROMPTS[::-1], 2, Sampling(6, temperature=0.0)).ids
    assert backwards == [completion for completion in expected[::-1] for _ in range(2)]
    assert sampled(engine_class(model, pad_id=0, eos_ids=NEVER, max_rows=2)) == expected


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("rows_per_pass", [None, 1, 2])
def test_log_probabilities_are_those_of_a_plain_forward_pass_of_each_row(name, rows_per_pass):
    model = small(CONFIGS[name])
    torch.manual_seed(0)
    found = rollout(
        GenerateEngine(model, pad_id=0, eos_ids=[1, 2]),
        model,
        PROMPTS,
        n_generations=2,
        sampling=Sampling(6, temperature=0.7),
        pad_id=0,
        rows_per_pass=rows_per_pass,
    )
    assert len(found) == 6
    for row in range(6):
        prompt, completion = PROMPTS[row // 2], found.completions[row]
        ids = prompt + completion
        assert found.batch.input_ids[row].tolist() == ids + [0] * (found.batch.input_ids.shape[1] - len(ids))
        table = plain_table(model, ids, temperature=0.7)
        expected = torch.zeros_like(found.logprobs[row])
        for offset, token in enumerate(completion):
            position = len(prompt) + offset
            expected[position - found.batch.first_trained] = table[position - 1, token]
        # Logits of up to 30 in fp32, whose sums another batch shape orders differently.
        torch.testing.assert_close(found.logprobs[row], expected, rtol=0, atol=8 * 30 * EPS[torch.float32])
        assert torch.equal(found.mask[row], expected != 0)


def test_a_rollout_of_one_prompt_is_that_prompts_part_of_a_larger_one():
    model = small(LlamaConfig)
    engine = GenerateEngine(model, pad_id=0, eos_ids=NEVER)
    options = {"n_generations": 1, "sampling": Sampling(6, temperature=0.0), "pad_id": 0}
    whole = rollout(engine, model, PROMPTS, **options)
    for row, prompt in enumerate(PROMPTS):
        alone, part = rollout(engine, model, [prompt], **options), whole.select([row])
        assert torch.equal(alone.batch.input_ids, part.batch.input_ids)
        torch.testing.assert_close(alone.logprobs, part.logprobs, rtol=0, atol=8 * 30 * EPS[torch.float32])


def test_completions_end_with_the_first_of_several_eos(engine_class):
    model = small(LlamaConfig)
    whole = sampled(engine_class(model, pad_id=0, eos_ids=NEVER))
    eos_ids = [whole[0][2], whole[1][1]]
    expected = []
    for completion in whole:
        ends = [place for place, token in enumerate(completion) if token in eos_ids]
        expected.append(completion[: ends[0] + 1] if ends else completion)
    assert len(expected[0]) < 6 and len(expected[1]) < 6 and len(expected[2]) == 6
    for pad_id in (0, eos_ids[0]):  # padding that is an EOS is no completion token
        found = rollout(
            engine_class(model, pad_id=pad_id, eos_ids=eos_ids),
            model,
            PROMPTS,
            n_generations=1,
            sampling=Sampling(6, temperature=0.0),
            pad_id=pad_id,
        )
        assert found.completions == expected
        assert found.ended.tolist() == [True, True, False]
        assert found.mask.sum(dim=1).tolist() == [len(completion) for completion in expected]
        assert (found.logprobs[~found.mask] == 0).all()


def test_eos_is_held_back():
    model = small(LlamaConfig)
    whole = sampled(GenerateEngine(model, pad_id=0, eos_ids=NEVER))
    eos_ids = [completion[0] for completion in whole]
    held = sampled(GenerateEngine(model, pad_id=0, eos_ids=eos_ids), min_new_tokens=4)
    assert all(len(completion) >= 4 and not set(completion[:4]) & set(eos_ids) for completion in held)
    with pytest.raises(ConfigError, match="min_new_tokens is 4: rollout_engine continuous_batching"):
        sampled(ContinuousBatchingEngine(model, pad_id=0, eos_ids=eos_ids), min_new_tokens=4)


def distance(counts, probabilities):
    """(chi-square, what it stays below but for one in some ten thousand draws); rare tokens are counted as one."""
    expected = probabilities * counts.sum()
    common = expected >= 5
    counts = torch.cat([counts[common], counts[~common].sum()[None]])
    expected = torch.cat([expected[common], expected[~common].sum()[None]])
    counts, expected = counts[expected > 0], expected[expected > 0]
    degrees = len(counts) - 1
    return float(((counts - expected) ** 2 / expected).sum()), degrees + 4 * math.sqrt(2 * degrees)


@pytest.mark.parametrize(
    ("sampling", "wrong"),
    [
        ({"temperature": 0.7}, {"temperature": 1.0}),
        ({"top_k": 9}, {}),
        ({"temperature": 1.3, "top_p": 0.6}, {"temperature": 1.3}),
    ],
    ids=["cold", "top_k", "top_p"],
)
def test_first_tokens_follow_the_distribution(engine_class, sampling, wrong):
    model = small(LlamaConfig)
    prompt = PROMPTS[0]
    logits = plain_table(model, prompt)[-1]

    def probabilities(temperature=1.0, top_k=0, top_p=1.0):
        table, order = (logits / temperature).softmax(-1).sort(descending=True)
        kept = torch.arange(len(table)) < (top_k or len(table))
        kept &= table.cumsum(-1) - table < top_p  # the token that passes the share is in
        return torch.zeros_like(table).scatter(0, order, table * kept / (table * kept).sum())

    torch.manual_seed(7)
    engine = engine_class(model, pad_id=0, eos_ids=NEVER, max_rows=500)
    found = engine.generate([prompt], 2000, Sampling(1, **sampling)).ids
    counts = torch.bincount(torch.tensor(found)[:, 0], minlength=211).float()
    assert not counts[probabilities(**sampling) == 0].any()
    chi_square, limit = distance(counts, probabilities(**sampling))
    assert chi_square < limit
    chi_square, limit = distance(counts, probabilities(**wrong))
    assert chi_square > limit  # the test sees the difference


def test_draws_follow_torchs_seed(engine_class):
    engine = engine_class(small(LlamaConfig), pad_id=0, eos_ids=NEVER)

    def draw(seed):
        torch.manual_seed(seed)
        return sampled(engine, n=3, temperature=1.0)

    assert draw(1) == draw(1) != draw(2)
    assert len({tuple(completion) for completion in draw(1)}) == 9
    torch.manual_seed(1)
    assert sampled(engine, temperature=1.0) != sampled(engine, temperature=1.0)


LEAKS = {
    "temperature": 0.01,
    "top_k": 1,
    "repetition_penalty": 9.0,
    "no_repeat_ngram_size": 1,
    "min_length": 60,
    "suppress_tokens": list(range(2, 100)),
    "forced_eos_token_id": 1,
    "num_beams": 3,
    "max_new_tokens": 2,
}


def test_the_models_generation_settings_have_no_effect(engine_class):
    model = small(LlamaConfig)
    engine = engine_class(model, pad_id=0, eos_ids=NEVER)

    def draw():
        torch.manual_seed(3)
        return sampled(engine, temperature=1.0), sampled(engine)

    clean = draw()
    model.generation_config = own = GenerationConfig(**LEAKS)
    settings = own.to_dict()
    assert draw() == clean
    assert model.generation_config is own and own.to_dict() == settings


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_is_left_as_it_was(engine_class, dtype):
    model = small(LlamaConfig).to(dtype).train()
    assert make_masks_skippable(model)
    model.model.layers[0].eval()
    model.model.embed_tokens.requires_grad_(False)
    model.model.layers[1].mlp.register_forward_hook(lambda *_: None)
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})
    before = snapshot(model)
    engine = engine_class(model, pad_id=0, eos_ids=NEVER)
    sampled(engine, temperature=1.0)
    engine.close()
    assert snapshot(model) == before


@pytest.mark.gpu
def test_on_a_gpu_its_memory_is_given_back(engine_class):
    model = small(LlamaConfig).to("cuda").train()
    assert make_masks_skippable(model)
    expected = [greedy_by_hand(model, prompt, 6) for prompt in PROMPTS]
    engine = engine_class(model, pad_id=0, eos_ids=NEVER)
    assert sampled(engine) == expected  # libraries' workspaces stay
    torch.manual_seed(1)
    before, memory = snapshot(model), torch.cuda.memory_allocated()
    first = sampled(engine, n=4, temperature=1.0)
    assert torch.cuda.memory_allocated() == memory
    assert snapshot(model) == before
    torch.manual_seed(1)
    assert sampled(engine, n=4, temperature=1.0) == first


def test_a_model_is_left_as_it_was_after_an_error(engine_class):
    model = small(LlamaConfig).train()
    assert make_masks_skippable(model)
    calls = []

    def fail(*_):
        calls.append(None)
        if len(calls) == 3:
            raise RuntimeError("no more memory")

    model.model.layers[1].register_forward_pre_hook(fail)
    before = snapshot(model)
    engine = engine_class(model, pad_id=0, eos_ids=NEVER)
    state = torch.get_rng_state()
    with pytest.raises((RuntimeError, SparseOptError), match="no more memory"):
        sampled(engine)
    assert snapshot(model) == before
    if engine_class is ContinuousBatchingEngine:  # it seeds torch
        torch.set_rng_state(state)
        torch.randint(2**31, ())
        expected = torch.rand(3)
        torch.set_rng_state(state)
        calls.clear()
        with pytest.raises(SparseOptError, match="completion 0 of 3"):
            sampled(engine)
        assert torch.equal(torch.rand(3), expected)
    assert len(sampled(engine)) == 3  # the engine still works


def test_an_adapter_is_part_of_the_policy(engine_class):
    base = small(LlamaConfig)
    plain = [greedy_by_hand(base, prompt, 6) for prompt in PROMPTS]
    model = with_lora(base).train()
    expected = [greedy_by_hand(model, prompt, 6) for prompt in PROMPTS]
    assert expected != plain
    before = snapshot(model)
    engine = engine_class(model, pad_id=0, eos_ids=NEVER)
    assert sampled(engine) == expected
    with model.disable_adapter():
        assert sampled(engine) == plain
    assert snapshot(model) == before
    found = rollout(engine, model, PROMPTS, n_generations=1, sampling=Sampling(6, temperature=0.0), pad_id=0)
    table = plain_table(model, PROMPTS[0] + expected[0])
    first = len(PROMPTS[0]) - found.batch.first_trained
    for offset, token in enumerate(expected[0]):
        assert found.logprobs[0, first + offset].item() == pytest.approx(table[2 + offset, token].item(), abs=1e-4)


def make_rollout() -> Rollout:
    torch.manual_seed(0)
    model = small(LlamaConfig)
    engine = GenerateEngine(model, pad_id=0, eos_ids=list(range(1, 60)))
    return rollout(engine, model, PROMPTS, n_generations=3, sampling=Sampling(7), pad_id=0, rows_per_pass=4)


@pytest.mark.parametrize("rows", [slice(3, 6), [8, 0], [4]])
def test_selected_rows_are_trimmed_to_their_own(rows):
    found = make_rollout()
    assert len({len(completion) for completion in found.completions}) > 2
    part = found.select(rows)
    index = list(range(9))[rows] if isinstance(rows, slice) else rows
    assert part.completions == [found.completions[row] for row in index]
    assert part.ended.tolist() == [found.ended[row].item() for row in index]
    assert part.batch.input_ids.shape[1] == max(len(found.sequences[row].ids) for row in index)
    assert part.batch.first_trained == min(found.sequences[row].prompt_length for row in index)
    assert part.batch.n_tokens == part.batch.attention_mask.sum()
    assert part.batch.n_trained == part.mask.sum() == sum(map(len, part.completions))
    for i, row in enumerate(index):
        assert part.batch.input_ids[i][part.batch.attention_mask[i].bool()].tolist() == found.sequences[row].ids
        assert torch.equal(part.logprobs[i][part.mask[i]], found.logprobs[row][found.mask[row]])
    assert torch.equal(found.cut(found.logprobs, rows), part.logprobs)
    assert torch.equal(found.cut(found.mask, rows), part.mask)


def test_minibatches_hold_every_row_once():
    found = make_rollout()
    parts = list(found.minibatches(4))
    assert [rows for rows, _ in parts] == [slice(0, 4), slice(4, 8), slice(8, 9)]
    assert [completion for _, part in parts for completion in part.completions] == found.completions


def test_training_on_the_rows_of_a_pass_starts_at_a_ratio_of_one():
    from sparse_opt.trainers.policy.logprobs import token_logprobs

    found, model = make_rollout(), small(LlamaConfig)
    for _, part in found.minibatches(4):
        assert torch.equal(token_logprobs(model, part.batch).detach(), part.logprobs)


def test_stop_ids_are_the_tokenizers_and_the_models(tokenizer):
    model = small(LlamaConfig)
    model.generation_config.eos_token_id = [tokenizer.eos_token_id, 7, 9]
    assert stop_ids(model, tokenizer) == (tokenizer.eos_token_id, 7, 9)
    assert stop_ids(with_lora(model), tokenizer) == (tokenizer.eos_token_id, 7, 9)
    model.generation_config.eos_token_id = 7
    assert stop_ids(model, tokenizer) == (tokenizer.eos_token_id, 7)
    model.generation_config.eos_token_id = None
    assert stop_ids(model, tokenizer) == (tokenizer.eos_token_id,)


def test_engines_by_name(tokenizer):
    model = small(LlamaConfig)
    for name, engine_class in ENGINES.items():
        engine = make_engine(name, model, tokenizer, max_rows=3)
        assert type(engine) is engine_class
        assert (engine.pad_id, engine.max_rows) == (tokenizer.pad_token_id, 3)
        assert engine.eos_ids == (tokenizer.eos_token_id, 1)
    with pytest.raises(ConfigError, match="rollout_engine is 'sglang', expected generate, continuous_batching or vllm"):
        make_engine("sglang", model, tokenizer)


def test_engine_is_another_name_of_rollout_engine():
    words = ["policy_name=m", "dataset=d", "reward_functions=length"]
    assert parse_config(GRPOConfig, [*words, "--engine", "vllm"]).rollout_engine == "vllm"
    assert parse_config(GRPOConfig, [*words, "engine=continuous_batching"]).rollout_engine == "continuous_batching"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens is 0, expected at least 1"),
        ({"min_new_tokens": 9}, "min_new_tokens is 9, expected 0 to max_new_tokens 8"),
        ({"temperature": -1.0}, "temperature is -1.0"),
        ({"temperature": math.nan}, "temperature is nan"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"top_k": -1}, "top_k is -1"),
    ],
)
def test_wrong_sampling(values, message):
    with pytest.raises(ConfigError, match=message):
        Sampling(**{"max_new_tokens": 8, **values})


def test_wrong_rollouts(engine_class):
    model = small(LlamaConfig, max_position_embeddings=16)
    engine = engine_class(model, pad_id=0, eos_ids=NEVER)

    def run(prompts, **changes):
        options = {"n_generations": 2, "sampling": Sampling(6), "pad_id": 0}
        return rollout(engine, model, prompts, **{**options, **changes})

    with pytest.raises(ConfigError, match=r"2 prompts, of lengths \[2, 0\]: expected none empty"):
        run([[1, 2], []])
    with pytest.raises(ConfigError, match="0 prompts"):
        run([])
    with pytest.raises(ConfigError, match="n_generations is 0"):
        run([[1]], n_generations=0)
    with pytest.raises(ConfigError, match="rows_per_pass is 0"):
        run([[1]], rows_per_pass=0)
    with pytest.raises(ConfigError, match="a prompt of 11 tokens and max_new_tokens 6 make 17, more than .* 16"):
        run([[3] * 11])


def test_positions_from_an_attention_mask():
    torch.manual_seed(0)
    config = BloomConfig(vocab_size=211, hidden_size=32, n_layer=2, n_head=4)
    model = AutoModelForCausalLM.from_config(config).eval()
    expected = [greedy_by_hand(model, prompt, 6) for prompt in PROMPTS]
    assert sampled(GenerateEngine(model, pad_id=0, eos_ids=NEVER)) == expected
    for refused in (
        model,
        AutoModelForCausalLM.from_config(
            FalconConfig(vocab_size=211, hidden_size=32, num_attention_heads=4, alibi=True)
        ),
    ):
        with pytest.raises(ConfigError, match=f"takes position ids, which {type(refused).__name__} does not"):
            ContinuousBatchingEngine(refused, pad_id=0, eos_ids=NEVER)


@pytest.mark.parametrize(
    ("completions", "message"),
    [
        ([[5]], "1 completions, expected 2"),
        ([[5], []], "1 has 0 tokens"),
        ([[5], [5] * 4], "1 has 4 tokens, expected 1 to 3"),
    ],
)
def test_an_engine_that_returns_something_else(completions, message):
    class Engine:
        eos_ids = (1,)

        def generate(self, prompts, n, sampling):
            return Completions(completions)

    with pytest.raises(SparseOptError, match=message):
        rollout(Engine(), small(LlamaConfig), [[3]], n_generations=2, sampling=Sampling(3), pad_id=0)
