"""Signals while `base_weights()` is entered, used and left: the weights are the trained ones again afterwards."""

import contextlib
import itertools
import signal
import sys
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

import sparse_opt.optim.base_weights
import sparse_opt.optim.gradients.collector
from sparse_opt import MaskSet, SparseAdamW, backends
from sparse_opt.ops import BoundOps

# In these tests a signal arrives before every line, or before every instruction of the library.
OURS = [m.__file__ for m in (sparse_opt.optim.base_weights, sparse_opt.optim.gradients.collector)]
TRACED = [*OURS, contextlib.__file__, torch.autograd.grad_mode.__file__]


ON_A_GPU = [pytest.param((name, "cuda"), marks=pytest.mark.gpu, id=f"{name}-gpu") for name in ("cuda", "triton")]


@pytest.fixture(params=[("cpu", "cpu"), ("reference", "cpu"), *ON_A_GPU], ids=lambda param: param[0])
def backend(request):
    """(the backend's name, the device's type)"""
    name, device = request.param
    why = backends.why_unavailable(name, device)
    if why:
        pytest.skip(f"needs backend {name!r}: {why}")
    return name, device


@pytest.fixture(autouse=True)
def handlers():
    """The handlers of these signals during a test; Python's own for SIGINT, as in a program."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
    before = {number: signal.getsignal(number) for number in numbers}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


class Trained:
    """Two parameters of two dtypes, so that two calls swap them, trained for a step."""

    def __init__(self, backend):
        name, device = backend
        torch.manual_seed(0)
        values = {"a": torch.randn(40, device=device), "b": torch.randn(40, device=device).bfloat16()}
        self.params = {name: nn.Parameter(value) for name, value in values.items()}
        self.start = self.bits()
        mask = MaskSet.random(self.params, density=0.5)
        self.optimizer = SparseAdamW(list(self.params.items()), mask, lr=0.1, backend=name)
        sum(p.float().sum() for p in self.params.values()).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.before, self.versions = self.bits(), [p._version for p in self.params.values()]
        assert not any(map(torch.equal, self.before, self.start))

    def bits(self):
        return [p.detach().clone() for p in self.params.values()]

    def assert_unharmed(self, where=""):
        assert all(map(torch.equal, self.bits(), self.before)), f"the weights are not the trained ones: {where}"
        assert [p._version for p in self.params.values()] == self.versions, where
        assert all(p.requires_grad for p in self.params.values()), where
        self.optimizer.step()  # without gradients it changes nothing
        assert all(map(torch.equal, self.bits(), self.before)), where


class Signals:
    """While it traces, sends signals at the given places, counted from 0; `used` is the code around `base_weights()`.

    Python looks for signals at fewer places than these, but at no others: not between the end of a `with` block and
    the call of `__exit__`, so only lines within the block count in `used`. In a loop a place counts twice.
    """

    def __init__(self, used, body, sent):
        self.used, self.body, self.sent, self.places, self.where = used.__code__, body, sent, 0, ""
        self.times = Counter()

    def __enter__(self):
        sys.settrace(self.trace)

    def __exit__(self, *exc_info):
        sys.settrace(None)

    def trace(self, frame, event, arg):
        if frame.f_code is self.used:
            counts = event == "line" and frame.f_lineno - frame.f_code.co_firstlineno in self.body
        else:
            if frame.f_code.co_filename not in TRACED:
                return None
            frame.f_trace_opcodes = frame.f_code.co_filename in OURS
            counts = event != "exception"
        here = frame.f_code, frame.f_lasti, event
        self.times[here] += counts
        if counts and self.times[here] <= 2:
            place, self.places = self.places, self.places + 1
            for at, number in self.sent:
                if at == place:
                    self.where = f"{event} in {frame.f_code.co_qualname}:{frame.f_lineno}"
                    signal.raise_signal(number)
        return self.trace


def raises(expected, tracer, call, *args):
    """Whether the call raises it. (`pytest.raises` runs code of its own that is traced.)"""
    try:
        with tracer:
            call(*args)
    except expected:
        return True
    finally:
        sys.settrace(None)  # a trace function that raises is taken off, but not while another exception is handled
    return False


def every_place(code, body, *signals, first=0, step=1):
    """For each `step`th place a `Signals` that sends (signal, places later), until a place is not reached any more."""
    for place in itertools.count(first, step):
        tracer = Signals(code, body, [(place + later, number) for number, later in signals])
        yield tracer
        if not tracer.where:
            assert place > 300
            return


def use(trained, entered):
    with trained.optimizer.base_weights():
        entered.append(True)
        assert all(map(torch.equal, trained.bits(), trained.start))
        trained.params["a"].sum()


BODY = (2, 3, 4)  # the lines of `use`, from its first one, that are within the block


def test_ctrl_c_at_every_place(backend):
    trained = Trained(backend)
    step = 10 if backend[0] == "reference" else 1  # both differ in the ops alone
    for tracer in every_place(use, BODY, (signal.SIGINT, 0), step=step):
        assert raises(KeyboardInterrupt, tracer, use, trained, []) == bool(tracer.where), tracer.where
        trained.assert_unharmed(tracer.where)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler, tracer.where


def first_place(backend, between):
    """The reference's places are between those of the others."""
    return between if backend[0] == "reference" else 0


