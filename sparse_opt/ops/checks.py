"""Argument checks of the ops, shared by all backends. Each error names the argument, its value and the expected value.

Positions are not compared with the tensors' sizes, because that would read them back from the device. `MaskSet` checks
its indices once when it is built; for other indices the caller is responsible.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .narrow import FRAME
from .step_ops import STEP_OPS, StepOp
from .tiles import TILE_SIZES

FLOAT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
STATE_DTYPES = (torch.float32, torch.bfloat16)
INDEX_DTYPES = (torch.int32, torch.int64)
LONGEST_RUN = 2**30  # the native kernels hold it in 32 bits


def _fail(op: str, text: str) -> None:
    raise ValueError(f"{op}: {text}")


def _names(dtypes: Sequence[torch.dtype]) -> str:
    return " or ".join(str(d).removeprefix("torch.") for d in dtypes)


def _dense(op: str, name: str, tensors: Sequence[Tensor], device: torch.device, dtypes: Sequence[torch.dtype]) -> None:
    for i, t in enumerate(tensors):
        if t.device != device:
            _fail(op, f"{name}[{i}] is on {t.device}, expected {device}")
        if t.dtype not in dtypes:
            _fail(op, f"{name}[{i}] is {t.dtype}, expected {_names(dtypes)}")
        if t.dtype != tensors[0].dtype:
            _fail(op, f"{name}[{i}] is {t.dtype}, but {name}[0] is {tensors[0].dtype}; one call takes one dtype")
        if not t.is_contiguous():
            _fail(op, f"{name}[{i}] of shape {list(t.shape)} has strides {list(t.stride())}, expected contiguous")


def same_shapes(op: str, name: str, tensors: Sequence[Tensor], like_name: str, like: Sequence[Tensor]) -> None:
    """Raise a ValueError unless two lists of tensors have the same shapes."""
    if len(tensors) != len(like):
        _fail(op, f"{name} holds {len(tensors)} tensors, {like_name} holds {len(like)}")
    for i, (t, u) in enumerate(zip(tensors, like, strict=True)):
        if t.shape != u.shape:
            _fail(op, f"{name}[{i}] has shape {list(t.shape)}, {like_name}[{i}] has {list(u.shape)}")


def _flat(
    op: str, name: str, t: Tensor, device: torch.device, dtypes: Sequence[torch.dtype], length: int | None = None
) -> None:
    if t.device != device:
        _fail(op, f"{name} is on {t.device}, expected {device}")
    if t.dtype not in dtypes:
        _fail(op, f"{name} is {t.dtype}, expected {_names(dtypes)}")
    if t.dim() != 1:
        _fail(op, f"{name} has shape {list(t.shape)}, expected one dimension")
    if length is not None and t.numel() != length:
        _fail(op, f"{name} has {t.numel()} elements, expected {length}")
    if not t.is_contiguous():
        _fail(op, f"{name} has stride {t.stride(0)}, expected contiguous")


def _compact(
    op: str, name: str, t: Tensor, dtypes: Sequence[torch.dtype], indices: Tensor, run_length: int = 1
) -> None:
    _flat(op, name, t, indices.device, dtypes)
    nnz = indices.numel() * run_length
    if t.numel() != nnz:
        runs = f" for {indices.numel()} indices of run_length {run_length}" if run_length > 1 else ""
        _fail(op, f"{name} has {t.numel()} elements, expected {nnz}{runs}")


def _scalar(op: str, name: str, t: Tensor | None, device: torch.device) -> None:
    if t is None:
        return
    if t.device != device:
        _fail(op, f"{name} is on {t.device}, expected {device}")
    if t.dtype != torch.float32 or t.numel() != 1:
        _fail(op, f"{name} is {t.dtype} of shape {list(t.shape)}, expected one float32 element")


def _segments(
    op: str,
    name: str,
    dense: Sequence[Tensor],
    indices: Tensor,
    starts: Sequence[int],
    ends: Sequence[int],
    run_length: int = 1,
    index_bases: Tensor | None = None,
) -> None:
    if not 1 <= run_length <= LONGEST_RUN or run_length & (run_length - 1):
        _fail(op, f"run_length is {run_length}, expected a power of two from 1 to {LONGEST_RUN}")
    if index_bases is None:
        _flat(op, "indices", indices, indices.device, INDEX_DTYPES)
    else:
        _flat(op, "indices", indices, indices.device, (torch.uint16,))
        n_bases = indices.numel() // FRAME + len(dense)
        _flat(op, "index_bases", index_bases, indices.device, (torch.int32,), n_bases)
        if run_length != 1:
            _fail(op, f"run_length is {run_length}, expected 1 with index_bases")
    if len(starts) != len(dense) or len(ends) != len(dense):
        _fail(op, f"starts holds {len(starts)} and ends {len(ends)} numbers, {name} holds {len(dense)} tensors")
    nnz = indices.numel() * run_length
    runs = f", the slots of {indices.numel()} indices of run_length {run_length}" if run_length > 1 else ""
    for i, (t, start, end) in enumerate(zip(dense, starts, ends, strict=True)):
        if not 0 <= start <= end <= nnz:
            _fail(op, f"segment {i} is [{start}, {end}), expected within [0, {nnz}){runs}")
        if (start | end) % run_length:
            _fail(op, f"segment {i} is [{start}, {end}), expected multiples of run_length {run_length}")
        if end - start > t.numel():
            _fail(op, f"segment {i} has {end - start} slots, but {name}[{i}] has {t.numel()} elements")
        if indices.dtype != torch.int64 and t.numel() > 2**31:
            found = "int32 indices" if index_bases is None else "int32 index_bases"
            _fail(op, f"{name}[{i}] has {t.numel()} elements, which {found} cannot reach; expected int64 indices")
    order = [(s, e) for s, e in zip(starts, ends, strict=True) if e > s]
    if index_bases is not None and any(b[0] < a[1] for a, b in itertools.pairwise(order)):
        _fail(
            op, f"starts are {list(starts)}, expected ascending segments with index_bases, as narrow_indices takes them"
        )
    order.sort()
    for (_, end), (start, _) in itertools.pairwise(order):
        if start < end:
            _fail(op, f"two segments overlap at compact slot {start}; expected disjoint segments")


def _gradient(
    op: str,
    params: Sequence[Tensor],
    indices: Tensor,
    run_length: int,
    grad: Tensor | None,
    dense_grads: Sequence[Tensor] | None,
) -> None:
    if (grad is None) == (dense_grads is None):
        _fail(op, f"{'neither' if grad is None else 'both'} of grad and dense_grads given, expected exactly one")
    if grad is not None:
        _compact(op, "grad", grad, FLOAT_DTYPES, indices, run_length)
    if dense_grads is not None:
        same_shapes(op, "dense_grads", dense_grads, "params", params)
        _dense(op, "dense_grads", dense_grads, indices.device, FLOAT_DTYPES)


# The checks take the arguments of the ops, with the types of schemas.py.


def step(op: StepOp, params, indices, starts, ends, *states_lr_steps, **kw: Any) -> None:
    """Check the arguments of a step op. States, `lr` and `steps` are positional, as in the op's signature."""
    *states, lr, steps = states_lr_steps
    for name, tensor in (*zip(op.states, states, strict=True), ("lr", lr), ("steps", steps)):
        if tensor is None and name not in op.optional:
            _fail(op.name, f"{name} is None, expected a tensor")
    device, run_length = indices.device, kw["run_length"]
    _segments(op.name, "params", params, indices, starts, ends, run_length, kw["index_bases"])
    _dense(op.name, "params", params, device, FLOAT_DTYPES)
    _gradient(op.name, params, indices, run_length, kw["grad"], kw["dense_grads"])
    if kw["master"] is not None:
        _compact(op.name, "master", kw["master"], (torch.float32,), indices, run_length)
    elif kw["params_hold_master"]:
        _fail(op.name, "params_hold_master is True, but master is None")
    if kw["weights"] is not None:
        if kw["master"] is not None:
            _fail(op.name, "both of master and weights given, expected at most one")
        _like_dense(op.name, "weights", kw["weights"], params, indices, run_length)
    for name in ("clip_coef", "grad_scale", "found_inf"):
        _scalar(op.name, name, kw[name], device)
    if not 0 <= kw["seed"] < 2**63:
        _fail(op.name, f"seed is {kw['seed']}, expected 0 <= seed < 2**63")
    dtypes: tuple[torch.dtype, ...] = STATE_DTYPES
    for name, state in zip(op.states, states, strict=True):
        if state is not None:
            _compact(op.name, name, state, dtypes, indices, run_length)
            dtypes = (state.dtype,)
        elif name in op.used_states(kw):
            _fail(op.name, f"{op.optional[name]} is {kw[op.optional[name]]} but {name} is None")
    _scalar(op.name, "lr", lr, device)
    _flat(op.name, "steps", steps, device, (torch.float32,), len(params))
    if reason := op.why_invalid(kw):
        _fail(op.name, reason)


