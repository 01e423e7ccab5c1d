"""The implementation of reads, comparisons and writes on a device: plain torch or Triton kernels."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import backends
from ..errors import BackendUnavailable
from . import reference
from .destinations import PlacedTensor
from .layout import Layout
from .reference import ReferenceChanges, ReferenceIndex
from .triton_index import TritonChanges, TritonIndex

Changes = ReferenceChanges | TritonChanges
Index = ReferenceIndex | TritonIndex


class Backend(NamedTuple):
    """The functions of a backend; `reference` documents them."""

    name: str
    digest_sum: Callable[[Tensor, int], Tensor]
    compare: Callable[[Tensor, Tensor, int, int], tuple[Tensor, Tensor, Tensor]]
    select: Callable[[Tensor, Tensor, int], Tensor]
    index_type: type[Index]

    def build_indices(
        self,
        layout: Layout,
        units: Mapping[str, Tensor],
        placed: Mapping[str, PlacedTensor],
        device: torch.device,
    ) -> tuple[Index, ...]:
        """Return for each group of a layout where its active elements are.

        Args:
            units: as in a mask message, by name.
            placed: the tensors with their destinations, by name.
        """
        return tuple(
            self.index_type(group, layout.names(group), layout.pattern, units, placed, device)
            for group in layout.groups
        )


def _of(name: str, module: Any, index_type: type[Index]) -> Backend:
    return Backend(name, module.digest_sum, module.compare, module.select, index_type)


REFERENCE = _of("reference", reference, ReferenceIndex)


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
