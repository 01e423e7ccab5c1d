"""The Triton kernels on AMD GPUs, as far as a machine without one goes: launchers pass options that Triton's backend
for AMD knows, and every kernel compiles for gfx942.

Compiled in a child process without TRITON_INTERPRET, whose torch says that it is one for ROCm.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest
import test_triton_compile as variants
import torch
from cases import make, step_call

from sparse_opt.ops import STEP_OPS

pytest.importorskip("triton.backends.amd", reason="needs a triton with its AMD backend")

from sparse_opt.triton_kernels import step_rules, steps

WAVEFRONT = 64
SHARED_BYTES = 64 << 10  # of a workgroup on gfx942 (its local data share)


def _gfx942() -> Any:
    from triton.backends.compiler import GPUTarget

    return GPUTarget("hip", "gfx942", WAVEFRONT)


def _launch_all() -> list[str]:
    """In the child: the kernels that the launchers compiled, called up to the launch on CPU tensors."""
    from sparse_opt import triton_kernels as ops

    launched: set[str] = set()

    def note(kernel: Any, args: Any, compiled: Any) -> None:
        assert "amdgcn" in compiled.asm
        assert compiled.metadata.shared <= SHARED_BYTES, kernel.__name__
        launched.add(kernel.__name__)

    n = 40
    dense, compact, one = [torch.zeros(n)], torch.zeros(n), torch.ones(1)
    where = torch.arange(n, dtype=torch.int32), [0], [n]
    with variants.launchers_that_only_compile(_gfx942(), note):
        for op in STEP_OPS:
            arguments, keywords = step_call(op, make(torch.device("cpu")), stochastic_rounding=True)
            getattr(ops, op)(*arguments, **keywords)
        ops.masked_grad_gather_(compact, dense, *where, sum_sq=one)
        ops.indexed_swap_(dense, compact, *where)
        ops.delta_apply_(dense, where[0], compact, [0], [n])
        for tile_size in (64, 128):
            for dtype in (torch.float32, torch.bfloat16):
                for tokens in (3, 4096):  # whole, and in parts that are added up
                    operands = [torch.zeros(tokens, tile_size, dtype=dtype)]
                    tiles, out = torch.zeros(1, 4, dtype=torch.int64), torch.zeros(tile_size**2)
                    ops.tile_weight_grad_(out, operands, operands, tiles, [0], [1], tile_size=tile_size)
        _launch_weight_sync(ops.weight_sync)
    return sorted(launched)


def _launch_weight_sync(kernels: Any) -> None:
    """In the child: all launchers of `triton_kernels.weight_sync`, with tables for one program."""
    values, longs = torch.zeros(64, dtype=torch.bfloat16), torch.zeros(1, 8, dtype=torch.int64)
    bitmap, ranks = torch.zeros(8, dtype=torch.uint8), torch.zeros(2, dtype=torch.int64)
    kernels.digest_sum(values, 0)
    kernels.compare(values, values, 0, 8)
    kernels.select(values, bitmap, 1)
    listed = torch.zeros(1, 6, dtype=torch.int64), torch.zeros(64, dtype=torch.int16), None, longs, 1, 0
    tiled = torch.zeros(1, 6, dtype=torch.int64), torch.zeros(1, dtype=torch.int32), longs, longs, 1, 64
    for programs, tables in ((longs[:, :3], listed), (longs[0, :1], tiled)):
        table = kernels.IndexTable(programs, *tables, wide=False, element_size=2, single=True, plain=True)
        kernels.take(table, values)
        kernels.put(table, values, torch.ones(1, dtype=torch.bool))
        kernels.check(table, bitmap, values, ranks, 0, read_old=True)
        kernels.write(table, bitmap, values, ranks)
        kernels.list_changes(table, bitmap, ranks, *torch.zeros(2, 64, dtype=torch.int64))
    kernels.listed_sums(values, *torch.zeros(2, 64, dtype=torch.int64), ranks[:1], 0, read_old=True)
    kernels.listed_write(values, torch.zeros(64, dtype=torch.int64))


def _compile_delta_encode() -> list[str]:
    """In the child: the kernels of the launcher that reads results of one kernel before it launches another."""
    names = ("delta-mark", "delta-write")
    assert all("amdgcn" in variants.compile_variant(name, _gfx942())[0].asm for name in names)
    return [variants.VARIANTS[name][1] for name in names]


def test_every_kernel_is_launched_on_an_amd_gpu() -> None:
    found = variants.run_child(__file__)
    of_steps = {name for module in (steps, step_rules) for name in vars(module) if name.endswith("_kernel")}
    assert set(found) == {kernel for _, kernel, _ in variants.VARIANTS.values()} | of_steps


if __name__ == "__main__":
    torch.version.hip = "7.0"
    json.dump(_launch_all() + _compile_delta_encode(), sys.stdout)
