"""Every Triton kernel compiles for sm_90 on a machine without a GPU, and rounds each fp32 operation by itself. One
variant of each compiles for the other GPUs that the backend is offered on.

The compiler runs in a child process without TRITON_INTERPRET, under which the kernels are Python functions.
"""

from __future__ import annotations

import inspect
import json
import os
import re
import subprocess
import sys
import unittest.mock
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from cases import BOOL_OPTIONS, make, step_call, step_options
from cases import VARIANTS as OTHER_OPTIONS

from sparse_opt.backends import TRITON_MINIMUM
from sparse_opt.ops import STEP_OPS

pytest.importorskip("triton", reason="needs triton")

# Parameter -> pointer or scalar type; None: the argument is left out; the value itself for a constexpr (upper case).
_RANGE = {"start": "i64", "end": "i64"}
_LIST = {"blocks": "*i64", "indices": "*i32", "index_bases": None, **_RANGE, "BLOCK": 1024, "RUN": 1}
_GATHER = {
    **_LIST,
    "dense_table": "*i64",
    "out": "*fp32",
    "scale": "*fp32",
    "partials": "*fp32",
    "found_inf": "*fp32",
    "ACCUMULATE": True,
    "DENSE": "bfloat16",
}
_MOVE = {**_LIST, "dense_table": "*i64", "BITS": "int16"}
_DELTA = {"new": "*i64", "blocks": "*i64", "BITS": "int16", "BLOCK": 8192}
_DELTA_MARK = {**_DELTA, "old": "*i64", "marks": "*u8", "counts": "*i32", "ALIGNED": True}
_DELTA_WRITE = {**_DELTA, "marks": "*i32", "offsets": "*i64", "indices": "*i32", "values": "*i16", "CHANGES": 128}
_DELTA_APPLY = {
    **{name: kind for name, kind in _MOVE.items() if name not in ("RUN", "index_bases")},
    "BLOCK": 512,
}
_TILES = {
    "operands": "*i64",
    "blocks": "*i64",
    "grad_output": None,
    "x": None,
    "tiles": "*i64",
    "out": "*fp32",
    "scale": "*fp32",
    "sums": None,
    "partials": "*fp32",
    "found_inf": "*fp32",
    "token_offsets": None,
    "start": "i64",
    "tokens": "i64",
    "rows": "i64",
    "columns": "i64",
    "ACCUMULATE": True,
    "WHOLE": True,
}
_16_BITS = {**_TILES, "ALIGN": 8, "STEP": 64}
_32_BITS = {**_TILES, "ALIGN": 4, "STEP": 16, "OPERAND": "float32"}
_ONE_MATRIX = {"operands": None, "blocks": None, "grad_output": "*bf16", "x": "*bf16"}
_SPLIT = {"sums": "*fp32", "partials": None, "found_inf": None}
_RAGGED = {"ALIGN": 1, "WHOLE": False}
_ADD_SPLITS = {
    **{name: kind for name, kind in _TILES.items() if name not in ("grad_output", "x", "tokens", "token_offsets")},
    "sums": "*fp32",
    "active": "i64",
    "splits": "i32",
    "ROWS": 16,
}
_ADD_ONE = {"operands": None, "blocks": None, "WHOLE": False, "out": "*fp16"}

_WEIGHTS = {
    "programs": "*i64",
    "tensors": "*i64",
    "units": "*i16",
    "bands": None,
    "parts": "*i64",
    "BITS": "uint16",
    "BLOCK": 1024,
    "RUN": 1,
    "TILE": 0,
    "WIDE": False,
}
_TILED_WEIGHTS = {**_WEIGHTS, "units": "*i32", "bands": "*i64", "BLOCK": 2048, "TILE": 64}
_BITMAP = {"bitmap": "*u8", "bits": "i64", "BLOCK": 1024}
_MARKED = {**_BITMAP, "changed": "*i16", "ranks": "*i64", "changes": "i64"}
_LIST_OF_CHANGES = {**_BITMAP, "ranks": "*i64", "slots_out": "*i64", "addresses": "*i64", "changes": "i64"}
_LISTED = {"changed": "*i16", "addresses": "*i64", "changes": "i64", "BITS": "uint16", "BLOCK": 1024}
_SINGLE = {"SINGLE": True, "PLAIN": False}
_PLAIN = {"SINGLE": True, "PLAIN": True}
_SEVERAL = {"SINGLE": False, "PLAIN": False}
_PUT = {"values": "*i16", "valid": "*u8"}
_CONSECUTIVE = {"partials": "*i64", "n": "i64", "first": "i64", "BITS": "uint16", "BLOCK": 2048}

