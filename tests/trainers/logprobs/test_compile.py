"""Compiled layers: the same run, the same names, eager rollouts, and a fused pass over a slice of logits."""

import functools

import pytest
import torch
from small_models import EPS, Head, random_sequences, small
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import GPT2Config, LlamaConfig

from sparse_opt.trainers import models
from sparse_opt.trainers.batches import collate
from sparse_opt.trainers.logprobs import chunked as logprobs_module
from sparse_opt.trainers.logprobs import fused as fused_module
from sparse_opt.trainers.logprobs import token_logprobs
from sparse_opt.trainers.logprobs.chunked import linear_logprobs
from sparse_opt.trainers.models import compile_layers
from sparse_opt.trainers.sampling import Sampling, generate


@pytest.fixture
def graphs(monkeypatch):
    """The fused functions are traced as they are for inductor, and run by torch; gives the graphs there are of each."""
    made: list[str] = []
    torch._dynamo.reset()  # dynamo compiles a function for a few widths of slices, and then runs others as they are

    @functools.cache
    def compiled(function):
        def backend(graph, inputs):
            made.append(function.__name__)
            return graph.forward

        return torch.compile(function, dynamic=True, fullgraph=True, backend=backend)

    monkeypatch.setattr(fused_module, "compiled", compiled)
    return made


@pytest.fixture(params=[False, True], ids=["slices of 64", "one slice"])
def one_slice(request, monkeypatch):
    """Of 28 times 300 logits: four slices of 64 words and one of 44, or all at once."""
    monkeypatch.setattr(logprobs_module, "_KEPT_ELEMENTS", 28 * 300 - (not request.param))
    monkeypatch.setattr(logprobs_module, "_LEAST_WORDS", 64)
    return request.param


fused = functools.partial(linear_logprobs, fused=True)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_fused_logprobs_in_fp32_are_exact(one_slice, graphs, temperature):
    Head(torch.float32, temperature).assert_exact(fused)
    of_one_slice = {"terms_of", "hidden_gradient", "weight_operand"}
    assert set(graphs) == (of_one_slice if one_slice else {"fold", "grad_logits"})


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_fused_logprobs_in_bf16_are_as_good_as_a_linear_layer_with_all_logits(one_slice, temperature):
    with torch.compiler.set_stance("force_eager"):
        Head(torch.bfloat16, temperature).assert_as_good_as_all_logits(fused)


@pytest.mark.gpu
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_one_slice_on_a_gpu_is_as_good_as_a_linear_layer_with_all_logits(temperature):
    """Compiled for the width of the logits, and with products in fp32."""
    head = Head(torch.bfloat16, temperature, n_words=9000)
    for name in ("hidden", "weight", "labels", "upstream"):
        setattr(head, name, getattr(head, name).cuda())
    head.assert_as_good_as_all_logits(fused)


def test_logits_of_one_slice_are_computed_once(monkeypatch):
    monkeypatch.setattr(fused_module, "compiled", lambda function: function)  # no compilation under a mode
    hidden, weight = torch.randn(5, 8, requires_grad=True), torch.randn(240, 8, requires_grad=True)
    products = {torch.ops.aten.mm.default, torch.ops.aten.mm.out, torch.ops.aten.addmm_.default}

    class Products(TorchDispatchMode):
        n = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.n += func in products
            return func(*args, **(kwargs or {}))

    def count(kept_elements):
        monkeypatch.setattr(logprobs_module, "_KEPT_ELEMENTS", kept_elements)
        monkeypatch.setattr(logprobs_module, "_LEAST_WORDS", 120)
        with Products() as mode:
            fused(hidden, weight, torch.arange(5), 0.9).sum().backward()
        return mode.n

    # The logits, the gradient of the hidden states, and that of the weight; of two slices, with the logits twice.
    assert count(5 * 240) == 3
    assert count(5 * 240 - 1) == 2 * 4


