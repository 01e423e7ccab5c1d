"""The first update compiles no Triton kernel: senders and receivers launch all of them before, without effect."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from samples import change, clones, make_weights, same_bits
from test_weight_sync_destinations import Engine
from test_weight_sync_destinations import make_weights as fused_weights

from sparse_opt import MaskSet
from sparse_opt.weight_sync import WeightReceiver, WeightSender

triton_kernels = pytest.importorskip("sparse_opt.triton_kernels", reason="needs triton")

KERNELS = {"count", "select", "digest", "compare", "check", "write", "list", "listed_sums", "listed_write", "put"}


@pytest.fixture
def launched(monkeypatch) -> Iterator[set[Any]]:
    """What Triton compiles separately: kernel, constants and options, and of tensors the dtype and the alignment.

    Integers make no difference, as tests/ops/test_triton_compile.py asserts.
    """
    found: set[Any] = set()
    kind = type(triton_kernels.weight_sync.values._weight_digest_kernel)
    run = kind.run

    def noted(kernel: Any, *args: Any, grid: Any, warmup: bool, **constants: Any) -> Any:
        tensors = [(a.dtype, a.data_ptr() % 16 == 0) if isinstance(a, torch.Tensor) else type(a) for a in args]
        found.add((kernel.__name__, *tensors, *sorted((name, str(value)) for name, value in constants.items())))
        return run(kernel, *args, grid=grid, warmup=warmup, **constants)

    monkeypatch.setattr(kind, "run", noted)
    return found


@pytest.mark.parametrize("pattern", ["element", "run16", "tile64"])
@pytest.mark.parametrize("fused", [False, True], ids=["whole", "fused"])
def test_updates_launch_nothing_new(place, launched, pattern, fused):
    device, backend = place
    if backend != "triton":
        pytest.skip("needs triton, and TRITON_INTERPRET=1 or a GPU")
    weights = fused_weights(device) if fused else make_weights("mixed", device)
    mask = MaskSet.random(weights, density=0.3, pattern=pattern)
    sender = WeightSender(weights, mask, backend=backend)
    copy = Engine(weights).tensors() if fused else clones(weights)
    destinations = Engine(weights).destinations() if fused else None
    receiver = WeightReceiver(copy, destinations=destinations, backend=backend)
    receiver.receive(sender.mask_message())
    before = set(launched)
    launched.clear()
    receiver.receive(sender.state_message())
    for version, share in enumerate((0.01, 0.3, 1.0), start=1):
        change(weights, mask, share, seed=version)
        assert receiver.receive(sender.update()) == version
    receiver.verify()
    assert launched <= before
    assert fused or same_bits(weights, copy)
    assert fused or {f"_weight_{name}_kernel" for name in KERNELS} <= {name for name, *_ in launched}
