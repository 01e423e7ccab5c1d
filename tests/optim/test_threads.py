"""Gradients that several autograd threads deliver at the same time."""

import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from sparse_opt import MaskSet, SparseAdamW, SparseSGD, backends

PAUSE = 0.4  # seconds in which another thread completes code that no lock protects


@pytest.fixture(params=["cpu", "reference"])
def backend(request):
    why = backends.why_unavailable(request.param, "cpu")
    if why:
        pytest.skip(f"needs backend {request.param!r}: {why}")
    return request.param


def two_buckets(backend, kind=SparseAdamW, **options):
    """Two parameters in a group each, and so in a bucket each; all their elements are active."""
    params = {name: nn.Parameter(torch.ones(64)) for name in ("a", "b")}
    mask = MaskSet.from_bool({name: torch.ones(64, dtype=torch.bool) for name in params})
    groups = [{"params": [named]} for named in params.items()]
    return params, kind(groups, mask, lr=1e-3, backend=backend, **options)


def deliver(param, factor):
    """A backward pass whose gradient of `param` is `factor` everywhere."""
    (param * factor).sum().backward()


def in_thread(work, *args):
    """Starts `work` in a thread; the event is set when it is done."""
    done = threading.Event()

    def run():
        try:
            return work(*args)
        finally:
            done.set()

    pool = ThreadPoolExecutor(1)
    future = pool.submit(run)
    pool.shutdown(wait=False)
    return future, done


@pytest.mark.parametrize("options", [{}, {"amp_scaling": True}], ids=["", "scaler"])
def test_first_gradients_after_a_step_come_from_two_threads(backend, options, monkeypatch):
    params, optimizer = two_buckets(backend, **options)
    for param in params.values():
        deliver(param, 5.0)
    optimizer.step()
    buffer_type, others = type(optimizer.gradient_buffers[0]), []
    drop = buffer_type.drop

    def drop_while_another_gradient_arrives(buffer):
        if not others:
            others.append(in_thread(deliver, params["b"], 3.0))
            others[0][1].wait(PAUSE)
        drop(buffer)

    monkeypatch.setattr(buffer_type, "drop", drop_while_another_gradient_arrives)
    deliver(params["a"], 2.0)
    others[0][0].result(timeout=10)
    assert torch.equal(optimizer.compact_grad(params["a"]), torch.full((64,), 2.0))
    found = optimizer.compact_grad(params["b"])
    assert found is not None, "the gradient of the other thread was dropped"
    assert torch.equal(found, torch.full((64,), 3.0))


def test_two_threads_deliver_tiles_of_one_weight(backend, monkeypatch):
    """Both are the weight's first; the second must be added, not overwrite. Through the Python path (a scaler's)."""
    layer = nn.Linear(64, 64, bias=False)
    mask = MaskSet.random(layer, density=1.0, pattern="tile64")
    optimizer = SparseSGD(layer, mask, lr=0.1, amp_scaling=True, tile_backward=True, backend=backend)
    inputs = [torch.full((2, 64), value) for value in (1.0, 3.0)]
    for x in inputs:
        layer(x).sum().backward()
    expected = optimizer.compact_grad(layer.weight).clone()
    optimizer.zero_grad()

    ops, both = optimizer.gradient_buffers[0].ops, threading.Barrier(2)
    multiply = ops.tile_weight_grad_

    def multiply_later(*args, **kwargs):
        """Whether to add or to overwrite is in the arguments already."""
        try:
            both.wait(PAUSE)
        except threading.BrokenBarrierError:
            pass  # the other thread waits for a lock
        multiply(*args, **kwargs)

    monkeypatch.setattr(ops, "tile_weight_grad_", multiply_later)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda x: layer(x).sum().backward(), inputs))
    assert torch.equal(optimizer.compact_grad(layer.weight), expected)


def test_a_late_notification_does_not_open_the_base_weights(monkeypatch):
    """One thread is about to let a buffer receive gradients directly while another enters base_weights()."""
    why = backends.why_unavailable("cpu", "cpu")
    if why:
        pytest.skip(f"needs the extension: {why}")
    params, optimizer = two_buckets("cpu")
    deliver(params["a"], 1.0)
    optimizer.step()
    entered, leave = threading.Event(), threading.Event()
    before = params["a"].sum()

    def stay_inside():
        with optimizer.base_weights():
            entered.set()
            leave.wait(10)

    others = []

    buffer_type = type(optimizer.gradient_buffers[0])
    set_direct = buffer_type.set_direct

    def set_direct_late(buffer, direct):
        if direct and not others:
            others.append(in_thread(stay_inside)[0])
            entered.wait(PAUSE)
        set_direct(buffer, direct)

    monkeypatch.setattr(buffer_type, "set_direct", set_direct_late)
    optimizer.zero_grad()
    assert entered.wait(10)
    try:
        with pytest.raises(RuntimeError, match="arrived inside base_weights"):
            before.backward()
    finally:
        leave.set()
        others[0].result(timeout=10)


def test_many_steps_of_two_threads(sparse_optimizer, backend):
    """No gradient is lost, none is of an earlier step, and there is no deadlock."""
    params, optimizer = two_buckets(backend, sparse_optimizer)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(2) as pool:
            for step in range(1, 100):
                start = threading.Barrier(2)

                def run(name, start=start, step=step):
                    start.wait()
                    deliver(params[name], float(step))

                list(pool.map(run, params))
                for name, param in params.items():
                    found = optimizer.compact_grad(param)
                    assert found is not None and torch.equal(found, torch.full((64,), float(step))), (step, name)
                optimizer.step()
    finally:
        sys.setswitchinterval(interval)
