"""A parameter that is replaced after the optimizer was built is named, and `rebind` trains the new one."""

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from sparse_opt import MaskSet, SparseAdamW


def new_state(model):
    return {name: torch.randn_like(p) for name, p in model.state_dict().items()}


def swap(model):
    weight = model.inner[0].weight
    torch.utils.swap_tensors(weight, nn.Parameter(torch.randn_like(weight)))


REPLACE = {
    "assign": lambda model: model.load_state_dict(new_state(model), assign=True),
    "attribute": lambda model: setattr(model.inner[0], "weight", nn.Parameter(torch.randn(8, 8))),
    "layer": lambda model: model.inner.__setitem__(0, nn.Linear(8, 8)),
    "module": lambda model: setattr(model, "inner", nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))),
    "swap": swap,
}


def build(backend=None, grads="compact"):
    model = nn.Module()
    model.inner = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    mask = MaskSet.random(model, density=0.5, seed=0)
    return model, SparseAdamW(model, mask, lr=0.1, backend=backend, grads=grads)


def backward(model):
    model.inner(torch.ones(2, 8)).sum().backward()


def enter_base(optimizer):
    with optimizer.base_weights():
        pass


READS = {
    "step": lambda optimizer: optimizer.step(),
    "clip": lambda optimizer: optimizer.clip_grad_norm_(1.0),
    "base_weights": enter_base,
    "compact_grad": lambda optimizer: optimizer.compact_grad(optimizer.param_groups[0]["params"][0]),
    "active_weights": lambda optimizer: optimizer.active_weights(),
    "set_mask": lambda optimizer: optimizer.set_mask(optimizer.mask),
}


@pytest.mark.parametrize("grads", ["compact", "dense"])
@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("how", REPLACE)
def test_a_replaced_parameter_is_named(how, read, grads):
    # The native backend holds the tensors, so that torch itself refuses to swap them.
    model, optimizer = build("reference" if how == "swap" else None, grads)
    READS["base_weights"](optimizer)
    REPLACE[how](model)
    with pytest.raises(RuntimeError, match=r"'inner\.0\.weight' was replaced.*rebind\(model\)"):
        READS[read](optimizer)


@pytest.mark.parametrize("how", REPLACE)
def test_rebind_trains_the_new_parameters(how):
    model, optimizer = build("reference" if how == "swap" else None)
    REPLACE[how](model)
    optimizer.rebind(model)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    backward(model)
    optimizer.step()
    for name, param in model.named_parameters():
        changed = (param.detach() != before[name]).view(-1).nonzero().view(-1)
        assert torch.equal(changed, optimizer.mask[name].long())
    with optimizer.base_weights():
        assert all(torch.equal(param, before[name]) for name, param in model.named_parameters())


def test_a_parameter_that_only_moves_is_still_trained():
    model, optimizer = build()

    class Same(nn.Module):
        def forward(self, x):
            return x

    weight = model.inner[0].weight
    before = weight.detach().clone()
    parametrize.register_parametrization(model.inner[0], "weight", Same())
    model.inner = nn.Sequential(*model.inner)
    backward(model)
    optimizer.step()
    assert not torch.equal(weight, before)


def test_parameters_that_are_not_of_the_model():
    model, other = build()
    other.close()
    head = nn.Linear(8, 1)
    named = [*model.named_parameters(), *(("head." + name, p) for name, p in head.named_parameters())]
    optimizer = SparseAdamW(named, MaskSet.random(dict(named), density=0.5), lr=0.1, model=model)
    model.inner = nn.Sequential(*model.inner)  # the parameters have moved
    before = head.weight.detach().clone()
    head(model.inner(torch.ones(2, 8))).sum().backward()
    optimizer.step()
    assert not torch.equal(head.weight, before)


def test_of_tied_parameters_one_may_go():
    model, optimizer = build()
    model.inner.append(nn.Linear(8, 8))
    model.inner[2].weight = model.inner[0].weight
    optimizer = SparseAdamW(model, optimizer.mask, lr=0.1)
    model.inner[2].weight = nn.Parameter(torch.randn(8, 8))
    backward(model)
    optimizer.step()
    model.inner[0].weight = nn.Parameter(torch.randn(8, 8))
    with pytest.raises(RuntimeError, match="was replaced"):
        optimizer.step()
