"""The Triton kernels give the same bits with every table of launch sizes: the defaults, the least, the most."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="needs triton")

from cases import make

from sparse_opt import backends, ops, triton_kernels
from sparse_opt.tensors import as_bits
from sparse_opt.tuning import ALLOWED, Tuning

if not triton_kernels.interpreted() and not torch.cuda.is_available():
    pytest.skip("needs TRITON_INTERPRET=1 or a CUDA GPU", allow_module_level=True)

DEVICE = torch.device("cpu") if triton_kernels.interpreted() else torch.device("cuda", 0)
ENTRIES = {name: values for name, values in ALLOWED.items() if name.startswith("triton_")}
LEAST = replace(Tuning(), **{name: min(values) for name, values in ENTRIES.items()})
MOST = replace(Tuning(), **{name: max(values) for name, values in ENTRIES.items()})
TABLES = {"least": LEAST, "most": MOST}


@pytest.fixture
def use() -> Iterator[Callable[[Tuning], None]]:
    yield lambda table: backends.set_tuning(DEVICE, table)
    backends.set_tuning(DEVICE, Tuning())


def step() -> list[Tensor]:
    case = make(DEVICE, dtype=torch.bfloat16, mask="ragged", moment_dtype=torch.bfloat16, seed=1)
    options = {"beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.1}
    ops.indexed_adamw_(
        case.params, case.indices, case.starts, case.ends, *case.states, case.lr, case.steps,
        dense_grads=case.dense_grads, stochastic_rounding=True, seed=5, backend="triton", **case.layout, **options,
    )  # fmt: skip
    return [*case.params, *case.states]


def swap() -> list[Tensor]:
    dense, indices, compact = scattered()
    ops.indexed_swap_([dense], compact, indices, [3], [len(indices)], backend="triton")
    return [dense, compact]


def encode_and_apply() -> list[Tensor]:
    old, indices, values = scattered()
    new = old.clone().index_put_((indices.long(),), values)
    found = ops.delta_encode([old, old[:77]], [new, new[:77]], backend="triton")
    ops.delta_apply_([old], indices, values, [0], [len(indices)], backend="triton")
    return [*found, old]


def scattered() -> tuple[Tensor, Tensor, Tensor]:
    """A dense tensor of several programs of any size, and values for some of its elements."""
    generator = torch.Generator().manual_seed(3)
    dense = torch.randn(6000, generator=generator).bfloat16()
    indices = torch.randperm(6000, generator=generator)[:900].sort().values.int()
    values = torch.randn(900, generator=generator).bfloat16()
    return dense.to(DEVICE), indices.to(DEVICE), values.to(DEVICE)


def tiles(size: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(4)
    tokens, rows, columns = 200, 128, 128
    grad_output, x = (torch.randn(tokens, n, generator=generator).bfloat16().to(DEVICE) for n in (rows, columns))
    table = ops.tile_table(torch.arange(rows * columns), (rows, columns), size).to(DEVICE)
    out, sum_sq = torch.full((rows * columns,), torch.nan, device=DEVICE), torch.full((1,), torch.nan, device=DEVICE)
    ops.tile_weight_grad_(
        out, [grad_output], [x], table, [0], [len(table)], tile_size=size, sum_sq=sum_sq, backend="triton"
    )
    return [out, sum_sq]


CALLS = {
    "step": step,
    "swap": swap,
    "delta": encode_and_apply,
    "tile64": lambda: tiles(64),
    "tile128": lambda: tiles(128),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_every_table_gives_the_same_bits(use, call):
    use(Tuning())
    expected = [tensor.clone() for tensor in call()]
    assert all(tensor.isfinite().all() for tensor in expected)
    for name, table in TABLES.items():
        use(table)
        for tensor, other in zip(call(), expected, strict=True):
            assert torch.equal(as_bits(tensor), as_bits(other)), name


def test_the_launchers_read_the_table(use, monkeypatch):
    from sparse_opt.triton_kernels import indexed_swap, steps

    sizes = []
    for module in (steps, indexed_swap):
        segments = module.segments
        monkeypatch.setattr(module, "segments", lambda *args, of=segments: sizes.append(args[-1]) or of(*args))
    for table in (LEAST, MOST):
        use(table)
        step()
        swap()
    assert sizes == [256, 256, 2048, 2048]
