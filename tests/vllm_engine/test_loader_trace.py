"""The places of checkpoint weights in vLLM's models, traced through vLLM's own loaders."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")

from vllm.distributed import parallel_state
from vllm_lab import EXPERTS, block, make_model

from sparse_opt.errors import WeightSyncError
from sparse_opt.integrations.loader_trace import trace_destinations
from sparse_opt.masks.patterns import matrix_shape
from sparse_opt.weight_sync import Destination

MODELS = {
    "llama": ("Llama", {"tie_word_embeddings": False}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True}),
    "qwen2-biases": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3-head-norms": ("Qwen3", {"tie_word_embeddings": False, "head_dim": 32}),
}


def weights_of(model: nn.Module) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    return {name: (tuple(p.shape), p.dtype) for name, p in model.named_parameters()}


def times_loaded(weight: Tensor, slices: list[Destination]) -> Tensor:
    """How many slices hold each element."""
    counts = torch.zeros(weight.shape, dtype=torch.int)
    for piece in slices:
        block(counts, piece).add_(1)
    return counts


@pytest.mark.parametrize("kind", MODELS)
def test_slices_hold_the_weights_of_the_checkpoint(kind, vllm_model):
    name, overrides = MODELS[kind]
    source = make_model(name, **overrides)
    target = vllm_model(source, processed=False)
    before = {n: p.detach().clone() for n, p in target.named_parameters()}
    slices = trace_destinations(target, weights_of(source))
    assert all(torch.equal(p, before[n]) for n, p in target.named_parameters())
    for name, weight in source.named_parameters():
        assert torch.equal(times_loaded(weight, slices[name]), torch.ones(weight.shape, dtype=torch.int)), name
        for piece in slices[name]:
            assert torch.equal(piece.tensor, block(weight, piece)), name
            piece.tensor.fill_(7)
    # They are the weights themselves and not copies: only the padding of the vocabulary is not written.
    for name, parameter in target.named_parameters():
        loaded = parameter[:100] if name in ("model.embed_tokens.weight", "lm_head.weight") else parameter
        assert bool((loaded == 7).all()), name


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("kind", MODELS)
def test_slices_of_tensor_parallel_ranks(kind, ranks, vllm_model, monkeypatch):
    name, overrides = MODELS[kind]
    source = make_model(name, **overrides)
    counts: dict[str, Tensor] = {n: torch.zeros(p.shape, dtype=torch.int) for n, p in source.named_parameters()}
    for rank in range(ranks):
        # vLLM's layers ask their group for rank and size when they are built, and communicate in the forward pass only.
        monkeypatch.setattr(parallel_state, "_TP", SimpleNamespace(rank_in_group=rank, world_size=ranks))
        target = vllm_model(source, processed=False)
        slices = trace_destinations(target, weights_of(source))
        for name, weight in source.named_parameters():
            counts[name] += times_loaded(weight, slices[name])
            assert all(torch.equal(piece.tensor, block(weight, piece)) for piece in slices[name]), name
    for name, weight in source.named_parameters():
        whole_copies = ranks // 2 if name.split(".")[-2] in ("k_proj", "v_proj") else 1  # two kv heads
        if (weight.ndim == 1 and "norm" in name) or name.endswith("o_proj.bias"):
            whole_copies = ranks
        assert torch.equal(counts[name], torch.full(weight.shape, whole_copies, dtype=torch.int)), name


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("kind", EXPERTS)
def test_slices_of_the_experts_of_a_layer(kind, ranks, vllm_model, monkeypatch):
    name, overrides = EXPERTS[kind]
    source = make_model(name, **overrides)
    weights = weights_of(source)
    if ranks > 1:  # one rank adds GPT-OSS's bias of all; loaders of the others overwrite the checkpoint's by zeros
        weights = {name: weight for name, weight in weights.items() if not name.endswith("down_proj_bias")}
    counts = {name: torch.zeros(shape, dtype=torch.int) for name, (shape, _) in weights.items()}
    for rank in range(ranks):
        monkeypatch.setattr(parallel_state, "_TP", SimpleNamespace(rank_in_group=rank, world_size=ranks))
        target = vllm_model(source, processed=False)
        slices = trace_destinations(target, weights, config=target.lab_config.model_config.hf_config)
        for name in weights:
            weight = source.get_parameter(name)
            counts[name] += times_loaded(weight, slices[name])
            assert all(torch.equal(piece.tensor, block(weight, piece)) for piece in slices[name]), name
            if ranks == 1 and kind != "gpt-oss":  # whose loader transposes each expert
                assert len(slices[name]) == 1, name
    for name, count in counts.items():
        assert int(count.min()) >= 1, name
        if name.endswith((".experts.gate_up_proj", ".experts.down_proj")):
            assert int(count.max()) == 1, name


class Loader(nn.Module):
    """A model whose loader is `load(parameter, weight)`."""

    def __init__(self, load, dtype=torch.float32):
        super().__init__()
        self.load = load
        self.weight = nn.Parameter(torch.zeros(4, 6, dtype=dtype), requires_grad=False)

    def load_weights(self, weights):
        for _, weight in weights:
            self.load(self.weight, weight)


def load_with_data(parameter, weight):
    parameter.data = weight


REFUSED = {
    "computes": (lambda p, w: p.data.copy_(w + 1), "computes new values"),
    "reorders": (lambda p, w: p.data.copy_(w.flip(0)), "computes new values"),
    "adds": (lambda p, w: p.data.add_(w), "calls aten.add_"),
    "composed": (lambda p, w: (p.data.copy_(w), p.data.copy_(p.data * 2)), "copies values that are not in the check"),
    "reads": (lambda p, w: p.data.fill_(w[0, 0].item()), "reads values"),
    "broadcasts": (lambda p, w: p.data.copy_(w[:1]), "copies shape"),
    "replaces": (load_with_data, "replaces the data"),
    "strides": (lambda p, w: p.data[:, :3].copy_(w[:, ::2]), "expected a block of rows and columns"),
    "fails": (lambda p, w: p.data.copy_(w.view(5, 5)), "RuntimeError: "),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_other_loaders_are_refused_by_the_name_of_the_weight(kind):
    load, message = REFUSED[kind]
    model = Loader(load)
    with pytest.raises(WeightSyncError, match=rf"(?s)weight layer\.weight.*{message}"):
        trace_destinations(model, {"layer.weight": ((4, 6), torch.float32)})
    assert torch.equal(model.weight, torch.zeros(4, 6)) and not model.weight.is_meta


def test_a_conversion_of_the_dtype_is_refused():
    model = Loader(lambda p, w: p.data.copy_(w), dtype=torch.bfloat16)
    with pytest.raises(WeightSyncError, match="converts torch.float32 to torch.bfloat16"):
        trace_destinations(model, {"w": ((4, 6), torch.float32)})


LOADED = {
    "whole": lambda p, w: p.data.copy_(w),
    "flat": lambda p, w: p.data.view(-1).copy_(w.view(-1)),
    "by rows": lambda p, w: [p.data[i].copy_(w[i]) for i in range(4)],
    "by elements": lambda p, w: [p.data[i, j].copy_(w[i, j]) for i in range(4) for j in range(6)],
    "halves exchanged": lambda p, w: [p.data[2:].copy_(w[:2]), p.data[:2].copy_(w[2:])],
    "transposed": lambda p, w: p.data.view(6, 4).copy_(w.t()),
    "every second row": lambda p, w: [p.data[::2].copy_(w[:2]), p.data[1::2].copy_(w[2:])],
    "interleaved heads": lambda p, w: p.data.view(2, 2, 6).transpose(0, 1).copy_(w.view(2, 2, 6)),
    "three dimensions": lambda p, w: p.data.view(2, 2, 6).copy_(w.view(2, 2, 6)),
    "padded": lambda p, w: [p.data[:3].copy_(w[:3]), p.data[3:].fill_(0)],
}


@pytest.mark.parametrize("kind", LOADED)
def test_writing_to_the_slices_loads_the_weight(kind):
    loaded, written = Loader(LOADED[kind]), Loader(LOADED[kind])
    weight = torch.arange(24.0).view(4, 6)
    loaded.load_weights([("w", weight)])
    for piece in trace_destinations(written, {"w": ((4, 6), torch.float32)})["w"]:
        piece.tensor.copy_(block(weight, piece))
    assert torch.equal(written.weight, loaded.weight)


@pytest.mark.parametrize("shape", [(), (1,), (5,), (3, 1), (1, 3), (2, 3, 4)])
def test_weights_of_other_dimensions(shape):
    model = Loader(lambda p, w: p.data.copy_(w))
    model.weight = nn.Parameter(torch.zeros(shape), requires_grad=False)
    (piece,) = trace_destinations(model, {"w": (shape, torch.float32)})["w"]
    assert piece.tensor.shape == matrix_shape(shape) and piece.tensor.data_ptr() == model.weight.data_ptr()
