"""A trainer and a vLLM in its process that have one copy of the weights."""

import copy
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")

from transformers import AutoModelForCausalLM
from vllm import LLM, SamplingParams
from vllm.device_allocator import AllocationData, cumem, get_mem_allocator_instance
from vllm.device_allocator.sleep_mode_backend import CuMemBackend
from vllm.model_executor.layers import utils as vllm_layers
from vllm_lab import EXPERTS, make_model, plain_linear
from vllm_updates import PROMPTS, save, tokens_of

from sparse_opt import MaskSet, SparseAdamW
from sparse_opt.errors import WeightSyncError
from sparse_opt.integrations.vllm import share_weights, sleep


@pytest.fixture
def start(monkeypatch):
    """`start(folder)`: an engine in this process that computes with plain weights."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    monkeypatch.setattr(vllm_layers, "dispatch_cpu_unquantized_gemm", plain_linear)
    engines = []

    def make(folder, **options):
        defaults = {"enforce_eager": True, "max_model_len": 512, "dtype": "bfloat16", "enable_prefix_caching": True}
        defaults["gpu_memory_utilization"] = 0.2
        llm = LLM(str(folder), **{**defaults, **options})
        engines.append(llm)
        return llm

    yield make
    for llm in engines:
        llm.llm_engine.engine_core.shutdown()


def generated(llm):
    """Greedy tokens for each prompt with their log-probabilities."""
    sampling = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, detokenize=False, logprobs=0)
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    outputs = [output.outputs[0] for output in llm.generate(prompts, sampling, use_tqdm=False)]
    return [[(i, row[i].logprob) for i, row in zip(o.token_ids, o.logprobs, strict=True)] for o in outputs]


def addresses(tensors):
    """The bytes of memory that some tensors have, as ranges without overlap."""
    ranges = sorted((t.data_ptr(), t.data_ptr() + t.nbytes) for t in tensors)
    joined = [ranges[0]]
    for start, end in ranges[1:]:
        if start > joined[-1][1]:
            joined.append((start, end))
        else:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
    return joined


CASES = {
    "elements, untied": ("Llama", {"tie_word_embeddings": False}, "element", False),
    "tiles, tied, biases, an optimizer before": ("Qwen2", {"tie_word_embeddings": True}, "tile64", True),
}


@pytest.mark.parametrize("case", CASES)
def test_an_engine_generates_with_the_trained_weights(case, start, tmp_path):
    kind, options, pattern, is_early = CASES[case]
    model = make_model(kind, max_position_embeddings=512, **options)
    alone = copy.deepcopy(model)
    mask = MaskSet.random(model, density=0.25, pattern=pattern, seed=0)
    llm = start(save(tmp_path / "first", model))
    before = generated(llm)
    with torch.no_grad():  # the engine gets the model's weights, whatever it has loaded
        for twin in (model, alone):
            twin.get_parameter("model.norm.weight").mul_(1.5)

    served = list(llm.llm_engine.model_executor.driver_worker.get_model().parameters())
    device, early = served[0].device, None
    if is_early:  # its states are where the weights are
        early = SparseAdamW(model.to(device), mask, lr=1e-2, max_grad_norm=1.0)
    shared = share_weights(model, llm)
    assert addresses([*model.parameters(), *served]) == addresses(served)
    alone.to(device)
    optimizers = [
        (model, early or SparseAdamW(model, mask, lr=1e-2, max_grad_norm=1.0)),
        (alone, SparseAdamW(alone, mask, lr=1e-2, max_grad_norm=1.0)),
    ]
    ids = torch.randint(0, 100, (4, 2, 16), generator=torch.Generator().manual_seed(0)).to(device)
    for step in range(4):
        losses = []
        for twin, optimizer in optimizers:
            with torch.no_grad(), optimizer.base_weights():
                reference = twin(ids[step]).logits
            loss = twin(ids[step], labels=ids[step]).loss + (twin(ids[step]).logits - reference).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        assert torch.equal(*losses)
        shared.update()
        if step == 0:
            assert generated(llm) != before  # so that the prefix cache has blocks of old weights
    for (name, parameter), other in zip(model.named_parameters(), alone.parameters(), strict=True):
        assert torch.equal(parameter, other), name

    folder = save(tmp_path / "last", model)
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    for (name, parameter), other in zip(model.named_parameters(), loaded.named_parameters(), strict=True):
        assert name == other[0] and torch.equal(parameter.cpu(), other[1]), name
    # save_pretrained would copy views of one storage, and torch.save write all of it for each of them.
    assert all(parameter.untyped_storage().nbytes() == parameter.nbytes for parameter in model.parameters())
    assert generated(llm) == generated(start(folder)) != before

    with optimizers[0][1].base_weights(), pytest.raises(WeightSyncError, match="the model holds its base weights"):
        shared.update()
    model.to(torch.float32)
    with pytest.raises(WeightSyncError, match=r"model\.embed_tokens\.weight was moved, cast or replaced"):
        shared.update()


def held_by(tag):
    """Bytes of vLLM's allocations with a tag that have memory."""
    allocations = get_mem_allocator_instance().pointer_to_data.values()
    return sum(data.handle[1] for data in allocations if data.tag == tag and not data.is_asleep)


