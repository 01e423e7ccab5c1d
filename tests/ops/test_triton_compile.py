"""Every Triton kernel compiles on a machine without a GPU, and rounds each fp32 operation by itself.

The launchers are called on CPU tensors, and compile instead of launching: for sm_90 with many arguments, for other GPUs
with some. They run in a child process without TRITON_INTERPRET, under which the kernels are Python functions.
"""

import functools
import importlib
import inspect
import itertools
import json
import os
import pkgutil
import re
import subprocess
import sys
import unittest.mock
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from cases import BOOL_OPTIONS, VARIANTS, make, step_call, step_options

from sparse_opt.backends import TRITON_MINIMUM
from sparse_opt.ops import STEP_OPS

pytest.importorskip("triton", reason="needs triton")

from sparse_opt import triton_kernels

# One worker makes what the tests of this file share.
pytestmark = pytest.mark.xdist_group("triton_compile")

CPU = torch.device("cpu")
# What a block may have of shared memory, in KiB (CUDA C++ Programming Guide, technical specifications): of the oldest
# GPU, of those whose products are summed in tensor memory, and of a workgroup of gfx942.
SHARED_KIB = {70: 64, 90: 227, 100: 227, "gfx942": 64}

# A step op called by its launcher: the dtypes of `make`, and the other arguments of `step_call`.
_SCALED = {"scaled": True}
_STEPS: dict[str, dict[str, Any]] = {
    "plain": _SCALED,
    "master": {"master": True, "index_dtype": torch.int64},
    "bf16-states": {**_SCALED, "moment_dtype": torch.bfloat16, "grad_dtype": torch.bfloat16},
    "stochastic": {**_SCALED, "moment_dtype": torch.bfloat16, "stochastic_rounding": True},
    "stochastic-fp16": {**_SCALED, "dtype": torch.float16, "stochastic_rounding": True},
    "dense-grads": {**_SCALED, "compact": False, "dtype": torch.float32, "grad_dtype": torch.float16},
    "one": {**_SCALED, "shapes": [(70,)]},
    "runs": {**_SCALED, "layout": "run16"},
    "runs-one": {**_SCALED, "layout": "run16", "shapes": [(70,)], "compact": False},
    "narrow": {**_SCALED, "layout": "narrow"},
}
STEPS = [
    *((op, how) for op in STEP_OPS for how in _STEPS.values()),
    *((op, {**_SCALED, **options}) for op, options in VARIANTS),
]


def launch_step(op: str, shapes: Any = None, scaled: bool = False, **how: Any) -> None:
    """A step of bf16 parameters and fp32 gradients; `how` has arguments of `make` and of `step_call`."""
    kinds = {"dtype": torch.bfloat16, "grad_dtype": torch.float32}
    kinds |= {name: how.pop(name) for name in list(how) if name in inspect.signature(make).parameters}
    case = make(CPU, shapes=shapes or [(7, 33), (70,)], mask="full", **kinds)
    if "params" in how:  # a part of a tensor
        case.params, case.starts, case.ends = (how.pop(name) for name in ("params", "starts", "ends"))
        case.dense_grads = case.params
    if scaled:
        case.extra = {name: torch.ones(1) for name in ("clip_coef", "grad_scale", "found_inf")}
    arguments, keywords = step_call(op, case, **how)
    getattr(triton_kernels, op)(*arguments, **keywords)


def launch_moves() -> None:
    ops, one = triton_kernels, torch.ones(1)
    for layout, shapes in itertools.product(("element", "narrow", "run16"), ([(7, 33), (70,)], [(70,)])):
        case = make(CPU, dtype=torch.bfloat16, grad_dtype=torch.bfloat16, mask="full", shapes=shapes, layout=layout)
        where = case.indices, case.starts, case.ends
        sums = {"scale": one, "sum_sq": torch.ones(len(shapes)), "found_inf": one}
        ops.masked_grad_gather_(case.grad.float(), case.dense_grads, *where, **sums, accumulate=True, **case.layout)
        ops.masked_grad_gather_(case.grad, case.dense_grads, *where, **case.layout)
        ops.indexed_swap_(case.params, case.grad, *where, **case.layout)
        ops.indexed_replace_(case.params, case.grad, case.master, *where, **case.layout)
    ops.indexed_swap_([p.long() for p in case.params], case.grad.long(), *where, **case.layout)
    for dtype, n in ((torch.bfloat16, 64), (torch.int64, 33)):  # aligned and not
        dense = [torch.zeros(n, dtype=dtype)] * 2
        ops.delta_encode(dense, dense)
        ops.delta_apply_(dense[:1], torch.arange(n, dtype=torch.int32), dense[0], [0], [n])


