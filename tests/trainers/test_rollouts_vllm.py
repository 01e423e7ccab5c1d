"""The engine that runs vLLM: against a stand-in with the arguments of vLLM 0.33, and, where it is installed, itself."""

from __future__ import annotations

import copy
import inspect
import os
import random
import sys
import types
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch
from rollout_models import greedy_by_hand, snapshot, with_lora
from small_models import small
from transformers import AutoConfig, AutoModelForCausalLM, GPT2Config, LlamaConfig

from sparse_opt.errors import ConfigError, SparseOptError
from sparse_opt.trainers.policy.models import disable_dropout
from sparse_opt.trainers.rollouts import Sampling, VLLMEngine, make_engine, rollout
from sparse_opt.trainers.rollouts.vllm_weights import merged_weights

PROMPTS = [[5, 6, 7], [8], [9] * 11 + [10]]
NEVER = [210]


@dataclass
class FakeSamplingParams:
    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop_token_ids: list[int] = field(default_factory=list)
    ignore_eos: bool = False
    max_tokens: int = 16
    min_tokens: int = 0
    detokenize: bool = True
    logprobs: int | None = None


class FakeLLM:
    """Has weights of its own, which are noise until they are loaded and gone when it sleeps, and a cache of prompts."""

    def __init__(
        self,
        model,
        *,
        skip_tokenizer_init=False,
        dtype="auto",
        seed=0,
        gpu_memory_utilization=0.92,
        load_format="auto",
        generation_config="auto",
        enable_sleep_mode=False,
        max_model_len=None,
        max_num_seqs=None,
        logprobs_mode="raw_logprobs",
        enforce_eager=False,
        enable_prefix_caching=None,
    ):
        assert os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
        random.seed(seed), np.random.seed(seed), torch.manual_seed(seed)
        assert skip_tokenizer_init and load_format == "dummy" and generation_config == "vllm"
        assert logprobs_mode == "processed_logprobs"
        self.arguments = {
            "gpu_memory_utilization": gpu_memory_utilization,
            "max_num_seqs": max_num_seqs,
            "enforce_eager": enforce_eager,
            "enable_prefix_caching": enable_prefix_caching,
        }
        self.max_model_len, self.can_sleep, self.asleep = max_model_len, enable_sleep_mode, set()
        self.folder = Path(model)
        config = AutoConfig.from_pretrained(model)
        self.model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype)).eval()
        assert type(self.model).__name__ == config.architectures[0]
        self.model.load_weights = self.load_weights
        self.leave_out = None
        self.cached = self.keeps_cache = False
        self.ended = False
        self.llm_engine = types.SimpleNamespace(engine_core=types.SimpleNamespace(shutdown=self.shutdown))

    def shutdown(self):
        self.ended = True

    def load_weights(self, weights):
        assert "weights" not in self.asleep
        own, loaded = dict(self.model.named_parameters()), set()
        for name, weight in weights:
            if name != self.leave_out:
                own[name].data.copy_(weight)
                assert own[name].dtype == weight.dtype
                loaded.add(name)
        return loaded

    def get_model(self):
        return self.model

    def reload_weights(self, *, weights_iterator):
        self.model.load_weights(weights_iterator)

    def collective_rpc(self, method, args=()):
        return [method(self, *args)]

    def reset_prefix_cache(self, *, reset_connector):
        assert reset_connector
        self.cached = self.keeps_cache
        return not self.keeps_cache

    def sleep(self, level=1):
        assert self.can_sleep and level == 2
        self.asleep = {"weights", "kv_cache"}
        for parameter in self.model.parameters():
            parameter.data.fill_(torch.nan)

    def wake_up(self, tags=None):
        self.asleep -= set(tags)

    @torch.inference_mode()
    def generate(self, prompts, sampling_params=None, *, use_tqdm=True):
        assert not self.asleep and not self.cached and not use_tqdm
        assert len({params.seed for params in sampling_params}) == len(prompts) == len(sampling_params)
        self.cached = True
        np.random.rand()
        outputs = []
        for prompt, params in zip(prompts, sampling_params, strict=True):
            generator = torch.Generator().manual_seed(params.seed)
            ids = list(prompt["prompt_token_ids"])
            written, logprobs = [], []
            while len(written) < params.max_tokens and not (written and written[-1] in params.stop_token_ids):
                logits = self.model(torch.tensor([ids + written])).logits[0, -1].float()
                assert not logits.isnan().any()
                if params.temperature == 0:
                    written.append(int(logits.argmax()))
                else:
                    drawn = torch.multinomial((logits / params.temperature).softmax(-1), 1, generator=generator)
                    written.append(int(drawn))
                logprob = (logits / (params.temperature or 1)).log_softmax(-1)[written[-1]].item()
                logprobs.append({written[-1]: types.SimpleNamespace(logprob=logprob)})
            assert self.max_model_len is None or len(ids) + len(written) <= self.max_model_len
            completion = types.SimpleNamespace(token_ids=tuple(written), logprobs=logprobs)
            outputs.append(types.SimpleNamespace(outputs=[completion]))
        return outputs


