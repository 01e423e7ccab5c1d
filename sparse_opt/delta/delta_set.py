"""DeltaSet: several deltas of one base, of which a model has one at a time."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from ..errors import DeltaError
from ..options import nearest
from .sparse_delta import SparseDelta, require_no_base_weights


class DeltaSet:
    """Switches a model between its base and several deltas, in place.

    All deltas are decoded and verified once, when the set is made. To activate one is to exchange the changed elements
    of two deltas. If the version counters of the tensors show a write between two calls, the next `activate` verifies
    the written tensors; writes through `.data`, and to tensors made in inference mode, have no counters.

    Raises:
        DeltaError: as `SparseDelta.apply_`: the model must have the bits of the deltas' base.
    """

    def __init__(self, model: nn.Module, deltas: Mapping[str, SparseDelta]) -> None:
        self._deltas = dict(deltas)
        self._exchanges = {name: delta.exchange(model) for name, delta in deltas.items()}
        self.active: str | None = None
        self._versions = {name: _versions(exchange.tensors) for name, exchange in self._exchanges.items()}

    @property
    def nbytes(self) -> int:
        """Bytes of the indices and values of all deltas, on the model's device."""
        return sum(exchange.nbytes for exchange in self._exchanges.values())

    def activate(self, name: str | None) -> None:
        """Give the model the weights of a delta, or with None those of the base, bit for bit.

        Raises:
            DeltaError: there is no such delta, or a weight was changed by other code since the last call; the model
                then keeps its weights.
        """
        if name is not None and name not in self._exchanges:
            raise DeltaError(f"there is no delta {name!r}{nearest(name, self._exchanges)}")
        written = [key for key, x in self._exchanges.items() if _versions(x.tensors) != self._versions[key]]
        if name == self.active and not written:
            return
        for exchange in self._exchanges.values():
            require_no_base_weights(exchange.tensors, "activate")
        current = {} if self.active is None else self._exchanges[self.active].tensors
        held = {id(tensor) for tensor in current.values()}
        if self.active is not None and written:
            self._deltas[self.active].require_bits(current, "activate", applied=True)
        for key in written:
            others = {n: tensor for n, tensor in self._exchanges[key].tensors.items() if id(tensor) not in held}
            self._deltas[key].require_bits(others, "activate", applied=False)
        if self.active is not None:
            self._exchanges[self.active].leave_()
        self.active = name
        if name is not None:
            self._exchanges[name].enter_()
        self._versions = {key: _versions(exchange.tensors) for key, exchange in self._exchanges.items()}


def _versions(tensors: Mapping[str, Tensor]) -> list[int]:
    return [0 if tensor.is_inference() else tensor._version for tensor in tensors.values()]
