"""What a computation makes."""

from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode


class Computed(TorchDispatchMode):
    """Collects (op, shape) of each tensor that is computed and is no view of the model's weights.

    A tensor over the memory of one element, as `expand` makes, is left out.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
        self.found: set[tuple[str, tuple[int, ...]]] = set()

    @property
    def shapes(self) -> set[tuple[int, ...]]:
        return {shape for _, shape in self.found}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, torch.Tensor) and tensor.dim():
                storage = tensor.untyped_storage()
                if storage.nbytes() > 4 and storage.data_ptr() not in self.weights:
                    self.found.add((str(func.overloadpacket), tuple(tensor.shape)))
        return out