_ONE_TENSOR = {"blocks": None}
_DENSE_GRADS = {"grad": None, "grad_table": "*i64", "GRAD": "float16"}
_RUNS = {"RUN": 32}
_NARROW = {"indices": "*u16", "index_bases": "*i32"}

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
# name -> op, keywords; the kernel of a rule's scalars is compiled with the first variant.
STEPS = {
    **{f"{op}-{name}": (op, how) for op in STEP_OPS for name, how in _STEPS.items()},
    **{f"{op}-{','.join(options)}": (op, {**_SCALED, **options}) for op, options in OTHER_OPTIONS},
}


# name -> module, kernel, parameters
_FILE_OF_WEIGHT_KERNEL = {
    **dict.fromkeys(("digest", "compare", "count", "select"), "values"),
    **dict.fromkeys(("take", "put"), "index"),
    **dict.fromkeys(("check", "write", "list", "listed_sums", "listed_write"), "changes"),
}

VARIANTS: dict[str, tuple[str, str, dict[str, Any]]] = {
    name: (module, f"_{kernel}_kernel", parameters)
    for name, module, kernel, parameters in [
        ("gather", "masked_grad_gather", "masked_grad_gather", _GATHER),
        ("gather-one", "masked_grad_gather", "masked_grad_gather", {**_GATHER, **_ONE_TENSOR, "dense_table": "*fp16"}),
        ("gather-narrow", "masked_grad_gather", "masked_grad_gather", {**_GATHER, **_NARROW}),
        ("gather-runs", "masked_grad_gather", "masked_grad_gather", {**_GATHER, **_RUNS}),
        (
            "gather-bare",
            "masked_grad_gather",
            "masked_grad_gather",
            {**_GATHER, "scale": None, "partials": None, "found_inf": None, "ACCUMULATE": False, "out": "*bf16"},
        ),
        (
            "gather-sums",
            "masked_grad_gather",
            "sum_partials",
            {"partials": "*fp32", "firsts": "*i64", "count": "i64", "sum_sq": "*fp32", "BLOCK": 1024},
        ),
        *[
            (f"tile{tile}-{name}", "tile_weight_grad", "tile_weight_grad", {**parameters, "TILE": tile})
            for tile in (64, 128)
            for name, parameters in [
                ("bf16", {**_16_BITS, "OPERAND": "bfloat16"}),
                ("fp16", {**_16_BITS, "OPERAND": "float16"}),
                ("fp32", _32_BITS),
            ]
        ],
        *[
            (name, "tile_weight_grad", "tile_weight_grad", {**_16_BITS, **parameters, "OPERAND": "bfloat16"})
            for name, parameters in [
                ("tile64-bf16-ragged", {**_RAGGED, "TILE": 64, "out": "*bf16"}),
                ("tile64-bf16-split", {**_SPLIT, "TILE": 64}),
                ("tile128-bf16-one", {**_ONE_MATRIX, "TILE": 128, "ACCUMULATE": False, "scale": None}),
                ("tile64-bf16-experts-one", {**_ONE_MATRIX, "TILE": 64, "token_offsets": "*i32", "scale": None}),
                ("tile128-bf16-experts", {"TILE": 128, "token_offsets": "*i32"}),
            ]
        ],
        ("tile64-add", "tile_weight_grad", "add_splits", {**_ADD_SPLITS, "TILE": 64}),
        ("tile128-add-one", "tile_weight_grad", "add_splits", {**_ADD_SPLITS, **_ADD_ONE, "TILE": 128}),
        ("swap", "indexed_swap", "indexed_swap", {**_MOVE, "compact": "*i16"}),
        ("swap-narrow", "indexed_swap", "indexed_swap", {**_MOVE, **_NARROW, "compact": "*i16"}),
        ("swap-runs", "indexed_swap", "indexed_swap", {**_MOVE, **_RUNS, "compact": "*i16"}),
        ("swap-8-bytes", "indexed_swap", "indexed_swap", {**_MOVE, "compact": "*i64", "BITS": "int64"}),
        ("delta-mark", "delta_codec", "delta_mark", _DELTA_MARK),
        ("delta-mark-unaligned", "delta_codec", "delta_mark", {**_DELTA_MARK, "BITS": "int8", "ALIGNED": False}),
        ("delta-write", "delta_codec", "delta_write", _DELTA_WRITE),
        (
            "delta-write-8-bytes",
            "delta_codec",
            "delta_write",
            {**_DELTA_WRITE, "indices": "*i64", "values": "*i64", "BITS": "int64"},
        ),
        ("delta-apply", "delta_codec", "delta_apply", {**_DELTA_APPLY, "values": "*i16"}),
        *[
            (f"weights-{name}", f"weight_sync.{_FILE_OF_WEIGHT_KERNEL[kernel]}", f"weight_{kernel}", parameters)
            for name, kernel, parameters in [
                ("take", "take", {**_WEIGHTS, **_SINGLE, "out": "*i16"}),
                ("take-several", "take", {**_WEIGHTS, **_SEVERAL, "out": "*i16"}),
                ("take-runs", "take", {**_WEIGHTS, **_SINGLE, "out": "*i16", "RUN": 32}),
                ("take-4-bytes", "take", {**_WEIGHTS, **_SINGLE, "out": "*i32", "BITS": "uint32"}),
                ("take-tiles", "take", {**_TILED_WEIGHTS, **_SINGLE, "out": "*i16"}),
                ("take-tiles-plain", "take", {**_TILED_WEIGHTS, **_PLAIN, "out": "*i16"}),
                ("put", "put", {**_WEIGHTS, **_SINGLE, **_PUT}),
                ("put-several", "put", {**_WEIGHTS, **_SEVERAL, **_PUT}),
                ("put-always", "put", {**_WEIGHTS, **_SINGLE, **_PUT, "valid": None}),
                ("put-wide", "put", {**_WEIGHTS, **_SINGLE, **_PUT, "WIDE": True}),
                ("put-tiles", "put", {**_TILED_WEIGHTS, **_SINGLE, **_PUT, "TILE": 128}),
                ("put-tiles-wide", "put", {**_TILED_WEIGHTS, **_PLAIN, **_PUT, "WIDE": True}),
                ("check", "check", {**_WEIGHTS, **_MARKED, "partials": "*i64", "first": "i64", "READ_OLD": True}),
                (
                    "check-tiles",
                    "check",
                    {**_MARKED, **_TILED_WEIGHTS, "partials": "*i64", "first": "i64", "READ_OLD": False},
                ),
                ("write", "write", {**_WEIGHTS, **_MARKED}),
                ("list", "list", {**_WEIGHTS, **_LIST_OF_CHANGES}),
                ("list-tiles", "list", {**_LIST_OF_CHANGES, **_TILED_WEIGHTS}),
                (
                    "listed-sums",
                    "listed_sums",
                    {
                        **_LISTED,
                        "slots": "*i64",
                        "marked": "*i64",
                        "partials": "*i64",
                        "first": "i64",
                        "READ_OLD": True,
                    },
                ),
                ("listed-write", "listed_write", _LISTED),
                ("count", "count", {**_BITMAP, "counts": "*i32"}),
                (
                    "select",
                    "select",
                    {**_BITMAP, "values": "*i16", "ends": "*i64", "changed": "*i16", "changes": "i64", "BLOCK": 2048},
                ),
                ("digest", "digest", {**_CONSECUTIVE, "values": "*i16"}),
                (
                    "compare",
                    "compare",
                    {**_CONSECUTIVE, "old": "*i16", "new": "*i16", "bitmap": "*u8", "size": "i64"},
                ),
            ]
        ],
    ]
}
ARITHMETIC = [*STEPS, *(name for name in VARIANTS if name.startswith("gather") or "-add" in name)]
TILES = [name for name in VARIANTS if name.startswith("tile")]
PRODUCTS = [name for name in TILES if "-add" not in name]

