"""Names, shapes and components of a model's weights, for tables."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..masks.parameters import component_of


@dataclass(frozen=True)
class WeightShape:
    """Name and shape of a parameter as the model keeps it."""

    name: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def features(self) -> tuple[int, int] | None:
        """In and out, of a matrix that multiplies; GPT-2's Conv1D keeps [in, out], a Linear [out, in]."""
        component = component_of(self.name)
        if len(self.shape) != 2 or component.part in ("embeddings", "norms"):
            return None
        first, second = self.shape
        return (first, second) if component.conv1d else (second, first)


def weight_shapes(shapes: Mapping[str, Sequence[int]]) -> list[WeightShape]:
    """Of name -> shape, in the order in which data flows through the model (`Component.order`)."""
    return sorted(
        (WeightShape(name, tuple(shape)) for name, shape in shapes.items()),
        key=lambda weight: component_of(weight.name).order,
    )