@pytest.mark.gpu
def test_a_sleeping_engine_gives_back_its_cache_alone(start, tmp_path):
    model = make_model("Llama", max_position_embeddings=512)
    options = {"enforce_eager": False}  # CUDA graphs have the addresses of the cache
    folder = save(tmp_path / "first", model)
    llm = start(folder, enable_sleep_mode=True, **options)
    shared = share_weights(model, llm)
    optimizer = SparseAdamW(model, MaskSet.random(model, density=0.25, seed=0), lr=1e-2)
    cache, weights = held_by("kv_cache"), held_by("weights")
    ids = torch.randint(0, 100, (2, 16), generator=torch.Generator().manual_seed(0)).cuda()
    for level in (1, 2):
        before = tokens_of(llm)
        free = torch.cuda.mem_get_info()[0]
        llm.sleep(level=level)
        assert torch.cuda.mem_get_info()[0] - free >= cache > 2**30
        assert held_by("kv_cache") == 0 and held_by("weights") == weights
        kept = [parameter.detach().clone() for parameter in model.parameters()]
        model(ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        trained = [parameter.detach().clone() for parameter in model.parameters()]
        assert not all(map(torch.equal, kept, trained))
        others = torch.empty(torch.cuda.mem_get_info()[0] - cache // 2, dtype=torch.uint8, device="cuda")
        with pytest.raises(torch.OutOfMemoryError, match="cache takes .* are free: free memory before vLLM wakes up"):
            llm.wake_up()
        del others
        assert llm.llm_engine.is_sleeping() and held_by("kv_cache") == 0
        llm.wake_up()
        assert not llm.llm_engine.is_sleeping() and held_by("kv_cache") == cache
        assert all(map(torch.equal, model.parameters(), trained))
        shared.update()
        tokens = tokens_of(llm)
        assert tokens != before
    assert tokens == tokens_of(start(save(tmp_path / "last", model), **options))


# Models of vLLM without an engine around them


def engine_of(model, **changes):
    """What `share_weights` needs of a `vllm.LLM`, with this model of vLLM."""
    config = model.lab_config
    for name, value in changes.items():
        part = config.model_config if hasattr(config.model_config, name) else config.parallel_config
        setattr(part, name, value)
    worker = SimpleNamespace(get_model=lambda: model, sleep_mode_backend=CuMemBackend())  # of its first sleep
    executor = SimpleNamespace(driver_worker=worker)
    return SimpleNamespace(llm_engine=SimpleNamespace(vllm_config=config, model_executor=executor))


@pytest.mark.parametrize("kind", ["qwen3-moe", "mixtral"])
def test_experts_are_views(kind, vllm_model):
    name, overrides = EXPERTS[kind]
    model = make_model(name, **overrides)
    values = copy.deepcopy(model.state_dict())
    served = vllm_model(model, processed=False)
    share_weights(model, engine_of(served))
    assert addresses([*model.parameters(), *served.parameters()]) == addresses(served.parameters())
    assert all(torch.equal(weight, values[name]) for name, weight in model.state_dict().items())


def refuse(model, llm, message):
    before = {name: (p, p.data_ptr()) for name, p in model.named_parameters()}
    with pytest.raises(WeightSyncError, match=message):
        share_weights(model, llm)
    assert {name: (p, p.data_ptr()) for name, p in model.named_parameters()} == before


@pytest.mark.parametrize(
    ("kind", "overrides", "message"),
    [
        ("Llama", {"tie_word_embeddings": True}, r"embed_tokens\.weight .* packed for the CPU: send updates in place"),
        (*EXPERTS["qwen3-moe"], r"mlp\.experts\.gate_up_proj .* packed for the CPU: send updates in place of sharing"),
    ],
    ids=["linear", "experts"],
)
def test_packed_weights_are_refused(kind, overrides, message, vllm_model, monkeypatch):
    if kind != "Llama":
        monkeypatch.setattr(vllm_layers, "dispatch_cpu_unquantized_gemm", plain_linear)
    model = make_model(kind, **overrides)
    refuse(model, engine_of(vllm_model(model)), message)


def test_other_layouts_are_refused(vllm_model):
    name, overrides = EXPERTS["gpt-oss"]  # whose experts vLLM stores transposed
    model = make_model(name, **overrides)
    refuse(model, engine_of(vllm_model(model, processed=False)), r"experts\.gate_up_proj of shape .*: send updates in")


def test_other_dtypes_are_refused(vllm_model):
    model = make_model("Llama")
    served = vllm_model(model, processed=False)
    message = r"embed_tokens\.weight .* torch\.float32 .*: load the model in vLLM's dtype torch\.bfloat16"
    refuse(model.to(torch.float32), engine_of(served), message)


def test_two_weights_that_vllm_has_once_are_refused(vllm_model):
    served = vllm_model(make_model("Llama", tie_word_embeddings=True), processed=False)
    model = make_model("Llama", tie_word_embeddings=False)
    refuse(model, engine_of(served), r"lm_head\.weight")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tensor_parallel_size": 2}, "tensor_parallel_size of the vLLM engine is 2, expected 1"),
        ({"enable_cumem_allocator": True}, "has slept already, .* call share_weights before its first sleep"),
        ({}, "runs in another process, .* VLLM_ENABLE_V1_MULTIPROCESSING=0"),
    ],
    ids=["workers", "sleep", "process"],
)
def test_other_engines_are_refused(changes, message, vllm_model):
    model = make_model("Llama")
    llm = engine_of(vllm_model(model, processed=False), **changes)
    if not changes:
        del llm.llm_engine.model_executor
    refuse(model, llm, message)