def test_only_models_with_compiled_layers_are_fused(graphs):
    model = small(LlamaConfig)
    batch = collate(random_sequences(3, 211), pad_id=0)
    plain = token_logprobs(model, batch, 0.8)
    assert not graphs
    for layer in model.model.layers:
        layer.compile(backend="eager")
    found = token_logprobs(model, batch, 0.8)
    assert graphs == ["terms_of"]
    # Logits of up to 40 are sums of 32 products; the layers' own values are the same.
    torch.testing.assert_close(found, plain, rtol=0, atol=32 * 40 / 0.8 * EPS[torch.float32])


# The layers share a graph. torch.compile leaves torch's own LayerNorm, one kernel, as it is.
@pytest.mark.parametrize(
    ("config_class", "names", "n_graphs"),
    [(LlamaConfig, {"norm", "rotary_emb"}, 3), (GPT2Config, {"ln_f"}, 1)],
    ids=["llama", "gpt2"],
)
def test_the_last_norm_and_the_rotary_embedding_are_compiled(config_class, names, n_graphs, monkeypatch):
    model = small(config_class)
    batch = collate(random_sequences(3, 211), pad_id=0)
    plain = model(batch.input_ids, use_cache=False).logits
    graphs: list[int] = []

    def backend(graph, inputs, **_):
        graphs.append(1)
        return graph.forward

    monkeypatch.setattr(models.tile_compiler, "inductor", backend)
    compile_layers(model)
    compiled = {name for name, module in model.named_modules() if module._compiled_call_impl is not None}
    outside = {name for name in compiled if not name.rpartition(".")[2].isdigit()}
    assert {name.rpartition(".")[2] for name in outside} == names
    assert compiled - outside and all(name.startswith(("model.", "transformer.")) for name in outside)
    torch._dynamo.reset()
    assert torch.equal(model(batch.input_ids, use_cache=False).logits, plain)
    assert len(graphs) == n_graphs


@pytest.mark.slow
def test_compiled_layers_recompute_what_their_gradients_need(monkeypatch):
    # inductor's partition of forward and backward pass, run by torch: inductor itself takes long on a CPU.
    partitioned = torch._dynamo.lookup_backend("aot_eager_decomp_partition")
    monkeypatch.setattr(torch._dynamo, "lookup_backend", lambda name: partitioned)
    ids = torch.randint(3, 211, (2, 24))

    def run(model):
        saved = []
        with (
            torch.autograd.graph.saved_tensors_hooks(lambda t: (saved.append(t), t)[1], lambda t: t),
            torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile,
        ):
            model.model(input_ids=ids, use_cache=False).last_hidden_state.square().sum().backward()
        activations = sum(t.nbytes for t in saved if not isinstance(t, torch.nn.Parameter))
        n_products = sum(event.count for event in profile.key_averages() if event.key == "aten::mm")
        return activations, n_products, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    plain, checkpointed, compiled = (small(LlamaConfig).train() for _ in range(3))
    for model in (checkpointed, compiled):
        model.gradient_checkpointing_enable({"use_reentrant": False})
    compile_layers(compiled)
    assert not any(layer.gradient_checkpointing for layer in compiled.model.layers)
    run(compiled)  # compiles
    compiled.zero_grad()
    expected = run(plain)[2]
    activations, n_products, grads = run(compiled)
    n_layers = len(plain.model.layers)
    # A layer keeps its input; cosines and sines of the positions are no larger, and the last norm is not in a layer.
    assert activations <= 2 * (n_layers + 4) * ids.numel() * plain.config.hidden_size * 4
    # Seven products of a layer have three each, forward and backward, and all but the last one are recomputed.
    assert n_products == n_layers * (3 * 7 + 6)
    assert grads.keys() == expected.keys()
    for name, grad in grads.items():
        torch.testing.assert_close(grad, expected[name], rtol=1e-4, atol=1e-5 * expected[name].abs().max(), msg=name)


def test_sampling_runs_eagerly():
    model, graphs = small(LlamaConfig), []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    def sample():
        return generate(model, [[5, 6, 7], [8]], Sampling(4, temperature=0.0), pad_id=0, eos_ids=[210])

    expected = sample()
    for layer in model.model.layers:
        layer.compile(backend=backend)
    assert sample() == expected and graphs == []
    model(torch.tensor([[5, 6, 7]]), use_cache=False)
    assert graphs  # outside they are compiled