def launch_tiles() -> None:
    for tile, dtype in itertools.product((64, 128), (torch.bfloat16, torch.float16, torch.float32)):
        for tokens, side, n in ((64, tile, 2), (64, 37, 2), (4096, tile, 1)):  # the last in parts that are added up
            operands = [torch.zeros(tokens, side, dtype=dtype)] * n
            out, tiles = torch.zeros(n * side**2), torch.zeros(n, 4, dtype=torch.int64)
            where = tiles, list(range(n)), list(range(1, n + 1))
            sums = {"scale": torch.ones(1), "sum_sq": torch.ones(n), "found_inf": torch.ones(1)}
            for options in ({**sums, "accumulate": True}, {"token_offsets": torch.tensor([64], dtype=torch.int32)}):
                triton_kernels.tile_weight_grad_(out, operands, operands, *where, tile_size=tile, **options)


def launch_weight_sync() -> None:
    """All launchers of `triton_kernels.weight_sync`, with tables for one program."""
    kernels, longs = triton_kernels.weight_sync, torch.zeros(1, 8, dtype=torch.int64)
    bitmap, ranks = torch.zeros(8, dtype=torch.uint8), torch.zeros(2, dtype=torch.int64)
    lists = torch.zeros(2, 64, dtype=torch.int64)
    for dtype in (torch.bfloat16, torch.float32):
        values = torch.zeros(64, dtype=dtype)
        kernels.digest_sum(values, 0)
        kernels.compare(values, values, 0, 8)
        kernels.select(values, bitmap, 1)
        listed = longs[:, :3], torch.zeros(1, 6, dtype=torch.int64), torch.zeros(64, dtype=torch.int16), None, longs
        tiled = longs[0, :1], torch.zeros(1, 6, dtype=torch.int64), torch.zeros(1, dtype=torch.int32), longs, longs
        layouts = (listed, 1, 0), (listed, 32, 0), (tiled, 1, 64), (tiled, 1, 128)
        for tables, run, tile in layouts if dtype == torch.bfloat16 else layouts[:1]:
            for kind in ({"single": True, "plain": True}, {"single": False, "plain": False, "wide": True}):
                sizes = {"wide": False, "element_size": dtype.itemsize, **kind}
                table = kernels.IndexTable(*tables, run, tile, **sizes)
                kernels.take(table, values)
                kernels.put(table, values, torch.ones(1, dtype=torch.bool))
                kernels.put(table, values)
                kernels.check(table, bitmap, values, ranks, 0, read_old=tile == 0)
                kernels.write(table, bitmap, values, ranks)
                if kind["single"]:
                    kernels.list_changes(table, bitmap, ranks, *lists)
        kernels.listed_sums(values, *lists, ranks[:1], 0, read_old=True)
        kernels.listed_write(values, lists[1])


