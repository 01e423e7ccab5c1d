"""Buckets: flat compact storage of the active elements that one op call covers, and their construction from a mask."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from .. import backends
from ..masks.mask_set import MaskSet, require_own_memory
from ..ops.checks import FLOAT_DTYPES
from .segments import Segments, fits_uint16, index_dtype, pack_indices, run_length_of


@dataclass(eq=False)
class Tiles:
    """The active tiles of a bucket's tiled parameters, those whose gradients are computed tile by tile."""

    table: Tensor  # [tiles, 4] from `ops.tile_table`, one parameter after the other
    starts: list[int]  # of each parameter; equal to its end for a parameter that is not tiled
    ends: list[int]
    tile_size: int
    _first_rows: dict[int, list[int]] = field(default_factory=dict)

    def of_rows(self, i: int, begin: int, end: int) -> Tensor:
        """Return the tiles of rows [begin, end) of parameter i, as a table for the matrix of these rows.

        Raises:
            ValueError: `begin` is not a multiple of the tile size.
        """
        if begin % self.tile_size:
            raise ValueError(f"rows from {begin} on: wanted a multiple of the tile size, {self.tile_size}")
        table = self.table[self.starts[i] : self.ends[i]]
        if i not in self._first_rows:  # the host needs them to slice the table; synchronizes only this once
            self._first_rows[i] = table[:, 0].tolist()
        first_rows = self._first_rows[i]
        part = table[bisect_left(first_rows, begin) : bisect_left(first_rows, end)].clone()
        part[:, 0] -= begin
        return part


