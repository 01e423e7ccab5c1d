"""Tests that need a GPU: a step does not wait for the device, and launches few kernels."""

import pytest
import torch

from sparse_opt import MaskSet, SparseAdamW, backends

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

FAST = [b for b in ("cuda", "triton") if b in backends.available("cuda")]


def make_model(depth=6, dtype=torch.bfloat16):
    torch.manual_seed(0)
    layers = [torch.nn.Linear(64, 64, bias=False) for _ in range(depth)]
    return torch.nn.Sequential(*layers).to("cuda", dtype)


def backward(model, seed=0):
    generator = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(16, 64, device="cuda", dtype=torch.bfloat16, generator=generator)
    model(x.to(next(model.parameters()).dtype)).float().square().mean().backward()


@pytest.mark.parametrize("pattern", ["element", "run32"])
@pytest.mark.parametrize("grads", ["compact", "dense"])
@pytest.mark.parametrize("backend", FAST)
def test_nothing_in_a_step_synchronises(backend, grads, pattern):
    model = make_model()
    mask = MaskSet.random(model, density=0.1, pattern=pattern)
    optimizer = SparseAdamW(model, mask, grads=grads, max_grad_norm=1.0, backend=backend)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: 0.9**s)
    for step in range(4):
        if step == 1:  # the first step may compile kernels and fill tables
            torch.cuda.set_sync_debug_mode("error")
        try:
            backward(model, step)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            with torch.no_grad(), optimizer.base_weights():
                pass
        finally:
            if step == 3:
                torch.cuda.set_sync_debug_mode("default")


def launches(work):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        work()
        torch.cuda.synchronize()
    return sum(e.count for e in profile.key_averages() if e.device_type == torch.autograd.DeviceType.CUDA)


@pytest.mark.parametrize("pattern", ["element", "run32"])
@pytest.mark.parametrize("grads", ["compact", "dense"])
@pytest.mark.parametrize("backend", FAST)
def test_launches_do_not_grow_with_the_number_of_parameters(backend, grads, pattern):
    counts = []
    for depth in (2, 40):
        model = make_model(depth)
        mask = MaskSet.random(model, density=0.1, pattern=pattern)
        optimizer = SparseAdamW(model, mask, grads=grads, max_grad_norm=1.0, backend=backend)
        for _ in range(2):
            optimizer.zero_grad()
            backward(model)
            optimizer.step()
        backward(model)
        torch.cuda.synchronize()
        counts.append(launches(optimizer.step))
    assert counts[0] == counts[1] <= 14


@pytest.mark.parametrize("depth", [3, 700])  # 700: more parameters than one launch takes
def test_norm_and_clip_coefficient_come_from_one_call(depth, autograd_library):
    torch.manual_seed(0)
    model = torch.nn.ParameterList([torch.nn.Parameter(torch.randn(33 + i % 5, 64)) for i in range(depth)]).cuda()
    optimizer = SparseAdamW(model, MaskSet.random(model, density=0.3), backend="cuda")
    (buffer,) = optimizer.gradient_buffers
    for step in range(3):
        torch.stack([(param * param).sum() * (1 + step) for param in model]).sum().backward()
        found = torch.cat([optimizer.compact_grad(param) for param in model])
        expected = found.double().norm().float()
        for max_norm in (float(expected) / 3, float(expected) * 3):
            norm, coefficient = buffer.clip(max_norm)
            torch.testing.assert_close(norm, expected, rtol=1e-6, atol=0)
            torch.testing.assert_close(coefficient, (max_norm / (norm + 1e-6)).clamp(max=1.0), rtol=2e-7, atol=0)
        norm = optimizer.clip_grad_norm_(1.0)
        assert torch.equal(norm, buffer.clip(1.0)[0])
        optimizer.step()
    (model[1] * float("nan")).sum().backward()
    torch.stack([param.sum() for param in model]).sum().backward()
    assert all(value.isnan() for value in buffer.clip(1.0))


def test_clipping_is_one_launch(autograd_library):
    model = make_model()
    optimizer = SparseAdamW(model, MaskSet.random(model, density=0.1), backend="cuda")
    for seed in range(2):
        backward(model, seed)
        optimizer.gradient_buffers[0].finish()
        torch.cuda.synchronize()
        n = launches(lambda: optimizer.clip_grad_norm_(1.0))
        optimizer.step()
    assert n == 1