_WEIGHT_KERNELS = (
    *("take", "put", "check", "write", "list", "listed-sums", "listed-write"),
    *("count", "select", "digest", "compare"),
)
# The oldest (backends.TRITON_MINIMUM), and those whose products are summed in tensor memory.
OTHER_GPUS = (70, 100)
ON_OTHER_GPUS = (
    *("gather", "gather-sums"),
    *("tile64-bf16", "tile64-fp32", "tile64-add"),
    *("swap", "delta-mark", "delta-write", "delta-apply"),
    *(f"weights-{name}" for name in _WEIGHT_KERNELS),
)

STEPS_ON_OTHER_GPUS = tuple(f"{op}-stochastic" for op in STEP_OPS)


def _sizes(name: str, sizes: Any) -> dict[str, int]:
    """In the child: the constants of a variant that are launch sizes."""
    from sparse_opt.triton_kernels import launch

    if name.startswith("swap"):
        return {"BLOCK": sizes.swap_slots}
    if name.startswith("delta-apply"):
        return {"BLOCK": launch.STEP_SLOTS}
    written = {"CHANGES": launch.CHANGES} if name.startswith("delta-write") else {}
    return {"BLOCK": sizes.encode_elements, **written} if name.startswith("delta") else {}


def _options(name: str, expected: dict[str, Any], sizes: Any) -> dict[str, Any]:
    """In the child: what the launcher has a variant compiled with."""
    from sparse_opt.triton_kernels import launch, tile_weight_grad, weight_sync

    if name in PRODUCTS:
        operand_size = 4 if expected["OPERAND"] == "float32" else 2
        tile = tile_weight_grad.tile_options(expected["TILE"], operand_size, sizes)
        assert tile.step == expected["STEP"]
        return tile.compiler_options(aligned=expected["ALIGN"] > 1)
    if name in TILES:
        assert tile_weight_grad.BAND == expected["ROWS"]
        return tile_weight_grad.BAND_OPTIONS
    if name.startswith(("delta-mark", "delta-write")):
        return launch.CHANGE_OPTIONS if "CHANGES" in expected else launch.ELEMENT_OPTIONS
    if name.startswith("weights"):
        tiled = expected.get("TILE", 0) > 0
        blocks = dict.fromkeys(("digest", "compare", "select"), weight_sync.VALUES)
        assert expected["BLOCK"] == blocks.get(
            name.split("-")[1], weight_sync.TILE_BLOCK if tiled else weight_sync.BLOCK
        )
        return weight_sync.OPTIONS
    assert "BLOCK" in _sizes(name, sizes) or expected.get("BLOCK", launch.SLOTS) == launch.SLOTS, name
    return launch.SLOT_OPTIONS


