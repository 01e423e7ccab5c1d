"""Without sparse_opt._autograd, as with a wheel before `sparse-opt build`: Python code gives the same bits."""

import warnings

import pytest
import torch
from torch import Tensor, nn

from sparse_opt import MaskSet, SparseAdamW, backends


def trained(pattern: str, grads: str) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 192), nn.Linear(192, 64, bias=False))
    mask = MaskSet.random(model, density=0.3, pattern=pattern, seed=1)
    optimizer = SparseAdamW(model, mask, lr=1e-2, max_grad_norm=1.0, grads=grads, backend="cpu")
    for step in range(4):
        for _ in range(1 + step % 2):  # accumulation
            model(torch.randn(8, 128)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


@pytest.mark.parametrize(("pattern", "grads"), [("element", "compact"), ("element", "dense"), ("tile64", "compact")])
def test_the_bits_are_the_same(monkeypatch, pattern, grads, autograd_library):
    native = trained(pattern, grads)
    monkeypatch.setattr(backends, "autograd_module", lambda: (None, "a wheel does not have it"))
    assert all(tensor.equal(native[name]) for name, tensor in trained(pattern, grads).items())


def test_one_warning_names_the_cause_and_the_cost(monkeypatch):
    if why := backends.why_unavailable("cpu", "cpu"):
        pytest.skip(f"needs the extension: {why}")
    monkeypatch.setattr(backends, "autograd_module", lambda: (None, "the cause in this test"))
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        trained("element", "compact")
        trained("element", "dense")
    (message,) = (str(warning.message) for warning in seen if "_autograd" in str(warning.message))
    assert "the cause in this test: gradients are collected in Python" in message and "in place of" in message