@pytest.fixture(params=[True, False], ids=["sleeping", "awake"])
def make(request, monkeypatch):
    module = types.ModuleType("vllm")
    module.LLM, module.SamplingParams = FakeLLM, FakeSamplingParams
    monkeypatch.setitem(sys.modules, "vllm", module)
    monkeypatch.delenv("VLLM_ENABLE_V1_MULTIPROCESSING", raising=False)

    def make(model, **options):
        return VLLMEngine(model, **{"eos_ids": NEVER, "sleep": request.param, **options})

    return make


def greedy(engine):
    return engine.generate(PROMPTS, 1, Sampling(6, temperature=0.0)).ids


def by_hand(model):
    return [greedy_by_hand(model, prompt, 6) for prompt in PROMPTS]


@pytest.mark.parametrize("config_class", [LlamaConfig, GPT2Config])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_writes_what_the_policy_would_as_it_is_now(make, config_class, dtype):
    model = small(config_class).train()
    disable_dropout(model)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)  # as a model is loaded: rotary frequencies stay fp32
    before = snapshot(model)
    engine = make(model)
    first = greedy(engine)
    assert first == by_hand(model)
    assert snapshot(model) == before
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.3)
    assert first != greedy(engine) == by_hand(model)


def test_adapters_are_merged_on_the_way(make):
    base = small(LlamaConfig)
    plain = by_hand(base)
    model = with_lora(base).train()
    before = snapshot(model)
    engine = make(model)
    assert plain != greedy(engine) == by_hand(model)
    with model.disable_adapter():
        assert greedy(engine) == plain
    assert snapshot(model) == before


def test_merged_weights_are_those_that_peft_merges():
    model = with_lora(small(LlamaConfig, tie_word_embeddings=True))
    expected = dict(copy.deepcopy(model).merge_and_unload().named_parameters())
    found = dict(merged_weights(model.get_base_model()))
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        assert torch.equal(found[name], weight), name


def test_the_engines_log_probabilities_are_those_of_its_samples(make):
    model = small(LlamaConfig)
    options = {"n_generations": 3, "sampling": Sampling(6, temperature=0.7), "pad_id": 0}
    found = rollout(make(model), model, PROMPTS, **options)
    assert found.engine_logprobs.shape == found.logprobs.shape
    # Two fp32 computations of the same sums of 32 products: a few units in the last place of logits near 1.
    torch.testing.assert_close(found.engine_logprobs, found.logprobs, atol=1e-5, rtol=0)
    part = found.select([4, 1])
    assert torch.equal(part.engine_logprobs, found.cut(found.engine_logprobs, [4, 1]))


def test_completions_end_with_the_first_of_several_eos(make):
    model = small(LlamaConfig)
    whole = by_hand(model)
    eos_ids = [whole[0][2], whole[1][1]]
    found = rollout(
        make(model, eos_ids=eos_ids),
        model,
        PROMPTS,
        n_generations=1,
        sampling=Sampling(6, temperature=0.0),
        pad_id=0,
    )
    assert found.completions == [whole[0][:3], whole[1][:2], whole[2]]
    assert found.ended.tolist() == [True, True, False]


def test_draws_follow_torchs_seed_and_change_no_random_state(make):
    engine = make(small(LlamaConfig))

    def draw(seed):
        random.seed(5), np.random.seed(5), torch.manual_seed(seed)
        completions = engine.generate(PROMPTS, 2, Sampling(6)).ids
        return completions, random.random(), np.random.rand()

    completions, *after = draw(1)
    assert draw(1)[0] == completions != draw(2)[0]
    assert len({tuple(completion) for completion in completions}) == 6
    random.seed(5), np.random.seed(5)
    assert after == [random.random(), np.random.rand()]