class Terminated(Exception):
    pass


def terminate(number, frame):
    raise Terminated


@pytest.mark.parametrize("distance", [1, 40])
def test_two_signals_with_handlers_that_raise(backend, distance):
    signal.signal(signal.SIGTERM, terminate)
    trained = Trained(backend)
    sent = (signal.SIGTERM, 0), (signal.SIGINT, distance)
    for tracer in every_place(use, BODY, *sent, first=first_place(backend, 5), step=10):
        raised = raises((Terminated, KeyboardInterrupt), tracer, use, trained, [])
        assert raised == bool(tracer.where), tracer.where
        trained.assert_unharmed(tracer.where)


def test_a_handler_that_sets_a_flag_is_called_once_and_stops_nothing(backend):
    calls = []
    signal.signal(signal.SIGUSR1, lambda number, frame: calls.append((number, frame)))
    handler = signal.getsignal(signal.SIGUSR1)
    trained = Trained(backend)
    for tracer in every_place(use, BODY, (signal.SIGUSR1, 0), first=first_place(backend, 3), step=6):
        calls.clear()
        entered = []
        with tracer:
            use(trained, entered)
        assert entered == [True], tracer.where
        assert [number for number, _ in calls] == [signal.SIGUSR1] * bool(tracer.where), tracer.where
        trained.assert_unharmed(tracer.where)
        assert signal.getsignal(signal.SIGUSR1) is handler, tracer.where


def test_the_body_is_interrupted_at_once(backend):
    trained, reached = Trained(backend), []

    def interrupted():
        with trained.optimizer.base_weights():
            try:
                signal.raise_signal(signal.SIGINT)
                reached.append("after the signal")
            finally:
                reached.append(all(map(torch.equal, trained.bits(), trained.start)))

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert reached == [True]  # still inside, and nothing after the signal
    trained.assert_unharmed()


def test_two_optimizers_one_inside_the_other(backend):
    outer, inner = Trained(backend), Trained(backend)

    def use_both():
        with outer.optimizer.base_weights():
            with inner.optimizer.base_weights():
                both = outer.bits() + inner.bits()
            assert all(map(torch.equal, both, outer.start + inner.start))

    for tracer in every_place(use_both, (3, 4), (signal.SIGINT, 0), first=first_place(backend, 7), step=14):
        assert raises(KeyboardInterrupt, tracer, use_both) == bool(tracer.where), tracer.where
        outer.assert_unharmed(tracer.where)
        inner.assert_unharmed(tracer.where)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler, tracer.where


def test_a_handler_that_the_body_installs_stays(backend):
    trained = Trained(backend)
    with trained.optimizer.base_weights():
        signal.signal(signal.SIGINT, terminate)
    assert signal.getsignal(signal.SIGINT) is terminate
    trained.assert_unharmed()


def test_another_thread_touches_no_handler(backend):
    trained, found = Trained(backend), []

    def inside():
        with trained.optimizer.base_weights():
            found.append(signal.getsignal(signal.SIGINT))
            assert threading.current_thread() is not threading.main_thread()
            assert all(map(torch.equal, trained.bits(), trained.start))

    with ThreadPoolExecutor(1) as pool:
        pool.submit(inside).result()
    assert found == [signal.default_int_handler]
    trained.assert_unharmed()


@pytest.mark.parametrize("fails", ["enter", "leave"])
def test_a_swap_that_fails_half_way(backend, fails, monkeypatch):
    trained = Trained(backend)
    swap, second = BoundOps.indexed_swap_, []

    def failing(bound, values):
        if bound.tensors[0] is trained.params["b"]:
            second.append((bound, values))
            if len(second) == (1 if fails == "enter" else 2):
                raise RuntimeError("no kernel")
        swap(bound, values)

    monkeypatch.setattr(BoundOps, "indexed_swap_", failing)
    with pytest.raises(RuntimeError, match="no kernel"), trained.optimizer.base_weights():
        pass
    if fails == "leave":  # as the error states; everything else is unchanged
        assert torch.equal(trained.params["a"], trained.before[0])
        swap(*second[0])
        torch._C._autograd._unsafe_set_version_counter(tuple(trained.params.values()), tuple(trained.versions))
    trained.assert_unharmed()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_context_is_entered_once_at_a_time_and_decorates(backend):
    trained = Trained(backend)
    context = trained.optimizer.base_weights()
    for _ in range(2):
        with context:
            with pytest.raises(RuntimeError, match="has been entered, and not left"):
                context.__enter__()
            assert all(map(torch.equal, trained.bits(), trained.start))
        trained.assert_unharmed()
    assert all(map(torch.equal, trained.optimizer.base_weights()(trained.bits)(), trained.start))
    trained.assert_unharmed()
