"""One bucket's part of a step, in two phases: all buckets are prepared and checked before any is written."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..ops import checks
from ..ops.step_ops import StepOp
from .buckets import Bucket
from .gradients.gradient_buffer import to_device


@dataclass(eq=False)
class BucketStep:
    """An op call on the parameters of a bucket that have a gradient, with all arguments built."""

    bucket: Bucket
    op: Callable[[], None]
    check_op: Callable[[], None]  # raises the same errors and writes nothing
    dense: bool  # gradients are read from `param.grad`
    params: Sequence[Tensor]  # whose version counters `op` does not increment
    counted: Tensor | None = None  # step counts after this step, unless `op` increments them itself
    which: Tensor | None = None  # [n] int64, the parameters of `counted`; None: all

    def check(self) -> None:
        """Raise the error that the op would raise; an error in a parameter or its gradient names the parameter."""
        try:
            self.check_op()
        except ValueError:
            self.bucket.check_params()
            if self.dense:
                self.bucket.gradient.check_dense_grads()
            raise

    def apply(self) -> None:
        weights = self.bucket.weights
        if weights is not None:
            weights.forget()  # until both are written
        self.op()
        if self.counted is not None:
            self._count(self.counted)
        if weights is not None:
            weights.mark_synced()

    def _count(self, counted: Tensor) -> None:
        if self.which is None:
            self.bucket.steps.copy_(counted)
        else:
            self.bucket.steps[self.which] = counted
        torch.autograd.graph.increment_version(self.params)


class Stepper:
    """Prepares the calls of the step's op for one bucket, on any backend."""

    def __init__(self, bucket: Bucket) -> None:
        self.bucket = bucket

    def prepare(self, op: StepOp, received: list[bool] | None, arguments: dict[str, Any]) -> BucketStep | None:
        """Prepare the call of `op`; None if no parameter of the bucket has a gradient.

        Args:
            received: for each parameter, whether it has a compact gradient; None: the dense gradients are used.
            arguments: arguments of the op by name, except `steps`, gradients in `param.grad`, parameters and segments.

        Raises:
            ValueError, RuntimeError: a parameter or its gradient is invalid for the op; names the parameter.
        """
        bucket, dense = self.bucket, received is None
        grads = [p.grad for p in bucket.params] if dense else []
        has_gradient = [g is not None for g in grads] if received is None else received
        present = [i for i, has_one in enumerate(has_gradient) if has_one]
        if not present:
            return None
        bucket.check_params()
        if dense:
            bucket.gradient.check_dense_grads()
        dense_grads = [g.contiguous() for g in grads if g is not None] if dense else None
        found_inf = arguments["found_inf"]
        counted = 1.0 if found_inf is None else (found_inf == 0).float()  # a skipped step is not counted
        if len(present) == len(bucket.params):
            params, starts, ends, which = bucket.params, bucket.starts, bucket.ends, None
            steps = bucket.steps + counted
        else:
            params = [bucket.params[i] for i in present]
            starts, ends = [bucket.starts[i] for i in present], [bucket.ends[i] for i in present]
            which = to_device(present, torch.int64, bucket.device)
            steps = bucket.steps[which] + counted
        arguments = {**arguments, "steps": steps, "dense_grads": dense_grads, **bucket.layout(present)}
        target = (params, bucket.indices, starts, ends, *(arguments.pop(name) for name in (*op.states, "lr", "steps")))
        call = functools.partial(getattr(bucket.ops, op.name), *target, **arguments)
        check = functools.partial(checks.of(op.name), *target, **arguments)
        return BucketStep(bucket, call, check, dense, params, counted=steps, which=which)

    def release_grads(self) -> None:
        """Free the dense gradients that a step which raised has kept."""


class NativeStepper(Stepper):
    """Steps parameters that were converted to C++ objects once, if all of them have a gradient.

    Args:
        bound: the result of `backends.bind`.
    """

    def __init__(self, bucket: Bucket, bound: Any) -> None:
        super().__init__(bucket)
        self.bound = bound

    def prepare(self, op: StepOp, received: list[bool] | None, arguments: dict[str, Any]) -> BucketStep | None:
        if not (self.bound.take_grads() if received is None else all(received)):
            return super().prepare(op, received, arguments)
        call = functools.partial(self.bound.step, op.name, **arguments, steps=self.bucket.steps, count_steps=True)
        return BucketStep(self.bucket, call, functools.partial(call, check_only=True), received is None, [])

    def release_grads(self) -> None:
        self.bound.release_grads()