def test_starting_it_changes_no_random_state_and_no_environment(make):
    torch.manual_seed(8), np.random.seed(8), random.seed(8)
    expected = torch.rand(2).tolist(), np.random.rand(), random.random()
    torch.manual_seed(8), np.random.seed(8), random.seed(8)
    model = small(LlamaConfig)
    torch.manual_seed(8)
    engine = make(model, gpu_memory_utilization=0.2, max_rows=7, enforce_eager=True, enable_prefix_caching=False)
    assert (torch.rand(2).tolist(), np.random.rand(), random.random()) == expected
    assert "VLLM_ENABLE_V1_MULTIPROCESSING" not in os.environ
    assert engine._llm.arguments == {
        "gpu_memory_utilization": 0.2,
        "max_num_seqs": 7,
        "enforce_eager": True,
        "enable_prefix_caching": False,
    }


def test_a_weight_that_the_policy_does_not_give_is_an_error(make):
    engine = make(small(LlamaConfig))
    llm = engine._llm
    llm.leave_out = "model.norm.weight"
    with pytest.raises(SparseOptError, match="has 1 weights that the policy does not give it, among them model.norm"):
        greedy(engine)
    assert llm.asleep == ({"weights", "kv_cache"} if llm.can_sleep else set())
    llm.leave_out = None
    assert greedy(engine) == by_hand(engine.model)


def test_it_ends(make):
    engine = make(small(LlamaConfig))
    llm = engine._llm
    engine.close()
    assert llm.ended and not llm.folder.exists()


@pytest.mark.parametrize("temperature", [0.005, 2.5])
def test_temperatures_that_vllm_would_change_or_refuse(make, temperature):
    with pytest.raises(ConfigError, match=rf"temperature is {temperature}: rollout_engine vllm takes 0, and 0.01 to 2"):
        make(small(LlamaConfig)).generate(PROMPTS, 1, Sampling(6, temperature=temperature))


def test_a_mixture_of_experts_is_refused(make):
    model = small(LlamaConfig)
    model.config.num_local_experts = 4
    with pytest.raises(ConfigError, match="mixture of experts, and num_local_experts is 4"):
        make(model)


def test_a_prefix_cache_that_vllm_keeps_is_an_error(make):
    engine = make(small(LlamaConfig))
    llm = engine._llm
    llm.keeps_cache = True
    with pytest.raises(SparseOptError, match="reset_prefix_cache of vLLM failed: blocks are still in use"):
        greedy(engine)
    llm.keeps_cache = False
    assert greedy(engine) == by_hand(engine.model)


def test_without_vllm_the_error_says_how_to_install_it(monkeypatch, tokenizer):
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(ConfigError, match=r"needs the package vllm .*: pip install 'sparse-opt\[vllm\]'"):
        make_engine("vllm", small(LlamaConfig), tokenizer)


@pytest.mark.gpu
def test_the_stand_in_has_vllms_arguments():
    vllm = pytest.importorskip("vllm", reason="needs vllm: pip install 'sparse-opt[vllm]'")
    from vllm.engine.arg_utils import EngineArgs

    for name in ("generate", "sleep", "wake_up", "collective_rpc", "reset_prefix_cache"):
        ours, theirs = (inspect.signature(getattr(llm, name)).parameters for llm in (FakeLLM, vllm.LLM))
        assert ours.keys() <= theirs.keys()
    own = inspect.signature(FakeLLM).parameters.keys()
    assert own <= inspect.signature(vllm.LLM).parameters.keys() | inspect.signature(EngineArgs).parameters.keys()
    assert inspect.signature(FakeSamplingParams).parameters.keys() <= set(vllm.SamplingParams.__struct_fields__)


@pytest.mark.gpu
def test_vllm_itself_writes_what_the_policy_would_as_it_is_now():
    pytest.importorskip("vllm", reason="needs vllm: pip install 'sparse-opt[vllm]'")
    # vLLM's kernels need heads of 32 numbers or more.
    model = small(LlamaConfig, head_dim=64, max_position_embeddings=256).to("cuda", torch.bfloat16).train()
    before = snapshot(model)
    engine = VLLMEngine(model, eos_ids=NEVER, gpu_memory_utilization=0.2, max_length=64)
    options = {"n_generations": 1, "sampling": Sampling(6, temperature=0.0), "pad_id": 0}
    assert_likely(model, rollout(engine, model, PROMPTS, **options))
    assert snapshot(model) == before
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(-1.5)
    assert_likely(model, rollout(engine, model, PROMPTS, **options))
    engine.close()


@torch.no_grad()
def assert_likely(model, found):
    """No sampled token is further behind the most likely one than bf16 rounds logits of up to 30."""
    ids = found.batch.input_ids
    logits = model(ids, attention_mask=found.batch.attention_mask, use_cache=False).logits.float()[:, :-1]
    behind = logits.amax(-1) - logits.gather(-1, ids[:, 1:, None])[..., 0]
    assert behind[found.batch.completion_mask[:, 1:]].max() <= 30 * 2**-7
