"""Other threads can run Python during native calls, which release the interpreter's lock."""

import threading
import time

import pytest
import torch
from torch import nn

from sparse_opt import MaskSet, SparseSGD, backends

SIZE = 1 << 22  # elements; each call below takes some milliseconds at least


@pytest.fixture(autouse=True)
def native():
    why = backends.why_unavailable("cpu", "cpu")
    if why:
        pytest.skip(f"needs the extension: {why}")


class Ticking:
    """A context with a thread that records the time whenever it runs."""

    def __enter__(self):
        self.ticks, self._stop = [], False
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        return self

    def __exit__(self, *exc_info):
        self._stop = True
        self._thread.join()

    def _run(self):
        while not self._stop:
            self.ticks.append(time.perf_counter())
            time.sleep(0)


def assert_others_run_meanwhile(call, before=lambda: None):
    """Assert that another thread runs Python during the middle half of `call()`, nearly all of it native code.

    `before()` is called before each attempt.
    """
    give_up = time.monotonic() + 20.0
    while time.monotonic() < give_up:  # a busy machine may not give the other thread a core
        before()
        with Ticking() as other:
            start = time.perf_counter()
            call()
            end = time.perf_counter()
        quarter = (end - start) / 4
        if any(start + quarter < tick < end - quarter for tick in other.ticks):
            return
    pytest.fail(f"no other thread ran during a call of {1e3 * (end - start):.1f} ms")


def optimizer_of(kind, **options):
    param = nn.Parameter(torch.randn(SIZE // 1024, 1024))
    mask = MaskSet.from_bool({"w": torch.ones(param.shape, dtype=torch.bool)})
    return param, kind([("w", param)], mask, lr=1e-3, backend="cpu", **options)


@pytest.mark.parametrize("grads", ["compact", "dense"])
def test_step(sparse_optimizer, grads):
    param, optimizer = optimizer_of(sparse_optimizer, grads=grads)
    assert_others_run_meanwhile(optimizer.step, before=lambda: param.sum().backward())  # a step consumes the gradient


@pytest.mark.parametrize("call", ["swap", "gather", "compare"])
def test_ops(call):
    param, optimizer = optimizer_of(SparseSGD)
    (buffer,) = optimizer.gradient_buffers
    dense, ops = torch.randn_like(param), torch.ops.sparse_opt_native
    where = buffer.indices, buffer.starts, buffer.ends
    calls = {
        "swap": lambda: ops.indexed_swap_([dense], torch.zeros(buffer.nnz), *where, **buffer.layout()),
        "gather": lambda: buffer.add_dense(0, dense),
        "compare": lambda: ops.delta_encode([param.detach()], [dense]),
    }
    assert_others_run_meanwhile(calls[call])
