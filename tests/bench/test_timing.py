"""Timing in turns, under a clock that ticks as the test says."""

import time

import pytest
import torch

from sparse_opt.bench.timing import Prepared, measure, n_buffer_sets, samples


class Ticks:
    """A clock for `measure`: each call takes the next of the given milliseconds, and half of it on the host."""

    def __init__(self, *ms: float):
        self.ms = iter(ms)

    def __call__(self, call):
        if isinstance(call, Prepared):
            call.before()
        call()
        ms = next(self.ms)
        return ms, ms / 2, 2 * ms


def test_medians_and_percentiles_of_device_and_host():
    found = measure({"a": lambda: None}, n_warmup=0, n_rounds=5, clock=Ticks(5, 1, 2, 4, 3))["a"]
    assert (found.ms, found.p20_ms, found.p80_ms) == (3, 1.8, 4.2)
    assert (found.host_ms, found.wall_ms, found.n_rounds) == (1.5, 6, 5)


def test_variants_take_turns_in_orders_that_are_drawn():
    def run() -> tuple[str, dict[str, list[float]]]:
        order: list[str] = []
        variants = {name: (lambda name=name: order.append(name)) for name in "abc"}
        found = samples(variants, n_warmup=1, n_rounds=20, clock=Ticks(*range(60)))
        return "".join(order), {name: [ms for ms, _, _ in times] for name, times in found.items()}

    order, times = run()
    assert order[:3] == "abc"  # to warm up
    order = order[3:]
    rounds = [order[i : i + 3] for i in range(0, 60, 3)]
    assert len(order) == 60 and all(sorted(each) == ["a", "b", "c"] for each in rounds)
    assert {each[i : i + 2] for each in rounds for i in range(2)} == {"ab", "ac", "ba", "bc", "ca", "cb"}
    assert times == {name: [k for k, each in enumerate(order) if each == name] for name in "abc"}
    assert run() == ("abc" + order, times)


def test_several_callables_of_a_variant_are_taken_in_rotation():
    order: list[int] = []
    sets = [lambda i=i: order.append(i) for i in range(3)]
    measure({"a": sets}, n_warmup=1, n_rounds=4, clock=Ticks(1, 1, 1, 1))
    assert order == [0, 1, 2, 0, 1]


def test_a_cpu_is_timed_by_the_wall():
    found = measure({"a": lambda: time.sleep(0.02)}, n_warmup=0, n_rounds=1)["a"]
    assert found.ms >= 20
    assert found.host_ms == found.wall_ms == found.ms


def test_what_a_call_needs_first_is_run_each_time_and_not_timed():
    order: list[str] = []
    call = Prepared(lambda: (order.append("before"), time.sleep(0.02)), lambda: order.append("call"))
    found = measure({"a": call}, n_warmup=1, n_rounds=2)["a"]
    assert order == ["before", "call"] * 3
    assert found.ms < 10


@pytest.mark.gpu
def test_a_gpu_is_timed_by_its_own_clock():
    source = torch.randn(1 << 26, device="cuda")
    target = torch.empty_like(source)
    copy = lambda: target.copy_(source)  # noqa: E731
    found = measure({"once": copy, "thrice": lambda: (copy(), copy(), copy())}, device="cuda")
    # 512 MiB read and written take 0.05 ms even at 10 TB/s; the host only enqueues the copy.
    assert found["once"].ms > 0.05
    assert found["thrice"].ms > 2 * found["once"].ms
    assert found["once"].host_ms < found["once"].ms
    assert found["once"].wall_ms > found["once"].host_ms
    assert n_buffer_sets(1 << 20, "cuda") >= 3


@pytest.mark.gpu
def test_launches_stay_out_of_the_device_time():
    # Many tiny kernels with a slow host between them: the device has all of them queued before it starts.
    x = torch.zeros(1, device="cuda")

    def slow_host():
        for _ in range(10):
            x.add_(1)
            time.sleep(2e-4)

    found = measure({"a": slow_host}, device="cuda", n_rounds=5)["a"]
    assert found.host_ms > 2
    assert found.ms < 1