@dataclass(eq=False)
class Bucket(Segments):
    """The active parameters of one group, device, dtype and layout of indices, and their compact buffers."""

    group: dict[str, Any]
    names: list[str]
    ordinal: int  # number of the bucket; gives each bucket its own random stream
    ops: Any  # one attribute per op, on the chosen backend
    native: Any  # result of `backends.bind`, or None
    lr: Tensor  # [1] fp32
    steps: Tensor  # [n] fp32
    sum_sq: Tensor  # [n] fp32, of the compact gradient of each parameter
    grad: Tensor | None = None  # [nnz]
    state: dict[str, Tensor] = field(default_factory=dict)  # name -> [nnz]
    filled_lr: float | None = None
    tiles: Tiles | None = None

    def __post_init__(self) -> None:
        self.numels = [p.numel() for p in self.params]
        self._received = [False] * len(self.params)  # unused if there is a native object, which keeps its own
        self._came_by_tiles: set[int] = set()  # likewise

    @property
    def received(self) -> list[bool]:
        """For each parameter, whether it has received a compact gradient since `zero_grad`."""
        return self._received if self.native is None else list(self.native.received)

    @received.setter
    def received(self, received: list[bool]) -> None:
        if self.native is None:
            self._received = received
        else:
            self.native.received = received

    def mark_received(self, i: int, *, by_tiles: bool = False) -> None:
        """Record that parameter i has a compact gradient. A native object records the gradients that it gathers.

        Args:
            by_tiles: it was computed tile by tile, so that the parameter's hook will be called without a gradient.
        """
        self._received[i] = True
        if by_tiles:
            self._came_by_tiles.add(i)

    def add_values_(self, i: int, values: Tensor, found_inf: Tensor | None) -> None:
        """Add `values`, fp32 [slots of parameter i] computed tile by tile, to the compact gradient, or start it."""
        assert self.grad is not None
        if self.native is not None:
            self.native.add_values_(i, values, self.grad, self.sum_sq, found_inf)
            return
        slots = self.grad[self.segment(i)]
        slots.copy_(slots.float().add_(values) if self.received[i] else values)
        stored = slots.float()
        self.sum_sq[i] = stored.square().sum()
        if found_inf is not None:
            found_inf.masked_fill_(~stored.isfinite().all(), torch.inf)
        self.mark_received(i, by_tiles=True)

    def came_by_tiles(self, i: int) -> bool:
        """Whether parameter i has received a gradient computed tile by tile since `drop_gradients`."""
        return i in self._came_by_tiles if self.native is None else bool(self.native.came_by_tiles(i))

    def drop_gradients(self) -> None:
        """Discard the compact gradient and all pending additions to it. Nothing is written."""
        if self.native is not None:
            self.native.drop()
        self._came_by_tiles.clear()
        self._received = [False] * len(self.params)

    def finish_gradients(self) -> None:
        """Add all pending gradients to the compact one. Call it before reading the compact gradient."""
        if self.native is not None:
            self.native.flush()

    @property
    def device(self) -> torch.device:
        return self.indices.device

    def check_params(self) -> None:
        """Raise a ValueError that names the first parameter which the ops cannot take."""
        for name, param, numel in zip(self.names, self.params, self.numels, strict=True):
            if param.numel() != numel:
                raise ValueError(f"{name!r} has {param.numel()} elements, but had {numel} when its mask was bound")
            if param.device != self.device:
                raise ValueError(f"{name!r} is on {param.device}, but was on {self.device} when its mask was bound")
            if param.dtype not in FLOAT_DTYPES:
                raise ValueError(f"{name!r} is {param.dtype}, expected bfloat16, float16 or float32")
            if param.dtype != self.params[0].dtype:
                raise ValueError(f"{name!r} is {param.dtype}, but {self.names[0]!r} is {self.params[0].dtype}")
            if not param.is_contiguous():
                raise ValueError(f"{name!r} has strides {param.stride()}, expected a contiguous parameter")

    def has_dense_grads(self) -> bool:
        if self.native is not None:
            return bool(self.native.has_grads())
        return any(p.grad is not None for p in self.params)

    def names_with_dense_grads(self) -> str:
        return ", ".join(name for name, p in zip(self.names, self.params, strict=True) if p.grad is not None)

    def refresh_lr(self) -> Tensor:
        """Return the group's learning rate on the device; it is copied there only after a change."""
        lr = self.group["lr"]
        if isinstance(lr, Tensor):
            self.lr.copy_(lr, non_blocking=True)
            self.filled_lr = None
        elif lr != self.filled_lr:
            self.lr.fill_(lr)
            self.filled_lr = lr
        return self.lr

    def parameter_state(self, i: int) -> dict[str, Tensor]:
        """Return views of parameter i's part of the flat buffers, under the names of torch's optimizers."""
        views = {name: flat[self.segment(i)] for name, flat in self.state.items()}
        return {"step": self.steps[i], **views}


def bucket_keys(
    groups: list[dict[str, Any]], active: dict[Parameter, Tensor], pattern: str
) -> Iterator[tuple[dict[str, Any], list[str], list[Parameter], int, bool]]:
    """Split each group's active parameters into sets that one op call can take: same device, dtype and index layout.

    The last two results are the run length and whether indices take two bytes. The run length follows from the mask's
    pattern; it is 1 for parameters whose rows do not hold whole runs. Two bytes suffice unless the active elements are
    scattered too widely.
    """
    for group in groups:
        split: dict[tuple[torch.device, torch.dtype, torch.dtype, int, bool], tuple[list[str], list[Parameter]]] = {}
        # The last parameter may be a ScalerProxy's, which has no name.
        for name, param in zip(group["param_names"], group["params"], strict=False):
            if param in active:
                run_length = run_length_of(param.shape, pattern)
                narrow = fits_uint16(param, active[param], run_length)
                key = (param.device, param.dtype, index_dtype(param), run_length, narrow)
                names, params = split.setdefault(key, ([], []))
                names.append(name)
                params.append(param)
        for (_, _, _, run_length, narrow), (names, params) in split.items():
            yield group, names, params, run_length, narrow


