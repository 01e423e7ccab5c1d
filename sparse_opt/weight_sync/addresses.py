"""Addresses: notices that a weight is no longer where a receiver writes it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor, nn

from ..tensors import named_parameters_of


class Addresses:
    """The addresses of some of a module's parameters, or of tensors by name.

    A receiver compares them before each write. An update takes about 3 ms, and `named_parameters()` of 255 parameters
    half a millisecond; this keeps where the module holds them instead, and asks again only if a submodule was replaced.

    Args:
        weights: a module, or its parameters by name.
        names: the parameters to compare; `weights` has all of them.
    """

    def __init__(self, weights: nn.Module | Mapping[str, Tensor], names: Iterable[str]) -> None:
        self._weights = weights
        found = named_parameters_of(weights)
        self._expected = {name: found[name].data_ptr() for name in names}
        # The dictionaries in which modules keep their submodules and parameters.
        self._submodules: list[tuple[dict[str, nn.Module | None], str, nn.Module | None]] = []
        self._parameters: list[tuple[str, Mapping[str, Tensor | None], str]] = []
        if isinstance(weights, nn.Module):
            self._find(weights, found)
        else:
            self._parameters = [(name, weights, name) for name in self._expected]

    def _find(self, root: nn.Module, found: Mapping[str, Tensor]) -> None:
        for prefix, module in root.named_modules(remove_duplicate=False):
            self._submodules += [(module._modules, key, child) for key, child in module._modules.items()]
            for key, param in module._parameters.items():
                name = f"{prefix}.{key}" if prefix else key
                if name in self._expected and found[name] is param:
                    self._parameters.append((name, module._parameters, key))

    def replaced(self) -> str | None:
        """Return the name of a weight that is elsewhere now, or is missing; None if there is none."""
        if len(self._parameters) == len(self._expected) and all(
            submodules.get(key) is child for submodules, key, child in self._submodules
        ):
            now = ((name, parameters.get(key)) for name, parameters, key in self._parameters)
        else:
            weights = named_parameters_of(self._weights)
            now = ((name, weights.get(name)) for name in self._expected)
        return next((name for name, w in now if w is None or w.data_ptr() != self._expected[name]), None)