def test_sleep_releases_the_cache_alone(monkeypatch):
    """The backend of sleep mode, over a stand-in for CUDA's memory."""
    tags = {1: "weights", 2: "kv_cache", 3: "kv_cache", 4: "runtime"}
    # A handle has the device, the bytes, the address, and what the driver calls it.
    allocations = {i: AllocationData((0, 2**30, i, 0), tag) for i, tag in tags.items()}
    mapped, free = set(tags), 2**30
    monkeypatch.setattr(sleep, "get_mem_allocator_instance", lambda: SimpleNamespace(pointer_to_data=allocations))
    monkeypatch.setattr(cumem, "unmap_and_release", lambda handle: mapped.remove(handle[2]))
    monkeypatch.setattr(cumem, "create_and_map", lambda handle: mapped.add(handle[2]))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free, 2**33))
    backend = sleep.CacheOnlySleep()
    for level in (1, 2):
        backend.suspend(level)
        assert mapped == {1, 4} and backend.state() == "SUSPENDED"
    backend.resume(["weights"])
    with pytest.raises(torch.OutOfMemoryError, match=r"takes 2\.00 GiB, and 1\.00 GiB of the GPU are free"):
        backend.resume(["kv_cache"])
    assert mapped == {1, 4} and backend.state() == "SUSPENDED"
    free = 2**31
    backend.resume()
    assert mapped == set(tags) and backend.state() == "RUNNING"
    backend.discard(("kv_cache",))  # LLM.release_kv_cache_memory
    assert mapped == {1, 4}
    with pytest.raises(RuntimeError, match="does not support selective discard"):
        backend.discard(("weights",))
