"""`CollectiveCounter`: the bytes that a step sends through torch.distributed, counted call by call."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

REDUCTIONS = ("allreduce", "reduce_scatter")


class CollectiveCounter(TorchDispatchMode):
    """Counts the collectives of the block, those of C++ code (DDP's reducer) and of autograd's threads included.

    `bytes` and `calls` are by name of the operation: allreduce, reduce_scatter, allgather, broadcast and so on. The
    bytes of a call are those of its largest argument: of an all-reduce the reduced tensors, of a reduce-scatter the
    whole input, of an all-gather the whole output.

    Every collective of torch.distributed is an op of the namespace c10d, so that a dispatch mode sees it, as that of
    torch's CommDebugMode does; that one counts calls, not bytes, and only some of the operations.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bytes: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            name = func.name().partition("::")[2].strip("_").removesuffix("_base")
            sizes = [sum(t.nbytes for t in tree_leaves(argument) if isinstance(t, Tensor)) for argument in args]
            self.bytes[name] += max(sizes, default=0)
            self.calls[name] += 1
        return func(*args, **(kwargs or {}))

    @property
    def reduced(self) -> int:
        """Bytes of all reductions."""
        return sum(self.bytes[name] for name in REDUCTIONS)

    @property
    def other(self) -> int:
        """Bytes of all other collectives, such as FSDP's all-gathers of weights."""
        return sum(self.bytes.values()) - self.reduced
