"""The implementation of reads, comparisons and writes on a device: plain torch or Triton kernels."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from .. import backends
from ..errors import BackendUnavailable
from . import reference
from .destinations import PlacedTensor
from .layout import Group
from .triton_index import TritonIndex


class Changes(Protocol):
    """The changed elements of an update; `reference.ReferenceChanges` documents the methods."""

    def sums(self, changed: Tensor, *, read_old: bool) -> Tensor: ...
    def write(self, changed: Tensor) -> None: ...


class Index(Protocol):
    """The active elements of one dtype; `reference.ReferenceIndex` documents the methods."""

    def nbytes(self) -> dict[str, int]: ...
    def take(self) -> Tensor: ...
    def put(self, values: Tensor, valid: Tensor | None = None) -> None: ...
    def changes(self, bitmap: Tensor, capacity: int) -> Changes: ...


IndexFactory = Callable[
    [Group, Sequence[str], str, Mapping[str, Tensor], Mapping[str, PlacedTensor], torch.device], Index
]


class Backend(NamedTuple):
    """The functions of a backend; `reference` documents them."""

    name: str
    digest_sum: Callable[[Tensor, int], Tensor]
    compare: Callable[[Tensor, Tensor, int, int], tuple[Tensor, Tensor, Tensor]]
    select: Callable[[Tensor, Tensor, int], Tensor]
    split_pieces: Callable[[Tensor, torch.device], Tensor]
    copy_pieces: Callable[[Tensor, Tensor, Tensor], None]
    build_index: IndexFactory


def _of(name: str, module: Any, build_index: IndexFactory) -> Backend:
    functions = module.digest_sum, module.compare, module.select, module.split_pieces, module.copy_pieces
    return Backend(name, *functions, build_index)


REFERENCE = _of("reference", reference, reference.ReferenceIndex)


def choose(device: torch.device, name: str | None) -> Backend:
    """Return the backend of this name, or for None the fastest one on the device.

    Raises:
        ValueError: there is no backend of this name.
        BackendUnavailable: it cannot run on the device.
    """
    if name not in (None, "reference", "triton"):
        raise ValueError(f"backend is {name!r}, expected 'reference', 'triton' or None")
    if name == "reference" or (name is None and device.type != "cuda"):
        return REFERENCE
    if cause := backends.why_unavailable("triton", device):
        raise BackendUnavailable(f"backend 'triton' of weight_sync cannot run: {cause}")
    kernels: Any = backends.triton_module()[0]
    return _of("triton", kernels.weight_sync, TritonIndex)