def build_bucket(
    group: dict[str, Any],
    names: list[str],
    params: list[Parameter],
    active: dict[Parameter, Tensor],
    *,
    run_length: int,
    narrow: bool,
    ordinal: int,
    op: str,
    backend: str | None,
) -> Bucket:
    """Build a bucket with the concatenated indices of `params` on their device; the optimizer adds the buffers."""
    device = params[0].device
    counts = [active[p].numel() for p in params]
    ends = [sum(counts[: i + 1]) for i in range(len(counts))]
    starts = [end - count for end, count in zip(ends, counts, strict=True)]
    parts = [active[p][::run_length].to(index_dtype(p)) for p in params]
    indices, index_bases = pack_indices(parts, starts, ends, narrow)
    indices, index_bases = indices.to(device), None if index_bases is None else index_bases.to(device)
    return Bucket(
        params=params,
        indices=indices,
        index_bases=index_bases,
        starts=starts,
        ends=ends,
        run_length=run_length,
        group=group,
        names=names,
        ordinal=ordinal,
        ops=backends.functions(device, backend),
        native=backends.bind(
            op, params, indices, starts, ends, run_length=run_length, index_bases=index_bases, backend=backend
        ),
        lr=torch.zeros(1, dtype=torch.float32, device=device),
        steps=torch.zeros(len(params), dtype=torch.float32, device=device),
        sum_sq=torch.zeros(len(params), dtype=torch.float32, device=device),
    )


def compact(bucket: Bucket, dtype: torch.dtype | None = None) -> Tensor:
    """Return the parameters' values at the active elements: [nnz] in `dtype`, by default the parameters' own."""
    parts = [p.detach().view(-1)[bucket.positions(i).long()] for i, p in enumerate(bucket.params)]
    return torch.cat(parts).to(dtype or bucket.params[0].dtype)


def active_parameters(
    named: dict[str, Parameter], mask: MaskSet, frozen: Collection[Parameter], model: nn.Module | None
) -> tuple[MaskSet, dict[Parameter, Tensor]]:
    """Return the mask under the parameters' names, and the indices of each parameter with active elements.

    Args:
        frozen: parameters that do not require grad only because the optimizer has frozen them.
        model: the module that the parameters belong to, if known; it may have others.

    Raises:
        MaskError: the mask does not fit the model, or a parameter with active elements shares memory with another.
        ValueError: the mask has no active element, or one in a parameter that cannot be trained.
    """
    mask = mask.resolve(named)
    active = {named[name]: mask[name] for name in mask.names if mask[name].numel()}
    if not active:
        raise ValueError(f"the mask has no active element in any of the {len(named)} parameters given")
    if model is not None:
        of_model = dict(model.named_parameters())
        ids = {id(p) for p in active}
        require_own_memory(of_model, [name for name, p in of_model.items() if id(p) in ids])
    ours = {id(p) for p in frozen}
    for name, param in named.items():
        if param not in active:
            continue
        if not param.requires_grad and id(param) not in ours:
            raise ValueError(
                f"the mask has {active[param].numel()} active elements in {name!r}, which does not require grad"
            )
        if not param.is_contiguous():
            raise ValueError(f"{name!r} has strides {param.stride()}, wanted a contiguous parameter")
        if param.dtype not in FLOAT_DTYPES:
            raise ValueError(f"{name!r} is {param.dtype}, wanted bfloat16, float16 or float32")
    return mask, active


def build_buckets(
    groups: list[dict[str, Any]], active: dict[Parameter, Tensor], pattern: str, op: str, backend: str | None
) -> list[Bucket]:
    """Build the buckets of all groups, in the groups' order, without state and gradients, for a mask of `pattern`."""
    return [
        build_bucket(
            group, names, params, active, run_length=run_length, narrow=narrow, ordinal=ordinal, op=op, backend=backend
        )
        for ordinal, (group, names, params, run_length, narrow) in enumerate(bucket_keys(groups, active, pattern))
    ]
