"""Bucket: the parameters that one call of the step's op covers, their compact state, and their part of a step.

A step has two phases: all buckets are prepared and checked before any is written.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..ops import checks
from ..ops.step_ops import StepOp
from .gradients.gradient_buffer import GradientBuffer, to_device
from .options import op_options
from .segments import ActiveWeight, LocalSegments, Segments, compact


class CompactWeights:
    """What some parameters hold at their active elements: a copy, or the rounded fp32 masters.

    Writes by other code that increment the version counters are noticed before the next use: then the copy is taken
    again, and masters are written to the parameters, as the next step would do.

    Attributes:
        copy: [nnz] of the parameters' dtype; None if there are masters.
        values: `copy`, or the masters: [nnz] fp32.
    """

    def __init__(self, segments: Segments, master: Tensor | None) -> None:
        self._segments = segments
        self._versions: list[int] | None = None  # of the parameters when the two last agreed; None: unknown
        self.values = compact(segments) if master is None else master
        self.copy = self.values if master is None else None

    @property
    def nbytes(self) -> int:
        """The bytes of the copy; masters are counted as state."""
        return 0 if self.copy is None else self.copy.nbytes

    def rounded(self) -> Tensor:
        """Return what the parameters hold since the last `sync` or step: the copy itself, or the masters, rounded."""
        return self.copy if self.copy is not None else self.values.to(self._segments.params[0].dtype)

    @torch.no_grad()
    def sync(self) -> None:
        """Make the values and the parameters agree, after a write by other code."""
        segments = self._segments
        if self._versions == self._current_versions():
            return
        if [param.numel() for param in segments.params] != segments.numels:
            return  # the op that is called next raises an error
        if self.copy is not None:
            self.copy.copy_(compact(segments))
        else:
            for i, param in enumerate(segments.params):
                rounded = self.values[segments.segment(i)].to(param.dtype)
                param.view(-1)[segments.positions(i).long()] = rounded
        self.mark_synced()

    def mark_synced(self) -> None:
        """Record that the values and the parameters agree."""
        self._versions = self._current_versions()

    def forget(self) -> None:
        """Record that they may differ, as they do while a step writes both."""
        self._versions = None

    def _current_versions(self) -> list[int]:
        return [param._version for param in self._segments.params]


@dataclass(eq=False)
class Bucket(LocalSegments):
    """The active parameters of one group, device, dtype and layout of indices, and their compact buffers.

    The step, the state and the base weights are those of the local shards; the gradient is that of the whole
    parameters. Without FSDP2 both are the same. Local slot s of shard i has slot s + first_slots[i] among the active
    elements of the parameter.
    """

    unsharded: Segments  # of the whole parameters
    first_slots: list[int]
    group: dict[str, Any]
    names: list[str]
    ordinal: int  # number of the bucket; gives each bucket its own random stream
    ops: Any  # one attribute per op, on the chosen backend
    lr: Tensor  # [1] fp32
    steps: Tensor  # [n] fp32
    state: dict[str, Tensor] = field(default_factory=dict)  # name -> [nnz]; see `allocate`
    weights: CompactWeights | None = None  # None: the model's weights are read where they are
    filled_lr: float | None = None
    gradient: GradientBuffer = field(init=False)  # set by `binding.bind`, as is `bound`
    bound: Any = field(init=False)  # the result of `backends.bind`; None: functions of `ops` make the step

    def __post_init__(self) -> None:
        super().__post_init__()
        self._local_grad: Tensor | None = None

    def allocate(self, op: StepOp, state_dtype: torch.dtype, *, master_weights: bool, compact_weights: bool) -> None:
        """Allocate the state that `op` uses with the group's options, zeros, and copies of the current weights."""
        for name in op.used_states(op_options(op, self.group)):
            self.state[name] = torch.zeros(self.nnz, dtype=state_dtype, device=self.device)
        if master_weights and self.params[0].dtype != torch.float32:
            self.state["master"] = compact(self, torch.float32)
        if compact_weights and not self.is_over_quantised:
            if self.is_sharded:
                raise ValueError(f"compact_weights=True, but {self.names[0]!r} is sharded by fully_shard")
            self.weights = CompactWeights(self, self.state.get("master"))

    @property
    def is_sharded(self) -> bool:
        return not self.shards[0].is_whole

    @property
    def is_over_quantised(self) -> bool:
        """Whether the parameters are the active weights of layers with a quantised base; then all of them are."""
        return isinstance(self.shards[0].param, ActiveWeight)

    def nnz_of_param(self, i: int) -> int:
        """Return the number of active elements of the whole parameter i, on all ranks."""
        return self.unsharded.ends[i] - self.unsharded.starts[i]

    def local_grad(self) -> Tensor:
        """Return the compact gradient of the local shards: [nnz]. Call `gradient.finish` first."""
        if not self.is_sharded:
            return self.gradient.values
        values = self.gradient.values
        if self._local_grad is None:
            self._local_grad = values.new_empty(self.nnz)
            firsts = [start + slot for start, slot in zip(self.unsharded.starts, self.first_slots, strict=True)]
            counts = (end - start for start, end in zip(self.starts, self.ends, strict=True))
            self._local_parts = [values[first : first + n] for first, n in zip(firsts, counts, strict=True)]
        return torch.cat(self._local_parts, out=self._local_grad)

    def check_shards(self) -> None:
        """Raise a RuntimeError that names the first sharded parameter which the optimizer has lost track of."""
        for name, shard in zip(self.names, self.shards, strict=True) if self.is_sharded else ():
            if not shard.is_current():
                raise RuntimeError(f"the local shard of {name!r} was replaced after the optimizer was built")
            if shard.param.grad is not None:
                raise RuntimeError(f"{name!r} has a dense gradient, reduced by fully_shard, that no hook has seen")

    def check_params(self) -> None:
        """Raise a ValueError that names the first parameter which the ops cannot take."""
        changed = self.find_changed()
        if changed is not None:
            raise ValueError(f"{self.names[changed[0]]!r} {changed[1]}")
        for name, param in zip(self.names, self.params, strict=True):
            if param.device != self.device:
                raise ValueError(f"{name!r} is on {param.device}, but was on {self.device} when its mask was bound")
            if not param.is_contiguous():
                raise ValueError(f"{name!r} has strides {param.stride()}, expected a contiguous parameter")

    def refresh_lr(self) -> Tensor:
        """Return the group's learning rate on the device; it is copied there only after a change."""
        lr = self.group["lr"]
        if isinstance(lr, Tensor):
            self.lr.copy_(lr, non_blocking=True)
            self.filled_lr = None
        elif lr != self.filled_lr:
            self.lr.fill_(lr)
            self.filled_lr = lr
        return self.lr

    def parameter_state(self, i: int) -> dict[str, Tensor]:
        """Return views of parameter i's part of the flat buffers, under the names of torch's optimizers."""
        views = {name: flat[self.segment(i)] for name, flat in self.state.items()}
        if self.is_over_quantised:  # no model's state dict has them
            views["weight"] = self.params[i].detach()
        return {"step": self.steps[i], **views}

    # The step

    def prepare_step(
        self,
        op: StepOp,
        received: list[bool] | None,
        scalars: Mapping[str, Tensor | None],
        *,
        stochastic_rounding: bool,
    ) -> BucketStep | None:
        """Prepare the call of `op` on the parameters that have a gradient; return None if none has.

        Args:
            received: for each parameter, whether it has a compact gradient; None: the dense gradients are used.
            scalars: grad_scale, found_inf and clip_coef, on the bucket's device.

        Raises:
            ValueError, RuntimeError: a parameter or its gradient is invalid for the op; names the parameter.
        """
        if self.params[0].dtype != self.dtype:  # after model.half(); the op would take parameters of one dtype
            self.check_params()
        if self.weights is not None:
            self.weights.sync()
        self.gradient.finish()
        dense = received is None
        arguments: dict[str, Any] = {
            **self._step_options(op),
            **{name: self.state.get(name) for name in op.states},
            **scalars,
            "lr": self.refresh_lr(),
            "grad": None if dense else self.local_grad(),
            "master": self.state.get("master"),
            "weights": None if self.weights is None else self.weights.copy,
            "params_hold_master": self.weights is not None and self.weights.copy is None,
            "stochastic_rounding": stochastic_rounding,
            "seed": int(self.group["seed"]) + (self.ordinal << 32),
        }
        if self.bound is not None and (self.bound.take_grads() if received is None else all(received)):
            call = functools.partial(self.bound.step, op.name, **arguments, steps=self.steps, count_steps=True)
            return BucketStep(self, call, functools.partial(call, check_only=True), dense, [])

        grads = [p.grad for p in self.params] if dense else []
        has_gradient = [g is not None for g in grads] if received is None else received
        present = [i for i, has_one in enumerate(has_gradient) if has_one]
        if not present:
            return None
        self.check_params()
        if dense:
            self.gradient.check_dense_grads()
        found_inf = scalars["found_inf"]
        counted = 1.0 if found_inf is None else (found_inf == 0).float()  # a skipped step is not counted
        if len(present) == len(self.params):
            params, starts, ends, which = self.params, self.starts, self.ends, None
            steps = self.steps + counted
        else:
            params = [self.params[i] for i in present]
            starts, ends = [self.starts[i] for i in present], [self.ends[i] for i in present]
            which = to_device(present, torch.int64, self.device)
            steps = self.steps[which] + counted
        arguments["steps"] = steps
        arguments["dense_grads"] = [g.contiguous() for g in grads if g is not None] if dense else None
        target = (params, self.indices, starts, ends, *(arguments.pop(name) for name in (*op.states, "lr", "steps")))
        arguments.update(self.layout(present))
        call = functools.partial(getattr(self.ops, op.name), *target, **arguments)
        check = functools.partial(checks.of(op.name), *target, **arguments)
        return BucketStep(self, call, check, dense, params, counted=steps, which=which)

    def _step_options(self, op: StepOp) -> dict[str, float | bool]:
        """Return the options of `op`; raise a RuntimeError if one of them needs a state that was not allocated."""
        options = op_options(op, self.group)
        for name in op.used_states(options):
            if name not in self.state:
                option = op.optional[name]
                raise RuntimeError(f"{option} is {options[option]}, but was 0 when the optimizer was built")
        return options

    def release_dense_grads(self) -> None:
        """Free the dense gradients that a step which raised has kept."""
        if self.bound is not None:
            self.bound.release_grads()


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