def cuda_target(capability: int) -> Any:
    from triton.backends.compiler import GPUTarget

    return GPUTarget("cuda", capability, 32)


def compile_variant(name: str, target: Any) -> tuple[Any, list[str]]:
    """In a child: a variant for a GPU, and the scalars on whose values the launcher would specialise it."""
    import importlib

    import triton
    import triton.language as tl
    from triton.compiler import ASTSource

    from sparse_opt.triton_kernels import launch

    sizes = launch.SIZES_OF_SM_90 if target.arch == 90 else launch.Sizes()
    module, kernel_name, expected = VARIANTS[name]
    expected = {**expected, **_sizes(name, sizes)}
    kernel = getattr(importlib.import_module(f"sparse_opt.triton_kernels.{module}"), kernel_name)
    signature, constants, specialized = {}, {}, []
    for p in kernel.params:
        kind = expected[p.name]
        if p.is_constexpr or kind is None:
            signature[p.name] = "constexpr"
            constants[p.name] = getattr(tl, kind) if isinstance(kind, str) else kind
        else:
            signature[p.name] = kind
            if not kind.startswith("*") and not p.do_not_specialize:
                specialized.append(p.name)
            if kind in ("i32", "i64") and p.annotation_type != kind:
                specialized.append(f"{p.name} (width by value)")
    assert set(signature) == set(expected), name
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    return triton.compile(source, target=target, options=_options(name, expected, sizes)), specialized


