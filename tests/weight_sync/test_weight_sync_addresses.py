"""Addresses: a weight that was replaced, in a module or in a mapping."""

from __future__ import annotations

import copy

import torch
from torch import nn

from sparse_opt.weight_sync.destinations import Addresses


class Tied(nn.Module):
    """Has one tensor under two names, and one module under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
        self.head.weight = self.embedding.weight
        self.first = nn.Sequential(nn.Linear(4, 4))
        self.again = self.first
        self.scale = nn.Parameter(torch.ones(3))


def names_of(model: nn.Module) -> list[str]:
    return [name for name, _ in model.named_parameters(remove_duplicate=False)]


def test_one_name_of_a_tied_weight_is_enough():
    model = Tied()
    addresses = Addresses(model, names_of(model))
    model.head.weight = nn.Parameter(torch.zeros(5, 4))
    assert addresses.replaced() == "head.weight"


def test_replaced_submodules():
    model = Tied()
    addresses = Addresses(model, names_of(model))
    model.again = copy.deepcopy(model.first)
    assert addresses.replaced() == "again.0.weight"
    model.again = nn.Sequential(model.first[0])  # another module with the same parameters
    assert addresses.replaced() is None
    del model.again
    assert addresses.replaced() == "again.0.weight"


def test_weights_that_are_not_compared_may_change():
    model = Tied()
    addresses = Addresses(model, ["scale"])
    model.first = nn.Sequential(nn.Linear(4, 4))
    assert addresses.replaced() is None


def test_names_that_the_module_changes():
    class Renamed(Tied):
        def named_parameters(self, *args, **options):
            yield from ((f"model.{name}", param) for name, param in super().named_parameters(*args, **options))

    model = Renamed()
    addresses = Addresses(model, names_of(model))
    assert addresses.replaced() is None
    model.scale = nn.Parameter(torch.ones(3))
    assert addresses.replaced() == "model.scale"


def test_a_mapping():
    weights = {"a": torch.zeros(2), "b": torch.zeros(3)}
    addresses = Addresses(weights, ["a"])
    weights["b"] = torch.zeros(3)
    assert addresses.replaced() is None
    weights["a"] = torch.zeros(2)
    assert addresses.replaced() == "a"
    del weights["a"]
    assert addresses.replaced() == "a"
