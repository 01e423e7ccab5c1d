"""The L2's fetch granularity: what it is, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from sparse_opt import BackendUnavailable, backends, l2_fetch_granularity, set_l2_fetch_granularity


@pytest.fixture
def kept() -> Iterator[None]:
    before = l2_fetch_granularity()
    yield
    set_l2_fetch_granularity(before)


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda", "cuda:0", 0, torch.device("cuda")])
def test_is_what_was_set_and_says_what_it_was(kept: None, device: torch.device | str | int) -> None:
    set_l2_fetch_granularity(64, device)
    for n_bytes, before in ((32, 64), (128, 32), (64, 128)):
        assert set_l2_fetch_granularity(n_bytes, device) == before
        assert l2_fetch_granularity(device) == n_bytes


@pytest.mark.gpu
def test_changes_no_result(kept: None) -> None:
    numbers = torch.arange(2**24, device="cuda").mul_(2654435761).remainder_(2**20)
    found = []
    for n_bytes in (64, 32):
        set_l2_fetch_granularity(n_bytes)
        found.append(numbers[::7].sum())
    assert found[0] == found[1]


@pytest.mark.parametrize("n_bytes", [0, 16, 48, 256])
def test_refuses_other_sizes(n_bytes: int) -> None:
    with pytest.raises(ValueError, match=f"n_bytes is {n_bytes}, wanted 32, 64, 128"):
        set_l2_fetch_granularity(n_bytes)


@pytest.mark.parametrize("call", [l2_fetch_granularity, lambda device: set_l2_fetch_granularity(32, device)])
def test_refuses_a_device_without_it(call) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match="device is cpu, wanted a CUDA device"):
        call("cpu")


@pytest.mark.parametrize("call", [l2_fetch_granularity, lambda: set_l2_fetch_granularity(32)])
def test_says_why_it_cannot_be_reached(call, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(backends, "native_module", lambda: (None, "it was not built"))
    with pytest.raises(BackendUnavailable, match=r"the L2 fetch granularity cannot be reached: .*not built"):
        call()


@pytest.mark.skipif(torch.cuda.is_available(), reason="without a GPU")
def test_says_that_there_is_no_gpu() -> None:
    with pytest.raises(BackendUnavailable, match="cannot be reached: "):
        l2_fetch_granularity()