def _compile_all(names: Iterable[str], capability: int) -> dict[str, dict[str, Any]]:
    """In the child: the PTX of each variant, and what `compile_variant` has found."""
    compiled = {}
    for name in names:
        result, specialized = compile_variant(name, cuda_target(capability))
        compiled[name] = {
            "ptx": result.asm["ptx"],
            "cubin": len(result.asm["cubin"]),
            "specialized": specialized,
            "threads": 32 * result.metadata.num_warps,
            "shared": result.metadata.shared,
        }
    return compiled


@contextmanager
def launchers_that_only_compile(target: Any, note: Callable[..., None]) -> Iterator[None]:
    """In a child: launchers on CPU tensors compile for this GPU; `note(kernel, args, compiled)` is called instead of
    each launch.
    """
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
        note(kernel, args, run(kernel, *args, grid=grid, warmup=True, **kwargs))

    driver.set_active(Driver())
    with unittest.mock.patch.object(JITFunction, "run", compile_only):
        yield


def _step_case(
    shapes: list[tuple[int, ...]] | None = None, scaled: bool = False, **how: Any
) -> tuple[Any, dict[str, Any]]:
    """A case of bf16 parameters and fp32 gradients, and the arguments in `how` that are not those of `make`."""
    kinds = {"dtype": torch.bfloat16, "grad_dtype": torch.float32}
    kinds |= {name: how.pop(name) for name in list(how) if name in inspect.signature(make).parameters}
    case = make(torch.device("cpu"), shapes=shapes or [(7, 33), (70,)], mask="full", **kinds)
    if scaled:
        case.extra = {name: torch.ones(1) for name in ("clip_coef", "grad_scale", "found_inf")}
    return case, how


def _compile_steps(names: Iterable[str], capability: int) -> dict[str, dict[str, Any]]:
    """In the child: what the launchers of the step ops compile, as `_compile_all` describes it."""
    from sparse_opt import triton_kernels

    compiled: dict[str, dict[str, Any]] = {}

    def note(kernel: Any, args: Any, result: Any) -> None:
        integers = [p for p, value in zip(kernel.params, args, strict=False) if isinstance(value, int)]
        compiled[name if kernel.__name__ == "_step_kernel" else f"{op}-scalars"] = {
            "ptx": result.asm["ptx"],
            "cubin": len(result.asm["cubin"]),
            "specialized": [
                p.name for p in integers if not p.do_not_specialize or p.annotation_type not in ("i32", "i64")
            ],
            "shared": result.metadata.shared,
        }

    with launchers_that_only_compile(cuda_target(capability), note):
        for name in names:
            op, how = STEPS[name]
            case, how = _step_case(**how)
            arguments, keywords = step_call(op, case, **how)
            getattr(triton_kernels, op)(*arguments, **keywords)
    return compiled


def _varied(op: str) -> list[dict[str, Any]]:
    """Options of a step op that differ in their values, not in the states that they use."""
    changes = [{name: value} for name in STEP_OPS[op].options for value in (0, 1, 16) if name not in BOOL_OPTIONS]
    options = [step_options(op, **change) for change in [{}, *changes]]
    used = STEP_OPS[op].used_states(options[0])
    return [o for o in options if not STEP_OPS[op].why_invalid(o) and STEP_OPS[op].used_states(o) == used]


