"""The L2's fetch granularity: what it is, and what is refused."""

from collections.abc import Iterator

import pytest
import torch

from sparse_opt import BackendUnavailable, backends, l2_fetch_granularity, ops, set_l2_fetch_granularity


@pytest.fixture
def kept() -> Iterator[None]:
    before = l2_fetch_granularity()
    yield
    set_l2_fetch_granularity(before)


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda", "cuda:0", 0])
def test_is_what_was_set_and_says_what_it_was(kept: None, device: torch.device | str | int) -> None:
    set_l2_fetch_granularity(64, device)
    for n_bytes, before in ((32, 64), (128, 32), (64, 128)):
        assert set_l2_fetch_granularity(n_bytes, device) == before
        assert l2_fetch_granularity(device) == n_bytes


@pytest.mark.gpu
def test_changes_no_bit_of_a_step(kept: None) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    weight = torch.randn(2**24, generator=generator, device="cuda").bfloat16()
    grad = torch.randn(2**24, generator=generator, device="cuda").bfloat16()
    indices = (torch.rand(2**24, generator=generator, device="cuda") < 0.025).nonzero().view(-1).int()
    found = []
    for n_bytes in (64, 32):
        set_l2_fetch_granularity(n_bytes)
        param, n = weight.clone(), len(indices)
        moments = torch.zeros(2, n, device="cuda")
        lr, steps = torch.full((1,), 1e-2, device="cuda"), torch.ones(1, device="cuda")
        ops.indexed_adamw_([param], indices, [0], [n], moments[0], moments[1], lr, steps, dense_grads=[grad])
        found.append((param.view(torch.int16), moments))
    assert not torch.equal(found[0][0], weight.view(torch.int16))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("n_bytes", [16, 48])
def test_refuses_other_sizes(n_bytes: int) -> None:
    with pytest.raises(ValueError, match=f"n_bytes is {n_bytes}, expected 32, 64, 128"):
        set_l2_fetch_granularity(n_bytes)


@pytest.mark.parametrize("call", [l2_fetch_granularity, lambda device: set_l2_fetch_granularity(32, device)])
def test_refuses_a_device_without_it(call) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match="device is cpu, expected a CUDA device"):
        call("cpu")


@pytest.mark.parametrize("call", [l2_fetch_granularity, lambda: set_l2_fetch_granularity(32)])
def test_says_why_it_cannot_be_reached(call, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(backends, "native_module", lambda: (None, "it was not built"))
    with pytest.raises(BackendUnavailable, match=r"the L2 fetch granularity cannot be accessed: .*not built"):
        call()


@pytest.mark.parametrize("device", ["cuda", "cuda:99", 99])
def test_says_that_there_is_no_such_gpu(device: str | int) -> None:
    if device == "cuda" and torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(BackendUnavailable, match="cannot be accessed: "):
        l2_fetch_granularity(device)