def masked_grad_gather_(out, dense, indices, starts, ends, **kw: Any) -> None:
    op, device = "masked_grad_gather_", indices.device
    _segments(op, "dense", dense, indices, starts, ends, kw["run_length"], kw["index_bases"])
    _dense(op, "dense", dense, device, FLOAT_DTYPES)
    _compact(op, "out", out, FLOAT_DTYPES, indices, kw["run_length"])
    _scalar(op, "scale", kw["scale"], device)
    _scalar(op, "found_inf", kw["found_inf"], device)
    if kw["sum_sq"] is not None:
        _flat(op, "sum_sq", kw["sum_sq"], device, (torch.float32,), len(dense))


def tile_weight_grad_(out, grad_outputs, inputs, tiles, starts, ends, **kw: Any) -> None:
    op, device = "tile_weight_grad_", tiles.device
    if kw["tile_size"] not in TILE_SIZES:
        _fail(op, f"tile_size is {kw['tile_size']}, expected 64 or 128")
    if tiles.dtype != torch.int64 or tiles.dim() != 2 or tiles.shape[1] != 4 or not tiles.is_contiguous():
        _fail(op, f"tiles is {tiles.dtype} of shape {list(tiles.shape)}, expected contiguous int64 [tiles, 4]")
    n = len(grad_outputs)
    if not n == len(inputs) == len(starts) == len(ends):
        _fail(
            op,
            f"grad_outputs holds {n} and inputs {len(inputs)} tensors, starts {len(starts)} and ends {len(ends)} "
            "numbers, expected equal numbers",
        )
    _dense(op, "grad_outputs", grad_outputs, device, FLOAT_DTYPES)
    _dense(op, "inputs", inputs, device, FLOAT_DTYPES)
    for i, (g, x) in enumerate(zip(grad_outputs, inputs, strict=True)):
        if g.dtype != x.dtype:
            _fail(op, f"inputs[{i}] is {x.dtype}, but grad_outputs[{i}] is {g.dtype}; one call takes one dtype")
        if g.dim() < 2 or x.dim() < 2 or g.shape[:-1] != x.shape[:-1]:
            _fail(
                op,
                f"grad_outputs[{i}] has shape {list(g.shape)} and inputs[{i}] {list(x.shape)}, "
                "expected [..., rows] and [..., columns] of the same leading sizes",
            )
    for i, (start, end) in enumerate(zip(starts, ends, strict=True)):
        if not 0 <= start <= end <= tiles.shape[0]:
            _fail(op, f"matrix {i} has the tiles [{start}, {end}), expected within [0, {tiles.shape[0]})")
    order = sorted((s, e) for s, e in zip(starts, ends, strict=True) if e > s)
    for (_, end), (start, _) in itertools.pairwise(order):
        if start < end:
            _fail(op, f"two matrices share tile {start}; expected ranges of tiles that do not overlap")
    if kw["token_offsets"] is not None:
        _flat(op, "token_offsets", kw["token_offsets"], device, (torch.int32,))
    _flat(op, "out", out, device, FLOAT_DTYPES)
    _scalar(op, "scale", kw["scale"], device)
    _scalar(op, "found_inf", kw["found_inf"], device)
    if kw["sum_sq"] is not None:
        _flat(op, "sum_sq", kw["sum_sq"], device, (torch.float32,), n)


