"""GraphedStep: a whole training step as a CUDA graph, one graph for each set of input shapes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .. import backends
from .sparse_optimizer import SparseOptimizer

Key = tuple[tuple[torch.Size, torch.dtype], ...]


@dataclass
class _Shapes:
    """The inputs of one set of shapes, their graph, and the result of its capture."""

    inputs: list[Tensor]
    n_eager: int = 0  # eager steps so far
    graph: torch.cuda.CUDAGraph | None = None
    result: Any = None


class GraphedStep:
    """Calls a training step as a CUDA graph, so that the host launches one graph in place of thousands of kernels.

    Call it with the tensors of a batch: `loss = step(input_ids, labels)`. The first calls for inputs of some shapes run
    `function` eagerly, the next one captures it, and from then on the graph is replayed. Every call is a step of
    training, and all give the same bits as eager calls.

    `function` gets buffers that each call overwrites with its inputs, and takes a whole step: forward and backward
    passes, `optimizer.step()` and `zero_grad()`. It must not read values back from the GPU (`.item()`, printing);
    values that change between steps must be inputs or tensors that are written in place, such as the learning rate. Its
    Python code runs in the eager calls and the capture alone. Between calls no other backward pass may reach the
    parameters.

    All graphs use one pool of memory. After `set_mask`, `detach`, and a change of an option, of `requires_grad` or of a
    parameter's address, all are dropped. Other tensors, and whether the model is in training mode, are constants of
    them.

    With a process group, the reductions of NCCL are captured too, and a call is a collective. Delete the `GraphedStep`
    before the process group is destroyed.

    Args:
        function: takes the inputs; returns tensors, or (nested) tuples, lists or dictionaries of them, or None.
        optimizer: the optimizer whose step `function` takes. The `lr` of its groups must be tensors on the GPU.
        n_warmup: eager calls for each set of shapes; torch recommends 3, and a compiled model needs them to compile.

    Raises:
        ValueError: the parameters are not all on one GPU, the backend cannot be captured, a learning rate is a number,
            the optimizer has a process group whose backend is not NCCL, the parameters are sharded, or `n_warmup` is
            less than 1.
    """

    def __init__(self, function: Callable[..., Any], optimizer: SparseOptimizer, *, n_warmup: int = 3) -> None:
        if n_warmup < 1:
            raise ValueError(f"n_warmup is {n_warmup}, expected at least 1: a capture needs initialised libraries")
        group = optimizer.process_group
        if group is not None and "nccl" not in dist.get_backend_config(group).lower():
            raise ValueError(
                "the backend of the optimizer's process group is not NCCL, whose reductions can be captured"
            )
        if any(bucket.is_sharded for bucket in optimizer._buckets):
            raise ValueError("the parameters are sharded: FSDP2's collectives cannot be captured")
        devices = {param.device for group in optimizer.param_groups for param in group["params"]}
        if len(devices) != 1 or next(iter(devices)).type != "cuda":
            found = ", ".join(sorted(map(str, devices)))
            raise ValueError(f"the parameters are on {found}; a CUDA graph needs all of them on one GPU")
        self._device = devices.pop()
        if backends.choose(self._device, optimizer.backend) == "reference":
            raise ValueError("backend 'reference' reads step counts on the host and cannot be captured")
        self.function, self.optimizer, self.n_warmup = function, optimizer, n_warmup
        self._shapes: dict[Key, _Shapes] = {}
        self._constants = self._find_constants()
        self._pool: Any = None
        self._stream: torch.cuda.Stream | None = None

    @property
    def n_graphs(self) -> int:
        """The number of sets of shapes that have been captured."""
        return sum(shapes.graph is not None for shapes in self._shapes.values())

    def __call__(self, *inputs: Tensor) -> Any:
        """Take a step on these inputs, which may be on the CPU.

        Returns:
            The result of `function`. The next call overwrites its tensors: clone those that you keep.

        Raises:
            RuntimeError: the optimizer has gradients that no step has used, before or after the call; a parameter was
                replaced after the optimizer was built; the optimizer is closed, or the model holds its base weights.
            ValueError: the learning rate of a group is a number by now.
        """
        self.optimizer._require_usable("GraphedStep")
        self.optimizer.check_binding()
        constants = self._find_constants()
        if constants != self._constants:
            self._shapes.clear()
            self._constants, self._pool = constants, None
        key: Key = tuple((tensor.shape, tensor.dtype) for tensor in inputs)
        shapes = self._shapes.get(key)
        if shapes is None:
            shapes = self._shapes[key] = _Shapes([torch.empty_like(tensor, device=self._device) for tensor in inputs])
        self._require_no_gradients("before")
        self.optimizer.sync_weights()  # a replay takes over no writes by other code
        for buffer, tensor in zip(shapes.inputs, inputs, strict=True):
            buffer.copy_(tensor)  # waits for a copy from the host, whose tensor may be filled again after the call
        if shapes.graph is None and shapes.n_eager < self.n_warmup:
            shapes.n_eager += 1
            return self._run_on_side_stream(shapes)
        if shapes.graph is None:
            shapes.graph = self._capture(shapes)  # runs nothing, but counts the step
        else:
            self.optimizer.n_steps += 1
        shapes.graph.replay()
        return shapes.result

    def _find_constants(self) -> list[Any]:
        """Return what a graph keeps from its capture: the optimizer's buffers, its options, the parameters' memory."""
        optimizer = self.optimizer
        constants: list[Any] = [optimizer.generation, optimizer.max_grad_norm, optimizer.collector.is_attached]
        for i, group in enumerate(optimizer.param_groups):
            if not isinstance(group["lr"], Tensor) or not group["lr"].is_cuda:
                raise ValueError(
                    f"lr of parameter group {i} is {group['lr']!r}, expected a tensor on the GPU: a graph would keep "
                    "the learning rate of its capture"
                )
            for value in (*(group[name] for name in optimizer.defaults), *group["params"]):
                constants += [value.data_ptr(), value.requires_grad] if isinstance(value, Tensor) else [value]
        return constants

    def _run_on_side_stream(self, shapes: _Shapes) -> Any:
        """Run the step on another stream, as a capture does, so that autograd's and cuBLAS's state exist there."""
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)
        if shapes.n_eager == 1 and self.optimizer.collector.reducer is not None:
            self.optimizer.collector.reducer.attach_on(self._stream)
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            result = self.function(*shapes.inputs)
        current.wait_stream(self._stream)
        self._require_no_gradients("after")
        return result

    def _capture(self, shapes: _Shapes) -> torch.cuda.CUDAGraph:
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        # Other threads, such as one that sends weights, may allocate memory during a capture of this thread.
        capture = torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local")
        try:
            with torch.cuda.device(self._device), capture:
                shapes.result = self.function(*shapes.inputs)
        except BaseException:
            self.optimizer.zero_grad()  # its hooks were called, and nothing was computed
            raise
        self._require_no_gradients("after")
        return graph

    def _require_no_gradients(self, when: str) -> None:
        if self.optimizer.collector.has_unused():
            raise RuntimeError(
                f"the optimizer has gradients that no step has used, {when} a call of GraphedStep; its function must "
                "take whole steps: call step() in it, or zero_grad() first"
            )
