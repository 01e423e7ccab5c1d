"""Mistakes that no error stops: clipping that finds no gradients, and updates that rounding discards, warn once."""

import warnings

import pytest
import torch
from torch.nn.utils import clip_grad_norm_

from sparse_opt import MaskSet, SparseAdamW, SparseSGD


def backward(model):
    p = next(model.parameters())
    x = torch.randn(8, 32, generator=torch.Generator().manual_seed(0)).to(p.device, p.dtype)
    (100 * model(x).float().square().mean()).backward()


def texts_of(train, word):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train()
    return [str(warning.message) for warning in caught if word in str(warning.message)]


def loop_with_torch_clipping(model, optimizer):
    for _ in range(3):
        backward(model)
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


def loop_without_clipping(model, optimizer):
    for _ in range(3):
        backward(model)
        optimizer.step()


@pytest.mark.parametrize(
    ("loop", "options", "expected"),
    [
        (loop_with_torch_clipping, {}, 1),
        (loop_with_torch_clipping, {"max_grad_norm": 1.0}, 0),
        (loop_with_torch_clipping, {"grads": "dense"}, 0),
        (loop_without_clipping, {}, 0),
    ],
    ids=["torch", "the optimizer's, too", "dense gradients", "none"],
)
def test_torch_clipping_that_finds_no_gradients(loop, options, expected, device):
    model = torch.nn.Linear(32, 32).to(device)
    optimizer = SparseSGD(model, MaskSet.random(model, density=0.5), lr=1e-3, **options)
    texts = texts_of(lambda: loop(model, optimizer), "clip_grad_norm_")
    assert len(texts) == expected
    if texts:
        assert texts[0].startswith("loop_with_torch_clipping, which calls SparseSGD.step()")
        assert "max_grad_norm=" in texts[0] and "sparse_trainer" in texts[0]


@pytest.mark.parametrize("pattern", ["element", "tile64"])
@pytest.mark.parametrize(
    ("lr", "dtype", "options", "expected"),
    [
        (1e-6, torch.bfloat16, {}, 1),
        (1e-6, torch.bfloat16, {"grads": "dense"}, 1),
        (1e-6, torch.bfloat16, {"master_weights": True}, 0),
        (1e-6, torch.bfloat16, {"stochastic_rounding": True}, 0),
        (1e-6, torch.float32, {}, 0),
        (1e-2, torch.bfloat16, {}, 0),
        (0.0, torch.bfloat16, {}, 0),
    ],
)
def test_updates_that_round_away(lr, dtype, options, expected, pattern, device):
    torch.manual_seed(0)
    layers = torch.nn.Linear(32, 128), torch.nn.GELU(), torch.nn.Linear(128, 64), torch.nn.Linear(64, 4)
    model = torch.nn.Sequential(*layers).to(device, dtype)
    optimizer = SparseAdamW(model, MaskSet.random(model, density=0.5, pattern=pattern), lr=lr, **options)

    def train():
        for _ in range(30):
            backward(model)
            optimizer.step()
        if device.type == "cuda":
            torch.cuda.synchronize()
        backward(model)
        optimizer.step()

    texts = texts_of(train, "half a unit in the last place")
    assert len(texts) == expected
    if texts:
        assert "step 10 has changed" in texts[0] and "sampled torch.bfloat16 weights" in texts[0]


def test_weights_without_a_gradient_have_no_lost_updates(device):
    model = torch.nn.Embedding(1000, 8).to(device, torch.bfloat16)
    optimizer = SparseAdamW(model, MaskSet.random(model, density=1.0), lr=1e-2)

    def train():
        for _ in range(11):
            model(torch.arange(2, device=device)).float().square().mean().backward()
            optimizer.step()

    assert not texts_of(train, "in the last place")
