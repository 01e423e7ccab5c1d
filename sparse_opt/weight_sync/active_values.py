"""Reads the active values that a sender sends: from an optimizer, a module or tensors by name."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from ..errors import WeightSyncError
from ..masks import MaskSet
from ..optim import SparseOptimizer
from ..tensors import holds_base_weights, is_wrapper, named_parameters_of
from .destinations import place, whole_weight
from .encoding import units_of
from .index import Backend, Index, choose
from .layout import Layout

Source = SparseOptimizer | nn.Module | Mapping[str, Tensor]


class ActiveValues(ABC):
    """The active values of some weights, as they are now."""

    mask: MaskSet
    layout: Layout
    device: torch.device
    backend: Backend

    @abstractmethod
    def take(self) -> dict[str, Tensor]:
        """Return the values [nnz] of each dtype of the layout, in new memory on `device`, on the current stream."""


class WeightsOf(ActiveValues):
    """The active values of whole weights on one device.

    Args:
        source, mask, backend, dtype: see `WeightSender`.

    Raises:
        ValueError, MaskError: as `WeightSender`.
    """

    def __init__(
        self, source: Source, mask: MaskSet | None, backend: str | None, dtype: torch.dtype | None = None
    ) -> None:
        self._source = source
        named = named_weights(source)
        self.mask = mask_of(source, mask)
        self._stored = Layout.of(self.mask, named)
        self.layout = self._stored if dtype is None else Layout.of(self.mask, named, dtype)
        devices = {weight.device for weight in self._weights().values()}
        devices = devices or {named[name].device for name in self.mask.names[:1]}  # the mask is empty
        if len(devices) > 1:
            raise ValueError(f"the weights are on {' and '.join(sorted(map(str, devices)))}, expected one device")
        self.device = devices.pop() if devices else torch.device("cpu")
        self.backend = choose(self.device, backend)
        self._addresses: dict[str, int] = {}
        self._indices: tuple[Index, ...] = ()

    @torch.no_grad()
    def take(self) -> dict[str, Tensor]:
        """See `ActiveValues.take`.

        Raises:
            WeightSyncError: the optimizer's mask was replaced, or the model holds its base weights.
            ValueError: a weight is not a plain tensor.
        """
        require_current(self._source, self.mask)
        held = self._source.active_weights() if isinstance(self._source, SparseOptimizer) else None
        if held is not None:
            parts: dict[str, Tensor] = {}
            for names, values in held:
                parts.update(zip(names, values.split([self.mask[name].numel() for name in names]), strict=True))
            return self.layout.joined(parts)
        found = self._taken()
        # The host checks whether weights have moved while the GPU reads; the indices keep the memory they read alive.
        weights = self._weights()
        addresses = {name: weight.data_ptr() for name, weight in weights.items()}
        if addresses != self._addresses:
            placed = place(self._stored, {name: [whole_weight(name, weight)] for name, weight in weights.items()})
            units = {entry.name: units_of(self.mask, entry) for entry in self._stored.tensors if entry.nnz}
            self._indices = self.backend.build_indices(self._stored, units, placed, self.device)
            self._addresses = addresses
            found = self._taken()
        return found if self.layout is self._stored else self.layout.joined(self._stored.split(found))

    def _taken(self) -> dict[str, Tensor]:
        return {group.dtype: index.take() for group, index in zip(self._stored.groups, self._indices, strict=False)}

    def _weights(self) -> dict[str, Tensor]:
        """Return the weights with active elements as they are now."""
        named = named_weights(self._source)
        weights = {entry.name: named[entry.name] for entry in self._stored.tensors if entry.nnz}
        require_current(self._source, self.mask, weights.values())
        for name, weight in weights.items():
            if is_wrapper(weight):
                kind = type(weight).__name__
                raise ValueError(f"{name!r} is a {kind}, expected a plain tensor; see DistributedWeightSender")
        return weights


def named_weights(source: Source) -> dict[str, Tensor]:
    """Return the parameters of a source by name."""
    if isinstance(source, SparseOptimizer):
        groups = source.param_groups
        return {n: p for group in groups for n, p in zip(group["param_names"], group["params"], strict=True)}
    return named_parameters_of(source)


def mask_of(source: Source, mask: MaskSet | None) -> MaskSet:
    """Return the mask of a source, with its names.

    Raises:
        ValueError: both an optimizer and a mask are given, or neither.
        MaskError: the mask does not fit the weights.
    """
    if isinstance(source, SparseOptimizer):
        if mask is not None:
            raise ValueError("mask is not valid with an optimizer, whose own mask is used")
        return source.mask
    if mask is None:
        raise ValueError("mask is None, expected a MaskSet unless the source is an optimizer")
    return mask.resolve(named_weights(source))


def require_current(source: Source, mask: MaskSet, weights: Iterable[Tensor] = ()) -> None:
    """Raise WeightSyncError if an optimizer has another mask by now, or its model or the weights hold base weights."""
    if isinstance(source, SparseOptimizer) and source.mask is not mask:
        raise WeightSyncError("the optimizer's mask was replaced: build a new WeightSender")
    if holds_base_weights(weights) or (isinstance(source, SparseOptimizer) and source.holds_base_weights):
        raise WeightSyncError("the model holds its base weights: leave base_weights() first")
    if isinstance(source, SparseOptimizer):
        source.check_binding()
