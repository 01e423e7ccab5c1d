"""Engine generate with prompts that are computed once and ended rows that leave the batch: the same completions."""

from __future__ import annotations

import pytest
import torch
from rollout_models import CONFIGS, greedy_by_hand, plain_table, snapshot
from small_models import small
from transformers import AutoModelForCausalLM, LlamaConfig, MambaConfig, MistralConfig

from sparse_opt.errors import ConfigError
from sparse_opt.trainers.rollouts import GenerateEngine, Sampling, SharedCacheEngine, make_engine, shared_cache

MODELS = {**{name: (config, {}) for name, config in CONFIGS.items()}, "window": (MistralConfig, {"sliding_window": 4})}
PROMPTS = [[5, 6, 7], [8], [9] * 11 + [10], [5, 6, 7], [12, 13]]
WAYS = [{"share_prompts": True, "drop_ended": False}, {"share_prompts": False, "drop_ended": True},
        {"share_prompts": True, "drop_ended": True}]  # fmt: skip


@pytest.fixture(autouse=True)
def small_batches_shrink_too(monkeypatch):
    monkeypatch.setattr(shared_cache, "_FEWEST_ROWS", 1)


@pytest.mark.parametrize("ways", WAYS, ids=lambda ways: "+".join(name for name, on in ways.items() if on))
@pytest.mark.parametrize("name", MODELS)
def test_greedy_completions_are_those_of_each_prompt_alone(name, ways):
    config_class, changes = MODELS[name]
    model = small(config_class, **changes)
    whole = [greedy_by_hand(model, prompt, 8) for prompt in PROMPTS]
    # Rows end after 1, 2, 3 .. tokens, so that the batch shrinks several times.
    eos_ids = {whole[0][0], whole[1][1], whole[2][3]}
    expected = []
    for ids in whole:
        end = next((place for place, token in enumerate(ids) if token in eos_ids), len(ids) - 1)
        expected.append(ids[: end + 1])
    assert len({len(ids) for ids in expected}) > 1
    before = snapshot(model)
    for max_rows in (None, 3):
        for by_length in (False, True):
            common = {"pad_id": 0, "eos_ids": sorted(eos_ids), "max_rows": max_rows, "by_length": by_length}
            found = SharedCacheEngine(model, **common, **ways).generate(PROMPTS, 2, Sampling(8, temperature=0.0)).ids
            assert found == [ids for ids in expected for _ in range(2)]
            plain = GenerateEngine(model, **common).generate(PROMPTS, 2, Sampling(8, temperature=0.0)).ids
            assert plain == found
    assert snapshot(model) == before


def test_rows_that_go_on_see_their_own_tokens():
    """Later tokens of a shrunk batch follow the model's distribution given what the row has sampled."""
    model = small(LlamaConfig)
    prompt = PROMPTS[0]
    first = plain_table(model, prompt)[-1].exp()
    likely = first.topk(2).indices.tolist()
    eos_ids = sorted(set(range(211)) - set(likely))  # after the first token, only these two rows' kinds go on
    torch.manual_seed(3)
    engine = SharedCacheEngine(model, pad_id=0, eos_ids=eos_ids, share_prompts=True, drop_ended=True)
    found = engine.generate([prompt], 3000, Sampling(2)).ids
    for token in likely:
        second = [ids[1] for ids in found if ids[0] == token]
        assert len(second) == pytest.approx(3000 * first[token].item(), abs=4 * (3000 * first[token].item()) ** 0.5)
        table = plain_table(model, [*prompt, token])[-1].exp()
        best = int(table.argmax())
        share, n = table[best].item(), len(second)
        assert second.count(best) == pytest.approx(n * share, abs=4 * (n * share * (1 - share)) ** 0.5)
    assert {len(ids) for ids in found if ids[0] not in likely} == {1}


def test_eos_is_held_back_in_every_call():
    model = small(LlamaConfig)
    whole = [greedy_by_hand(model, prompt, 6) for prompt in PROMPTS]
    eos_ids = sorted({ids[0] for ids in whole} | {ids[4] for ids in whole[:2]})
    engines = [GenerateEngine(model, pad_id=0, eos_ids=eos_ids)]
    engines += [SharedCacheEngine(model, pad_id=0, eos_ids=eos_ids, **ways) for ways in WAYS]
    sampling = Sampling(6, temperature=0.0, min_new_tokens=3)
    expected, *others = [engine.generate(PROMPTS, 1, sampling).ids for engine in engines]
    assert others == [expected] * 3
    assert min(map(len, expected)) > 3


def test_make_engine_selects_it(tokenizer):
    model = small(LlamaConfig)
    assert type(make_engine("generate", model, tokenizer, by_length=True)) is GenerateEngine
    engine = make_engine("generate", model, tokenizer, share_prompts=True, max_rows=7)
    assert type(engine) is SharedCacheEngine
    assert (engine.share_prompts, engine.drop_ended, engine.max_rows) == (True, False, 7)


def test_a_recurrent_model_is_refused():
    model = AutoModelForCausalLM.from_config(MambaConfig(vocab_size=64, hidden_size=16, num_hidden_layers=1))
    with pytest.raises(ConfigError, match="the cache of MambaForCausalLM cannot be divided by rows"):
        SharedCacheEngine(model, pad_id=0, eos_ids=[1], share_prompts=True, drop_ended=False)