@contextmanager
def launchers_that_only_compile(target: Any, note: Callable[..., None]) -> Iterator[None]:
    """In a child: `note(kernel, args, constants, compiled)` is called instead of each launch."""
    from triton.runtime.driver import driver
    from triton.runtime.jit import JITFunction

    class Driver:
        """The part of a device that Triton uses before the launch itself."""

        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, device: int | None = None) -> int:
            return 0

        def get_current_target(self) -> Any:
            return target

    run = JITFunction.run

    def compile_only(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        note(kernel, args, kwargs, functools.partial(run, kernel, *args, grid=grid, warmup=True, **kwargs))
        if kernel.__name__ == "_delta_mark_kernel":
            args[-1].fill_(1)  # changes, without which the launcher writes none

    driver.set_active(Driver())
    with unittest.mock.patch.object(JITFunction, "run", compile_only):
        yield


def compile_all(arch: int | str) -> list[dict[str, Any]]:
    """In a child: what the launchers compile for this GPU; but for sm_90 one variant of each kernel, op and tile."""
    from triton.backends.compiler import GPUTarget

    found: list[dict[str, Any]] = []
    seen: set[Any] = set()
    op = ""

    def note(kernel: Any, args: Any, constants: dict[str, Any], compiled: Callable[[], Any]) -> None:
        tile = {name: str(constants[name]) for name in ("TILE", "STEP", "OPERAND", "ALIGN") if name in constants}
        key = (kernel.__name__, op, *tile.values())
        if arch != 90 and key in seen:
            return
        seen.add(key)
        result = compiled()
        integers = [p for p, value in zip(kernel.params, args, strict=False) if isinstance(value, int)]
        of_values = [p.name for p in integers if not p.do_not_specialize or p.annotation_type not in ("i32", "i64")]
        found.append(
            {
                **tile,
                "kernel": kernel.__name__,
                "op": op,
                "asm": result.asm["ptx"] if isinstance(arch, int) else "amdgcn" * ("amdgcn" in result.asm),
                "specialized": of_values,
                "threads": 32 * result.metadata.num_warps,
                "shared": result.metadata.shared,
                "aligned": constants.get("ALIGNED"),
            }
        )

    target = GPUTarget("cuda", arch, 32) if isinstance(arch, int) else GPUTarget("hip", arch, 64)
    if arch == 90:
        for module in ("delta_codec", "indexed_swap", "indexed_replace", "tile_weight_grad"):
            found_in = importlib.import_module(f"sparse_opt.triton_kernels.{module}")
            found_in.sizes_of = lambda device: triton_kernels.launch.SIZES_OF_SM_90
    with launchers_that_only_compile(target, note):
        for op, how in STEPS:
            launch_step(op, **how)
        op = ""
        for launch in (launch_moves, launch_tiles, launch_weight_sync):
            launch()
    return found


def compiled_of_varying_scalars() -> dict[str, dict[str, int]]:
    """In a child: calls of a step op whose scalars vary -> kernel -> how often it was compiled for sm_90."""
    from triton.backends.compiler import GPUTarget

    compiled_as: dict[str, set[int]] = {}

    def note(kernel: Any, args: Any, constants: Any, compiled: Callable[[], Any]) -> None:
        compiled_as.setdefault(kernel.__name__, set()).add(id(compiled()))

    def varied(op: str) -> list[dict[str, Any]]:
        """Options that differ in their values, not in the states that they use."""
        changes = [{name: value} for name in STEP_OPS[op].options for value in (0, 1, 16) if name not in BOOL_OPTIONS]
        options = [step_options(op, **change) for change in [{}, *changes]]
        used = STEP_OPS[op].used_states(options[0])
        return [o for o in options if not STEP_OPS[op].why_invalid(o) and STEP_OPS[op].used_states(o) == used]

    t = torch.zeros(40)
    parts = ((0, 1, t), (1, 16, t), (16, 17, t[1:]), (1, 40, t[4:]))
    counts = {}
    with launchers_that_only_compile(GPUTarget("cuda", 90, 32), note):
        for op in STEP_OPS:
            how = {"dtype": torch.float32, "stochastic_rounding": True}
            of_options = [{**how, **o} for o in [*varied(op), *({"seed": seed} for seed in (1, 16, 2**62))]]
            calls = {
                "one tensor": [{**o, "shapes": [(70,)]} for o in of_options],
                "two tensors": [{**o, "shapes": [(70,)] * 2} for o in of_options],
                "a part": [
                    {**how, "shapes": [(40,)], "compact": False, "params": [part], "starts": [start], "ends": [end]}
                    for start, end, part in parts
                ],
            }
            for name, arguments in calls.items():
                compiled_as.clear()
                for each in arguments:
                    launch_step(op, **each)
                counts[f"{op} of {name}"] = {kernel: len(ids) for kernel, ids in compiled_as.items()}
    return counts


def run_child(what: str) -> Any:
    """What this file prints as a program, in a process without TRITON_INTERPRET."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    finished = subprocess.run([sys.executable, __file__, what], env=environment, capture_output=True, text=True)
    assert finished.returncode == 0, [line for line in finished.stderr.splitlines() if "rror" in line][-5:]
    return json.loads(finished.stdout)


def assert_every_kernel(compiled: list[dict[str, Any]], arch: int | str) -> None:
    package = "sparse_opt.triton_kernels."
    modules = [importlib.import_module(info.name) for info in pkgutil.walk_packages(triton_kernels.__path__, package)]
    kernels = {name for module in modules for name in vars(module) if name.endswith("_kernel")}
    assert {one["kernel"] for one in compiled} == kernels
    assert {one["op"] for one in compiled} == {*STEP_OPS, ""}
    assert max(one["shared"] for one in compiled) <= SHARED_KIB[arch] * 1024
    assert all(("amdgcn" if arch == "gfx942" else f".target sm_{arch}") in one["asm"] for one in compiled)


@pytest.fixture(scope="module")
def compiled() -> list[dict[str, Any]]:
    """Of sm_90."""
    found: list[dict[str, Any]] = run_child("90")
    return found


@pytest.fixture(scope="module")
def products(compiled: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [one for one in compiled if one["kernel"] == "_tile_weight_grad_kernel"]


def test_compiles_for_sm_90(compiled: list[dict[str, Any]]) -> None:
    assert_every_kernel(compiled, 90)


@pytest.mark.parametrize("arch", [10 * TRITON_MINIMUM[0] + TRITON_MINIMUM[1], 100, "gfx942"])
def test_compiles_for_other_gpus(arch: int | str) -> None:
    if arch == "gfx942":
        pytest.importorskip("triton.backends.amd", reason="needs a triton with its AMD backend")
    assert_every_kernel(run_child(str(arch)), arch)


def test_varying_scalars_compile_once() -> None:
    """A seed, a beta, an end or an address that is 0, 1, a multiple of 16 or past 32 bits finds the same kernel."""
    assert {name for name, kernels in run_child("varying").items() if set(kernels.values()) != {1}} == set()


def test_no_scalar_is_specialized(compiled: list[dict[str, Any]]) -> None:
    """A learning rate, a seed or an end that is 1 or a multiple of 16 must not compile a second kernel."""
    assert {one["kernel"]: one["specialized"] for one in compiled if one["specialized"]} == {}


def test_operations_are_rounded_by_themselves(compiled: list[dict[str, Any]]) -> None:
    quotients = set()
    for one in compiled:
        assert ".ftz" not in one["asm"], one["kernel"]  # subnormal second moments of small gradients are not zero
        quotients |= set(re.findall(r"\b(?:sqrt|div)\.\S+", one["asm"]))
        if one["kernel"] != "_tile_weight_grad_kernel":
            assert not re.findall(r"\bfma\.\S*f(?:32|64)", one["asm"]), one["kernel"]
    assert {"sqrt.rn.f32", "div.rn.f32", "sqrt.rn.f64"} <= quotients
    assert not {op for op in quotients if "approx" in op or "full" in op}


def test_aligned_compare_loads_16_bytes(compiled: list[dict[str, Any]]) -> None:
    (aligned,) = (one for one in compiled if one["kernel"] == "_delta_mark_kernel" and one["aligned"])
    assert re.search(r"ld\.global\S*\.v4\.b32", aligned["asm"])


def test_tiles_are_multiplied_exactly(products: list[dict[str, Any]]) -> None:
    """16 bits: tensor cores with fp32 sums. fp32: FMAs, as many as a step has products, and no TF32."""
    for one in products:
        multiplied = set(re.findall(r"\b(?:wgmma\.mma_async|mma)\.sync\.aligned\.(\S+)", one["asm"]))
        fmas = len(re.findall(r"\bfma\.\S*f(?:32|64)", one["asm"]))
        if one["OPERAND"] == "fp32":
            assert not multiplied and fmas * one["threads"] == int(one["TILE"]) ** 2 * int(one["STEP"])
        else:
            kind = {"bf16": "bf16", "fp16": "f16"}[one["OPERAND"]]
            assert multiplied == {f"m64n{one['TILE']}k16.f32.{kind}.{kind}"} and fmas == 0


def test_aligned_operands_are_copied_16_bytes_at_a_time(products: list[dict[str, Any]]) -> None:
    for one in products:
        copies = re.findall(r"cp\.async\.c[ag]\.shared\.global \[[^]]*\], \[[^]]*\], (\w+)", one["asm"])
        assert one["ALIGN"] == "1" or set(copies) == {"0x10"}, one["OPERAND"]


if __name__ == "__main__":
    what = sys.argv[1]
    if what == "gfx942":
        torch.version.hip = "7.0"
    found = compiled_of_varying_scalars() if what == "varying" else compile_all(int(what) if what.isdigit() else what)
    json.dump(found, sys.stdout)
