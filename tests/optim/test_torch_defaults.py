"""Nothing relies on torch's default device and dtype, which many scripts set: the same bits under each of them.

On a machine without a GPU the default device is meta: a tensor that is made there by mistake has no values, and the
work fails.
"""

from __future__ import annotations

import functools
import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sparse_opt import MaskSet, SparseAdamW

SETTINGS = {
    "float64": ("float64", None),
    "bfloat16": ("bfloat16", None),
    "float16": ("float16", None),
    "meta": (None, "meta"),
    "float64-meta": ("float64", "meta"),
}


@contextmanager
def defaults(dtype: str | None, device: str | None) -> Iterator[None]:
    """float32 and the CPU unless named otherwise, whatever the suite runs under."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, dtype or "float32"))
    try:
        with torch.device(device or "cpu"):  # what torch.set_default_device enters for the whole process
            yield
    finally:
        torch.set_default_dtype(before)


Results = dict[str, Tensor]


@functools.cache
def under_usual_defaults(work: Callable[..., Results], *args: Any, **options: Any) -> Results:
    with defaults(None, None):
        return work(*args, **options)


def assert_same_under(
    setting: tuple[str | None, str | None], work: Callable[..., Results], *args: Any, **options: Any
) -> None:
    """`work` has the same bits under these defaults. What it makes itself names its device and dtype."""
    expected = under_usual_defaults(work, *args, **options)
    with defaults(*setting):
        found = work(*args, **options)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and found[name].device == tensor.device, name
        assert torch.equal(found[name], tensor), name
    assert len(expected) > 1


def randn(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype, seed: int) -> Tensor:
    generator = torch.Generator(device="cpu").manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cpu", dtype=torch.float32).to(device, dtype)


def make_model(device: torch.device, dtype: torch.dtype = torch.float32) -> nn.Module:
    model = nn.Sequential(*(nn.Linear(*s, device=device, dtype=dtype) for s in ((128, 64), (64, 64), (64, 3))))
    with torch.no_grad():
        for i, p in enumerate(model.parameters()):
            p.copy_(randn(tuple(p.shape), device, dtype, i) / 8)
    return model


def backward(model: nn.Module, seed: int, device: torch.device, scaler: torch.amp.GradScaler | None = None) -> None:
    dtype = next(model.parameters()).dtype
    loss = model(randn((5, 128), device, dtype, seed)).float().square().mean()
    (loss if scaler is None else scaler.scale(loss)).backward()


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> Results:
    found = {name: p.detach().clone() for name, p in model.named_parameters()}
    for key, values in optimizer.state_dict()["state"].items():
        found |= {f"{key} {name}": value.clone() for name, value in values.items()}
    return found


def training(device: torch.device, backend: str | None, pattern: str, dtype: torch.dtype, **options) -> Results:
    """Steps, clipping, base weights, a state saved and loaded, another mask."""
    model = make_model(device, dtype)
    mask = MaskSet.random(model, density=0.4, pattern=pattern, seed=1)
    optimizer = SparseAdamW(model, mask, lr=1e-2, backend=backend, **options)
    found = {}
    for seed in range(3):
        backward(model, seed, device)
        backward(model, seed + 10, device)
        optimizer.step()
        optimizer.zero_grad()
    model[1].weight.float().square().sum().backward()  # the others have no gradient
    found["norm"] = optimizer.clip_grad_norm_(0.5).clone()
    optimizer.step()
    found["nothing"] = optimizer.clip_grad_norm_(0.5).clone()
    with optimizer.base_weights():
        found |= {f"base {name}": p.detach().clone() for name, p in model.named_parameters()}
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True, map_location=device)
    found |= state_of(model, optimizer)
    optimizer.close()

    again = make_model(device, dtype)
    again.load_state_dict(saved["model"])
    resumed = SparseAdamW(again, mask, lr=0.5, backend=backend, **options)
    resumed.load_state_dict(saved["optimizer"])
    backward(again, 5, device)
    resumed.step()
    resumed.set_mask(MaskSet.random(again, density=0.3, pattern=pattern, seed=2))
    backward(again, 6, device)
    resumed.step()
    with resumed.base_weights():
        found |= {f"base after {name}": p.detach().clone() for name, p in again.named_parameters()}
    return found | {f"after {name}": value for name, value in state_of(again, resumed).items()}


OPTIONS = {
    "compact": {"max_grad_norm": 1.0},
    "dense": {"grads": "dense", "max_grad_norm": 1.0},
    "stochastic": {"state_dtype": torch.bfloat16, "stochastic_rounding": True, "grad_dtype": torch.bfloat16},
    "master": {"master_weights": True},
}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize(("pattern", "dtype"), [("element", torch.float32), ("run16", torch.bfloat16)], ids=str)
@pytest.mark.parametrize("setting", SETTINGS)
def test_training(setting, pattern, dtype, options, backend):
    device = torch.device("cpu")
    assert_same_under(SETTINGS[setting], training, device, backend, pattern, dtype, **OPTIONS[options])


GPU_SETTINGS = {"cuda": (None, "cuda"), "float64-cuda": ("float64", "cuda")}


@pytest.mark.gpu
@pytest.mark.parametrize("model_device", ["cuda", "cpu"])
@pytest.mark.parametrize("setting", GPU_SETTINGS)
def test_default_device_cuda(setting, model_device, backend):
    """The model on the GPU, as in most scripts that set it; and on the CPU."""
    device, setting = torch.device(model_device), GPU_SETTINGS[setting]
    assert_same_under(setting, training, device, backend, "element", torch.float32, max_grad_norm=1.0)