def _launch_with_varying_scalars() -> dict[str, dict[str, int]]:
    """In the child: kernel -> how often it was compiled, of each launcher, called up to the launch on CPU tensors."""
    from sparse_opt import triton_kernels as ops

    launched: dict[str, set[int]] = {}

    def note(kernel: Any, args: Any, compiled: Any) -> None:
        launched.setdefault(kernel.__name__, set()).add(id(compiled))

    n = 40
    dense, compact = [torch.zeros(n), torch.zeros(n)], torch.zeros(n)
    indices = torch.arange(n, dtype=torch.int32)
    one = torch.ones(1)
    tiles = torch.zeros(20, 4, dtype=torch.int64)

    def launch_step(op: str, shapes: list[tuple[int, ...]], **how: Any) -> None:
        case, how = _step_case(shapes, dtype=torch.float32, **how)
        for name in ("params", "starts", "ends"):
            setattr(case, name, how.pop(name, getattr(case, name)))
        if len(case.params) == 1:
            case.dense_grads = case.params
        arguments, keywords = step_call(op, case, **how)
        getattr(ops, op)(*arguments, **keywords)

    calls: dict[str, list[Any]] = {
        **{
            f"{op} of {tensors} tensors": [
                lambda op=op, tensors=tensors, how=how: launch_step(
                    op, [(70,)] * tensors, stochastic_rounding=True, **how
                )
                for how in [*_varied(op), *({"seed": seed} for seed in (1, 16, 2**62))]
            ]
            for op in STEP_OPS
            for tensors in (1, 2)
        },
        **{
            f"{op} of a part of a tensor": [
                lambda op=op, s=s, e=e, t=t: launch_step(op, [(n,)], compact=False, params=[t], starts=[s], ends=[e])
                for s, e, t in ((0, 1, dense[0]), (1, 16, dense[0]), (16, 17, dense[0][1:]), (1, n, dense[0][4:]))
            ]
            for op in STEP_OPS
        },
        "masked_grad_gather_": [
            lambda s=s, e=e: ops.masked_grad_gather_(compact, dense[:1], indices, [s], [e], scale=one, found_inf=one)
            for s, e in ((0, 1), (1, 16), (16, 17), (1, n))
        ],
        "indexed_swap_": [
            lambda s=s, e=e: ops.indexed_swap_(dense[:1], compact, indices, [s], [e])
            for s, e in ((0, 1), (1, 16), (16, 17), (1, n))
        ],
        "tile_weight_grad_": [
            lambda t=t, s=s, e=e: ops.tile_weight_grad_(
                compact, [torch.zeros(t, 64)] * 2, [torch.zeros(t, 128)] * 2, tiles, [s, e], [e, e], tile_size=64
            )
            for t, s, e in ((1, 0, 1), (2, 1, 2), (16, 0, 17), (33, 2, 19))
        ],
        "tile_weight_grad_ of one matrix": [
            lambda t=t, s=s, e=e: ops.tile_weight_grad_(
                compact, [torch.zeros(t, 64 * t)], [torch.zeros(t, 128)], tiles, [s], [e], tile_size=64, scale=one
            )
            for t, s, e in ((1, 0, 1), (2, 1, 2), (16, 0, 17), (33, 2, 19))
        ],
        "delta_apply_": [lambda: ops.delta_apply_(dense, indices, compact, [0, 16], [16, 17])],
    }
    counts = {}
    with launchers_that_only_compile(cuda_target(90), note):
        for name, launches in calls.items():
            launched.clear()
            for call in launches:
                call()
            counts[name] = {kernel: len(compiled) for kernel, compiled in launched.items()}
    return counts


