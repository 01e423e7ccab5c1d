"""Registration of the ops with torch as `torch.ops.sparse_opt.*`: schemas and fakes.

The schemas are defined here and not in the extension, so that the ops exist without a compiled extension. Those of
`torch.ops.sparse_opt_native.*`, for which the extension registers its kernels, follow from them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import backends
from . import checks
from .namespace import NATIVE, PUBLIC
from .step_ops import STEP_OPS, StepOp

_SEGMENTS = "Tensor indices, SymInt[] starts, SymInt[] ends"
_RUNS = "int run_length=1, Tensor? index_bases=None"


def _step_arguments(op: StepOp) -> str:
    states = (f"Tensor({x}!){'?' * (name in op.optional)} {name}" for x, name in zip("bc", op.states, strict=False))
    options = (f"{type(value).__name__} {name}={value}" for name, value in op.options.items())
    return (
        f"(Tensor(a!)[] params, {_SEGMENTS}, {', '.join(states)}, Tensor lr, Tensor steps, *, "
        f"Tensor? grad=None, Tensor[]? dense_grads=None, Tensor(z!)? master=None, Tensor(y!)? weights=None, "
        f"bool params_hold_master=False, {', '.join(options)}, "
        "Tensor? clip_coef=None, Tensor? grad_scale=None, Tensor? found_inf=None, "
        f"bool stochastic_rounding=False, int seed=0, {_RUNS}"
    )


# Without the argument `backend`, which the public ops add and the native ones do not have.
SCHEMAS = {
    **{name: (_step_arguments(op), "()") for name, op in STEP_OPS.items()},
    "masked_grad_gather_": (
        f"(Tensor(a!) out, Tensor[] dense, {_SEGMENTS}, *, Tensor? scale=None, bool accumulate=False, "
        f"Tensor(b!)? sum_sq=None, Tensor(c!)? found_inf=None, {_RUNS}",
        "()",
    ),
    "tile_weight_grad_": (
        "(Tensor(a!) out, Tensor[] grad_outputs, Tensor[] inputs, Tensor tiles, SymInt[] starts, SymInt[] ends, *, "
        "int tile_size, Tensor? scale=None, bool accumulate=False, Tensor(b!)? sum_sq=None, Tensor(c!)? found_inf=None",
        "()",
    ),
    "indexed_swap_": (f"(Tensor(a!)[] dense, Tensor(b!) compact, {_SEGMENTS}, *, {_RUNS}", "()"),
    "indexed_replace_": (f"(Tensor(a!)[] dense, Tensor before, Tensor after, {_SEGMENTS}, *, {_RUNS}", "()"),
    "delta_encode": ("(Tensor[] old, Tensor[] new, *", "(Tensor indices, Tensor values, Tensor counts)"),
    "delta_apply_": ("(Tensor(a!)[] dense, Tensor indices, Tensor values, SymInt[] starts, SymInt[] ends, *", "()"),
}

_library = torch.library.Library(PUBLIC, "DEF")
_native = torch.library.Library(NATIVE, "FRAGMENT")
_ops = getattr(torch.ops, PUBLIC)


def _native_schema(name: str) -> str:
    """Return the schema of a native op; a native step op can also count its steps, or only check its arguments."""
    arguments, returns = SCHEMAS[name]
    arguments = arguments.replace("SymInt[]", "int[]").removesuffix(", *")
    if name in STEP_OPS:
        arguments = arguments.replace("Tensor steps", "Tensor(s!) steps")
        arguments += ", bool count_steps=False, bool check_only=False"
    return f"{name}{arguments}) -> {returns}"


def _device(name: str, args: tuple[Any, ...]) -> torch.device:
    if name == "delta_encode":
        return args[1][0].device
    if name == "tile_weight_grad_":
        return args[3].device
    if name == "indexed_replace_":
        return args[3].device
    return args[2].device if name in ("masked_grad_gather_", "indexed_swap_") else args[1].device


def _with_defaults(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Add the arguments that the dispatcher leaves out because they equal their default."""
    schema = getattr(_ops, name).default._schema
    positional = [a for a in schema.arguments if not a.kwarg_only]
    args = args + tuple(kwargs.get(a.name, a.default_value) for a in positional[len(args) :])
    named = {a.name: kwargs.get(a.name, a.default_value) for a in schema.arguments if a.kwarg_only}
    return args, named


def _bump_versions(mutated: list[tuple[int, str]], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Increment the version counters of mutated tensors, since autograd does not see writes through pointers."""
    for i, name in mutated:
        value = args[i] if i < len(args) else kwargs[name]
        tensors = [value] if isinstance(value, Tensor) else value or []
        torch.autograd.graph.increment_version([t for t in tensors if not t.is_inference()])


def _unknown_until_run(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a traced function reads a length or a segment from a tensor; `run` checks the numbers later."""
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols  # imports sympy, as tracing does anyway

    return any(free_unbacked_symbols(value) for value in (*args, *kwargs.values()) if not isinstance(value, str))


def _register(name: str) -> None:
    arguments, returns = SCHEMAS[name]

    _library.define(f"{name}{arguments}, str? backend=None) -> {returns}", tags=(torch.Tag.pt2_compliant_tag,))
    _native.define(_native_schema(name))
    check = checks.of(name)
    mutated = [
        (i, a.name)
        for i, a in enumerate(getattr(_ops, name).default._schema.arguments)
        if a.alias_info is not None and a.alias_info.is_write
    ]

    def run(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = _with_defaults(name, args, kwargs)
        backend = kwargs.pop("backend")
        check(*args, **kwargs)
        result = backends.function(name, _device(name, args), backend)(*args, **kwargs)
        _bump_versions(mutated, args, kwargs)
        return result

    def fake(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = _with_defaults(name, args, kwargs)
        kwargs.pop("backend")
        if not _unknown_until_run(args, kwargs):
            check(*args, **kwargs)
        return _fake_delta_encode(*args) if name == "delta_encode" else None

    _library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{PUBLIC}::{name}", fake, lib=_library)


def _fake_delta_encode(old: list[Tensor], new: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    changed = torch.library.get_ctx().new_dynamic_size()
    wide = any(t.numel() > 2**31 - 1 for t in new)
    indices = new[0].new_empty(changed, dtype=torch.int64 if wide else torch.int32)
    return indices, new[0].new_empty(changed), torch.empty(len(new), dtype=torch.int64, device="cpu")


for _name in SCHEMAS:
    _register(_name)
