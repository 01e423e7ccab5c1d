"""The engine on a vLLM server, with a stand-in for vLLM."""

from __future__ import annotations

import pytest
import torch
from small_models import small
from transformers import LlamaConfig
from vllm_stand_in import serving

from sparse_opt.errors import ConfigError, SparseOptError
from sparse_opt.masks import MaskSet
from sparse_opt.trainers.policy.pretrained import max_positions
from sparse_opt.trainers.rollouts import GenerateEngine, Sampling, VLLMServerEngine, make_engine, rollout

NEVER = [210]
PROMPTS = [[5, 6, 7], [8], [9, 9, 10]]


@pytest.fixture
def server():
    with serving(small(LlamaConfig)) as found:
        yield found


def test_it_samples_from_the_policy_as_it_is_now(server):
    model = small(LlamaConfig)
    engine = VLLMServerEngine(model, eos_ids=NEVER, base_url=server.url + "/")
    for _ in range(2):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.3)
        found = rollout(engine, model, PROMPTS, n_generations=2, sampling=Sampling(6, temperature=0.0), pad_id=0)
        expected = GenerateEngine(model, pad_id=0, eos_ids=NEVER).generate(PROMPTS, 2, Sampling(6, temperature=0.0))
        assert found.completions == expected.ids
        # Two fp32 computations of the same logits, in batches of other sizes: sums in another order in every layer, of
        # which each may move the largest logits by an ulp.
        with torch.no_grad():
            largest = model(torch.tensor(PROMPTS[:1])).logits.abs().max().item()
        torch.testing.assert_close(found.engine_logprobs, found.logprobs, atol=16 * 2.0**-23 * largest, rtol=0)
    engine.close()


def test_completions_in_flight_are_limited_and_the_weights_sent_once(server):
    model = small(LlamaConfig)
    engine = make_engine("vllm", model, Tokenizer, vllm_server_base_url=server.url, at_once=4)
    assert len(engine.generate(PROMPTS * 3, 2, Sampling(6)).ids) == 18
    assert server.served == [18] and 1 <= server.most_in_flight <= 2
    engine.close()


def test_the_servers_generation_settings_have_no_effect(server):
    server.generation_config = {"repetition_penalty": 1.3, "min_p": 0.1}
    engine = VLLMServerEngine(small(LlamaConfig), eos_ids=NEVER, base_url=server.url)
    assert len(engine.generate(PROMPTS, 2, Sampling(6)).ids) == 6


class Tokenizer:
    eos_token_id, pad_token_id = NEVER[0], 0


def test_a_weight_that_the_policy_does_not_give_is_an_error(server):
    server.missing = ["model.norm.weight"]
    engine = VLLMServerEngine(small(LlamaConfig), eos_ids=NEVER, base_url=server.url)
    with pytest.raises(SparseOptError, match="has 1 weights that the policy does not give it, among them model.norm"):
        engine.generate(PROMPTS, 1, Sampling(6))


def test_completions_that_the_server_would_cut_are_refused(server):
    model = small(LlamaConfig)
    assert max_positions(model.config) > 16
    engine = VLLMServerEngine(model, eos_ids=NEVER, base_url=server.url)
    with pytest.raises(ConfigError, match="has 17 tokens, more than the vLLM server's --max-model-len, 16"):
        engine.generate(PROMPTS, 1, Sampling(14))


def test_a_server_with_other_settings_is_refused(server):
    model = small(LlamaConfig)
    with pytest.raises(ConfigError, match="backend None, and mode sparse needs --weight-transfer-config"):
        VLLMServerEngine(model, eos_ids=NEVER, base_url=server.url, mask=MaskSet.random(model, density=0.1, seed=0))
    server.worker_extension = ""
    with pytest.raises(ConfigError, match=r"has --worker-extension-cls None, expected sparse_opt\..*\.ReloadExtension"):
        VLLMServerEngine(model, eos_ids=NEVER, base_url=server.url)
    server.dtype = "torch.bfloat16"
    with pytest.raises(ConfigError, match="has --dtype bfloat16, expected float32, as the policy has"):
        VLLMServerEngine(model, eos_ids=NEVER, base_url=server.url)
    server.logprobs_mode = "raw_logprobs"
    with pytest.raises(ConfigError, match="has --logprobs-mode raw_logprobs, expected processed_logprobs"):
        VLLMServerEngine(model, eos_ids=NEVER, base_url=server.url)
    with pytest.raises(ConfigError, match=r"needs a server with VLLM_SERVER_DEV_MODE=1: .* cannot be reached"):
        VLLMServerEngine(model, eos_ids=NEVER, base_url="http://localhost:9")


def test_another_kind_of_server_is_refused(server):
    server.answer = lambda route, body: {"data": [{"id": "policy"}], "vllm_config": {}}
    with pytest.raises(ConfigError, match=r"does not answer as a vLLM server does .*: expected vLLM 0\.32 or later"):
        VLLMServerEngine(small(LlamaConfig), eos_ids=NEVER, base_url=server.url)


def test_a_mixture_of_experts_is_refused(server):
    model = small(LlamaConfig)
    model.config.num_local_experts = 4
    with pytest.raises(ConfigError, match="cannot update a mixture of experts, and num_local_experts is 4"):
        VLLMServerEngine(model, eos_ids=NEVER, base_url=server.url)