def run_child(file: str, *words: str) -> Any:
    """What a test's file prints as a program, in a process without TRITON_INTERPRET."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    finished = subprocess.run([sys.executable, file, *words], env=environment, capture_output=True, text=True)
    assert finished.returncode == 0, [line for line in finished.stderr.splitlines() if "rror" in line][-5:]
    return json.loads(finished.stdout)


@pytest.fixture(scope="module")
def child() -> dict[str, Any]:
    return run_child(__file__)


@pytest.fixture(scope="module")
def compiled(child: dict[str, Any]) -> dict[str, dict[str, Any]]:
    result: dict[str, dict[str, Any]] = child["compiled"]
    return result


def test_varying_scalars_compile_once(child: dict[str, Any]) -> None:
    """A seed, a beta, an end or an address that is 0, 1, a multiple of 16 or past 32 bits finds the same kernel."""
    assert {name for name, kernels in child["launched"].items() if set(kernels.values()) != {1}} == set()


@pytest.mark.parametrize("name", [*STEPS, *VARIANTS])
def test_compiles_for_sm_90(compiled: dict[str, dict[str, Any]], name: str) -> None:
    assert ".target sm_90" in compiled[name]["ptx"]
    assert compiled[name]["cubin"] > 0


def test_other_gpus_have_one_variant_of_each_kernel() -> None:
    assert {VARIANTS[name][:2] for name in ON_OTHER_GPUS} == {variant[:2] for variant in VARIANTS.values()}
    assert min(OTHER_GPUS) == 10 * TRITON_MINIMUM[0] + TRITON_MINIMUM[1]


@pytest.mark.parametrize("capability", OTHER_GPUS)
def test_compiles_for_other_gpus(capability: int) -> None:
    found = run_child(__file__, str(capability))
    assert set(found) >= {*ON_OTHER_GPUS, *STEPS_ON_OTHER_GPUS}
    assert all(f".target sm_{capability}" in one["ptx"] and one["cubin"] > 0 for one in found.values())
    # What a block may have of 7.5 and of 10.0 (CUDA C++ Programming Guide, technical specifications).
    limit_kib = {70: 64, 100: 227}[capability]
    assert max(one["shared"] for one in found.values()) <= limit_kib * 1024


@pytest.mark.parametrize("name", [*STEPS, *VARIANTS])
def test_no_scalar_is_specialized(compiled: dict[str, dict[str, Any]], name: str) -> None:
    """A learning rate, a seed or an end that is 1 or a multiple of 16 must not compile a second kernel."""
    assert compiled[name]["specialized"] == []


@pytest.mark.parametrize("name", ARITHMETIC)
def test_operations_are_not_contracted(compiled: dict[str, dict[str, Any]], name: str) -> None:
    ptx = compiled[name]["ptx"]
    assert not re.findall(r"\bfma\.\S*f(?:32|64)", ptx)
    assert ".ftz" not in ptx  # subnormal second moments of small gradients are not zero


@pytest.mark.parametrize("name", STEPS)
def test_roots_and_quotients_are_ieee(compiled: dict[str, dict[str, Any]], name: str) -> None:
    found = set(re.findall(r"\b(?:sqrt|div)\.\S+", compiled[name]["ptx"]))
    assert "div.rn.f32" in found or not STEPS[name][1].get("scaled")
    assert not {op for op in found if "approx" in op or "full" in op}


def test_aligned_compare_loads_16_bytes(compiled: dict[str, dict[str, Any]]) -> None:
    assert re.search(r"ld\.global\S*\.v4\.b32", compiled["delta-mark"]["ptx"])


@pytest.mark.parametrize("name", PRODUCTS)
def test_tiles_are_multiplied_exactly(compiled: dict[str, dict[str, Any]], name: str) -> None:
    """16 bits: tensor cores with fp32 sums. fp32: FMAs, as many as a step has products, and no TF32."""
    ptx, expected = compiled[name]["ptx"], VARIANTS[name][2]
    multiplied = set(re.findall(r"\b(?:wgmma\.mma_async|mma)\.sync\.aligned\.(\S+)", ptx))
    fmas = len(re.findall(r"\bfma\.\S*f(?:32|64)", ptx))
    assert ".ftz" not in ptx
    if expected["OPERAND"] == "float32":
        assert not multiplied
        assert fmas * compiled[name]["threads"] == expected["TILE"] ** 2 * expected["STEP"]
    else:
        kind = {"bfloat16": "bf16", "float16": "f16"}[expected["OPERAND"]]
        assert multiplied == {f"m64n{expected['TILE']}k16.f32.{kind}.{kind}"}
        assert fmas == 0


@pytest.mark.parametrize("name", [name for name in PRODUCTS if not name.endswith(("-ragged", "-one"))])
def test_aligned_operands_are_copied_16_bytes_at_a_time(compiled: dict[str, dict[str, Any]], name: str) -> None:
    copies = re.findall(r"cp\.async\.c[ag]\.shared\.global \[[^]]*\], \[[^]]*\], (\w+)", compiled[name]["ptx"])
    assert set(copies) == {"0x10"}


def _compile(names: Iterable[str], steps: Iterable[str], capability: int) -> dict[str, dict[str, Any]]:
    return {**_compile_all(names, capability), **_compile_steps(steps, capability)}


if __name__ == "__main__":
    if sys.argv[1:]:
        json.dump(_compile(ON_OTHER_GPUS, STEPS_ON_OTHER_GPUS, int(sys.argv[1])), sys.stdout)
    else:
        json.dump({"compiled": _compile(VARIANTS, STEPS, 90), "launched": _launch_with_varying_scalars()}, sys.stdout)