def _movable(op: str, name: str, tensors: Sequence[Tensor], device: torch.device) -> None:
    for i, t in enumerate(tensors):
        if t.element_size() not in (1, 2, 4, 8):
            _fail(op, f"{name}[{i}] is {t.dtype} of {t.element_size()} bytes, expected elements of 1, 2, 4 or 8 bytes")
    _dense(op, name, tensors, device, tuple({t.dtype for t in tensors}))


def _like_dense(op: str, name: str, t: Tensor, dense: Sequence[Tensor], indices: Tensor, run_length: int = 1) -> None:
    dtype = dense[0].dtype if dense else t.dtype
    _compact(op, name, t, (dtype,), indices, run_length)


def indexed_swap_(dense, compact, indices, starts, ends, *, run_length, index_bases) -> None:
    op = "indexed_swap_"
    _segments(op, "dense", dense, indices, starts, ends, run_length, index_bases)
    _movable(op, "dense", dense, indices.device)
    _like_dense(op, "compact", compact, dense, indices, run_length)


def indexed_replace_(dense, before, after, indices, starts, ends, *, run_length, index_bases) -> None:
    op = "indexed_replace_"
    _segments(op, "dense", dense, indices, starts, ends, run_length, index_bases)
    _dense(op, "dense", dense, indices.device, FLOAT_DTYPES)
    dtypes = (*dict.fromkeys([dense[0].dtype, torch.float32]),) if dense else FLOAT_DTYPES
    _compact(op, "before", before, dtypes, indices, run_length)
    _compact(op, "after", after, dtypes, indices, run_length)


def bind(tensors, indices, starts, ends, run_length, index_bases) -> None:
    """Check the arguments that `ops.bind` binds: tensors and segments."""
    _movable("bind", "tensors", tensors, indices.device)
    _segments("bind", "tensors", tensors, indices, starts, ends, run_length, index_bases)


def delta_encode(old, new) -> None:
    op = "delta_encode"
    if not len(new):
        _fail(op, "new holds no tensor, expected at least one")
    same_shapes(op, "old", old, "new", new)
    _movable(op, "new", new, new[0].device)
    if new[0].is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"{op}: a CUDA graph is being captured, which cannot wait for the number of changes; call it outside of one"
        )
    _dense(op, "old", old, new[0].device, (new[0].dtype,))


def delta_apply_(dense, indices, values, starts, ends) -> None:
    op = "delta_apply_"
    _segments(op, "dense", dense, indices, starts, ends)
    _movable(op, "dense", dense, indices.device)
    _like_dense(op, "values", values, dense, indices)


def of(name: str) -> Callable[..., None]:
    """Return the check of an op's arguments. It takes all of them except `backend`, the keyword arguments by name."""
    return functools.partial(step, STEP_OPS[name]) if name in STEP_OPS else globals()[name]
