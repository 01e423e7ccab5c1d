"""The loader for SGLang on a stand-in: a model with fused weights and a `load_weights`, as SGLang's models have."""

import gc
import weakref

import pytest
import torch
from torch import Tensor, nn

from sparse_opt import MaskSet
from sparse_opt.errors import DamagedMessage, ForeignMessage, OutOfOrderMessage, WeightSyncError
from sparse_opt.integrations.sglang import LOAD_FORMAT, load_message, named_tensors
from sparse_opt.weight_sync import WeightSender

STACKED = {"q_proj": slice(0, 8), "k_proj": slice(8, 12), "v_proj": slice(12, 16)}


class UnquantizedLinearMethod:
    """SGLang's method has this name; its module is not imported."""


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv_proj = nn.Linear(6, 16, bias=False)
        self.qkv_proj.quant_method = UnquantizedLinearMethod()
        self.norm = nn.LayerNorm(6, bias=False)

    def load_weights(self, weights: list[tuple[str, Tensor]]) -> None:
        parameters = dict(self.named_parameters())
        for name, weight in weights:
            layer, _, _ = name.partition(".")
            if layer in STACKED:
                parameters["qkv_proj.weight"].data[STACKED[layer]].copy_(weight)
            elif name in parameters:
                parameters[name].data.copy_(weight)


@pytest.fixture
def weights() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"q_proj.weight": (8, 6), "k_proj.weight": (4, 6), "v_proj.weight": (4, 6), "norm.weight": (6,)}
    return {name: torch.randn(shape, generator=generator).to(torch.bfloat16) for name, shape in shapes.items()}


@pytest.fixture
def model(weights) -> Model:
    loaded = Model().to(torch.bfloat16)
    loaded.load_weights(list(weights.items()))
    return loaded


@pytest.fixture
def sender(weights) -> WeightSender:
    return WeightSender(weights, MaskSet.random(weights, density=0.5, seed=1))


def change(weights: dict[str, Tensor], sender: WeightSender) -> None:
    for name, weight in weights.items():
        weight.view(-1)[sender.mask[name].long()] += 1


def same(model: Model, weights: dict[str, Tensor]) -> bool:
    fresh = Model().to(torch.bfloat16)
    fresh.load_weights(list(weights.items()))
    return all(torch.equal(a, b) for a, b in zip(model.parameters(), fresh.parameters(), strict=True))


def test_updates_reach_fused_weights(model, weights, sender):
    load_message(model, named_tensors(sender.mask_message()))
    load_message(model, named_tensors(sender.state_message()))
    for _ in range(3):
        change(weights, sender)
        load_message(model, named_tensors(sender.update()))
        assert same(model, weights)


def test_the_load_format_names_the_loader():
    module, _, name = LOAD_FORMAT.rpartition(".")
    assert (load_message.__module__, load_message.__name__) == (module, name)


def test_refused_messages_change_nothing(model, weights, sender):
    before = {name: weight.clone() for name, weight in weights.items()}
    with pytest.raises(OutOfOrderMessage):
        load_message(model, named_tensors(sender.state_message()))
    load_message(model, named_tensors(sender.mask_message()))
    change(weights, sender)
    first = named_tensors(sender.update())
    change(weights, sender)
    with pytest.raises(OutOfOrderMessage, match="version 2 follows version 1"):
        load_message(model, named_tensors(sender.update()))
    values = [(n, t + 1 if t.dtype == torch.bfloat16 else t) for n, t in first]
    with pytest.raises(DamagedMessage, match="values sent have digest"):
        load_message(model, values)
    with pytest.raises(DamagedMessage, match=r"without sparse_opt\.header"):
        load_message(model, first[1:])
    with pytest.raises(DamagedMessage, match="header of a message is malformed"):
        load_message(model, [(first[0][0], first[0][1][:-9]), *first[1:]])
    assert same(model, before)
    load_message(model, first)
    assert not same(model, before)


def test_unknown_weights_and_layouts_are_refused(model, weights, sender):
    other = {**weights, "gate.weight": torch.zeros(3, 6)}
    with pytest.raises(ForeignMessage, match="Model has no weight 'gate.weight'"):
        load_message(model, named_tensors(WeightSender(other, MaskSet.random(other, density=0.5)).mask_message()))

    class Fp8LinearMethod:
        pass

    model.qkv_proj.quant_method = Fp8LinearMethod()
    with pytest.raises(WeightSyncError, match="belongs to layer qkv_proj with Fp8LinearMethod"):
        load_message(model, named_tensors(sender.mask_message()))


def test_the_receiver_does_not_keep_its_model(weights, sender):
    model = Model().to(torch.bfloat16)
    load_message(model, named_tensors(sender.mask_message()))
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
