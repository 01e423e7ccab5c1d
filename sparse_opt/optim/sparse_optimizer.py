"""SparseOptimizer: gradients, clipping, the step, base weights and saved state of parameters bound to a mask."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from ..ops.step_ops import STEP_OPS
from . import base_weights, options, state_entries
from .bound_optimizer import BoundOptimizer, Params
from .clipping import clip_coefficient, global_norm
from .ranks import checks
from .ranks.group import raise_on_all
from .state_loading import SavedState
from .stepping import BucketStep, Stepper

__all__ = ["Params", "SparseOptimizer"]

MAX_STEPS = 2**24  # where a count in fp32 stops


class SparseOptimizer(BoundOptimizer):
    """Trains the active elements of a mask; state, gradients and clipping scale with their number (nnz).

    A subclass sets `_op`, the name of its step op, and passes the defaults of its groups' options, which
    `options.VALIDATORS` checks. The names of its states and the arguments of the op follow from `ops.STEP_OPS`.
    """

    _step_supports_amp_scaling = True  # step() unscales and checks for inf, as in torch's fused optimizers

    # Gradients

    def compact_grad(self, param: Parameter) -> Tensor | None:
        """Return a view of the compact gradient that the next step will use: [nnz of param] in `grad_dtype`.

        Under FSDP2 it is the gradient of the whole parameter.
        Returns None if the parameter has none: before a backward pass, after `step` or `zero_grad`, and with
        grads='dense'.

        Raises:
            RuntimeError: a parameter was replaced after the optimizer was built.
        """
        self.check_binding()
        for bucket in self._buckets if self.grads == "compact" else ():
            buffer = bucket.gradient
            for i, shard in enumerate(bucket.shards):
                if shard.param is param and self._collector.received(buffer)[i]:
                    buffer.finish()
                    self._collector.wait_for_reduction()
                    return buffer.values[buffer.segment(i)]
        return None

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients that no step has used.

        `model.zero_grad()` does not reach compact gradients. It may replace this call after `step`, which leaves none
        behind, but not in place of a step: the gradients of a skipped batch would be added to those of the next one.
        """
        self._collector.forget()
        for stepper in self._steppers:
            stepper.release_grads()
        super().zero_grad(set_to_none or self.grads == "compact")

    def reuse_gradients(self) -> None:
        """Let the next step use the gradients of the last one again, as a benchmark of the step does.

        With grads='dense' every step uses `param.grad` anyway. Gradients that arrive before the next step are added.
        """
        self._collector.reuse()

    # Several ranks

    def no_sync(self) -> AbstractContextManager[None]:
        """Context manager inside which backward passes add to this rank's own gradients, and nothing is averaged.

        The next backward pass outside of it, or the next step, averages all of them. Without a process group it has no
        effect.
        """
        reducer = self._collector.reducer
        return nullcontext() if reducer is None else reducer.no_sync()

    def check_ranks(self) -> None:
        """Check that all ranks of the process group have the same weights, options and optimizer state, bit for bit.

        This reads all of them once, synchronizes, and is a collective: all ranks must call it. It is for tests and
        debugging; a step keeps the ranks equal by itself. Without a process group it does nothing.

        Raises:
            RuntimeError: some ranks differ from the first one; names the ranks and the first tensor that differs.
        """
        self._require_usable("check_ranks")
        if self.process_group is not None:
            checks.require_same_weights(self._shards, dict(self._named()), self.process_group)
            checks.require_same_state(self, self._buckets, self.process_group)

    def _check_gradients(self) -> None:
        """Raise an error that names the parameter if the step cannot read a gradient."""
        for bucket in self._buckets:
            bucket.check_shards()
            if self.grads == "dense":
                bucket.check_params()
                bucket.gradient.check_dense_grads()
            elif bucket.gradient.has_dense_grads():
                raise RuntimeError(
                    f"{bucket.gradient.names_with_dense_grads()} have dense gradients that no hook has seen, as under "
                    "DistributedDataParallel: do not wrap the model and pass process_group=, or use grads='dense'"
                )

    def _clipping(self, max_norm: float) -> tuple[Tensor, Tensor | None]:
        """Return (norm, coefficient that clips the gradients to max_norm); without gradients the latter is None."""
        self._history = zlib.crc32(struct.pack("d", max_norm), self._history)
        self._check_gradients()
        self._collector.reduce()
        if self.grads == "dense":
            for buffer in self.gradient_buffers:
                buffer.gather_dense_grads()
        received = [self._collector.received(buffer) for buffer in self.gradient_buffers]
        reducer, grad_scale = self._collector.reducer, getattr(self, "grad_scale", None)
        clipped = None
        if len(received) == 1 and all(received[0]) and reducer is None:
            clipped = self.gradient_buffers[0].clip(max_norm)
        if clipped is not None and grad_scale is None and not self._collector.shown_proxies():
            return clipped
        if clipped is not None:
            norm = clipped[0]  # of the scaled gradients
        else:
            norm = global_norm(self.gradient_buffers, received) if reducer is None else reducer.norm()
        norm = self._collector.unscaled(norm)
        if grad_scale is not None:
            norm = norm / grad_scale.to(norm.device).squeeze()
        if not any(any(flags) for flags in received):
            return norm, None
        return norm, clip_coefficient(norm, max_norm)

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, error_if_nonfinite: bool = False) -> Tensor:
        """Clip the norm of the active gradients, as `torch.nn.utils.clip_grad_norm_` does.

        The next `step` multiplies the gradients by the coefficient. The norm is computed in the pass that gathers the
        gradients; with grads='dense' this method gathers them, and the step reads the gathered values. There is no
        synchronization unless `error_if_nonfinite` is True.

        Returns:
            The norm before clipping, one fp32 element on the device. Without gradients it is 0, and the next step does
            not clip.

        Raises:
            ValueError: `max_norm` is no number, negative or NaN; or as in `step`.
            RuntimeError: as in `step`.
        """
        self._require_usable("clip_grad_norm_")
        self.check_binding()
        max_norm = options.require_max_norm("max_norm", max_norm, "a number >= 0")
        norm, clip_coef = self._clipping(max_norm)
        if error_if_nonfinite and not norm.isfinite():
            raise RuntimeError(f"the norm of the active gradients is {norm.item()}, so they can't be clipped")
        self._collector.clip_coef = clip_coef
        self.grad_norm = norm
        return norm

    # The step

    # torch's stub has two overloads for the closure; one signature serves both.
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update the active elements once. Parameters without a gradient are skipped, as in torch.

        The step consumes the compact gradients, even if a GradScaler skips the update. A second step without a
        backward pass in between does nothing: no decay, no change of moments or step counts. With grads='dense', as in
        torch, the same `param.grad` is applied again until `zero_grad`.

        With a process group this is a collective. Every step then updates all active parameters, with a zero gradient
        where no rank has one, because a rank cannot know which gradients the others have.

        All parameter groups are checked before anything is written. After one of the errors below nothing has changed,
        the gradients are still available, and the step can be repeated once the cause is removed. An op can still fail
        while it runs (out of memory, a failed kernel launch); some parameters may then have been updated.

        Raises:
            ValueError: an option of a group is missing or out of range; the size, dtype or device of a parameter is not
                what the op takes, or the parameter is not contiguous; the same for `param.grad` with grads='dense'.
            RuntimeError: `param.grad` is not strided; with grads='compact', a parameter has a `param.grad` that no hook
                has received; a GradScaler is used without `amp_scaling`; a parameter was replaced after the optimizer
                was built; the optimizer is closed, or the model holds its base weights.
        """
        self._require_usable("step")
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.check_binding()
        self._require_countable()
        self._check_groups()
        grad_scale, found_inf = self._amp_scaling()
        norm, clip_coef = self.grad_norm, self._collector.clip_coef
        if self.max_grad_norm is not None and clip_coef is None:
            norm, clip_coef = self._clipping(self.max_grad_norm)
        elif self.grads == "compact":
            self._check_gradients()
            self._collector.reduce()
        steps = [self._prepare(stepper, grad_scale, found_inf, clip_coef) for stepper in self._steppers]
        for step in steps:
            if step is not None:
                step.check()
        # Nothing has been written so far, except weights that differed from their masters.
        for step in steps:
            if step is not None:
                step.apply()
        self.grad_norm = norm
        self._collector.mark_stepped()
        self._n_steps += 1
        if self.process_group is not None:
            self._history = options.checksum(self.param_groups, self.defaults, self._history)
        return loss

    def _require_countable(self) -> None:
        if self.stochastic_rounding and self._n_steps >= MAX_STEPS:
            raise RuntimeError(
                f"step: {self._n_steps} steps were made, and step counts are fp32: the next one would repeat the "
                "random bits of stochastic rounding; build a new optimizer with another seed"
            )

    def _amp_scaling(self) -> tuple[Tensor | None, Tensor | None]:
        """Return (grad_scale, found_inf) as set on this optimizer by a GradScaler; None for what it has not set."""
        grad_scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        if found_inf is not None and self.grads == "compact" and not self._collector.scaler_proxies:
            raise RuntimeError(
                "a GradScaler can't see compact gradients; build the optimizer with amp_scaling=True or grads='dense'"
            )
        # Without any gradient, GradScaler's found_inf is the sum of an empty list, the integer 0.
        return grad_scale, found_inf if isinstance(found_inf, Tensor) else None

    def _prepare(
        self, stepper: Stepper, grad_scale: Tensor | None, found_inf: Tensor | None, clip_coef: Tensor | None
    ) -> BucketStep | None:
        bucket, buffer = stepper.bucket, stepper.bucket.gradient
        if bucket.weights is not None:
            bucket.weights.sync()
        gathered = self.grads == "compact" or clip_coef is not None
        buffer.finish()
        op = STEP_OPS[self._op]
        op_options = options.op_options(op, bucket.group)
        for name in op.used_states(op_options):
            if name not in bucket.state:
                option = op.optional[name]
                raise RuntimeError(f"{option} is {op_options[option]}, but was 0 when the optimizer was built")
        arguments = {
            **{name: bucket.state.get(name) for name in op.states},
            **op_options,
            "lr": bucket.refresh_lr(),
            "grad": bucket.local_grad() if gathered else None,
            "master": bucket.state.get("master"),
            "weights": None if bucket.weights is None else bucket.weights.copy,
            "params_hold_master": bucket.weights is not None and bucket.weights.copy is None,
            "stochastic_rounding": self.stochastic_rounding,
            "seed": int(bucket.group["seed"]) + (bucket.ordinal << 32),
            **self._scalars(bucket.device, grad_scale, found_inf, clip_coef),
        }
        return stepper.prepare(op, self._collector.received(buffer) if gathered else None, arguments)

    def _scalars(
        self,
        device: torch.device,
        grad_scale: Tensor | None,
        found_inf: Tensor | None,
        clip_coef: Tensor | None,
    ) -> dict[str, Tensor | None]:
        """Return the device scalars of a step: gradient scale, clip coefficient, and the flag that skips the update."""
        if found_inf is not None and grad_scale is None and self._collector.scaler_proxies:
            factor = self._collector.scaler_proxies[device].factor  # GradScaler.unscale_ was called: it holds 1/scale
            clip_coef = factor if clip_coef is None else factor * clip_coef.to(device)
        found = {"grad_scale": grad_scale, "found_inf": found_inf, "clip_coef": clip_coef}
        return {name: None if t is None else t.to(device, torch.float32) for name, t in found.items()}

    # Base weights

    def _bases_to_swap(self) -> list[base_weights.BaseWeights]:
        self._require_usable("base_weights")
        self.check_binding()
        if not self.keep_base_weights:
            raise RuntimeError("base_weights: the optimizer was built with keep_base_weights=False")
        self.sync_weights()
        return self._bases

    def sync_weights(self) -> None:
        """With `compact_weights`, take over what other code has written to the model's weights.

        `step` and `base_weights` call it. It costs a pass only after a write that the version counters show.
        """
        for bucket in self._buckets:
            if bucket.weights is not None:
                bucket.weights.sync()

    def active_weights(self) -> list[tuple[list[str], Tensor]] | None:
        """With `compact_weights`, return the current active weights without reading the model; None otherwise.

        Returns:
            pairs of names of parameters and a tensor [nnz] of their dtype: their active elements, one parameter after
            the other, each in the order of the flattened parameter. The tensor may be the optimizer's own: copy it
            before the next step.

        Raises:
            RuntimeError: the model holds its base weights, or the optimizer is closed.
        """
        self._require_usable("active_weights")
        self.check_binding()
        if not self.compact_weights:
            return None
        self.sync_weights()
        return [(bucket.names, bucket.weights.rounded()) for bucket in self._buckets if bucket.weights is not None]

    def base_weights(self) -> AbstractContextManager[None]:
        """Context manager inside which the model has W0, the weights it had when this optimizer was built.

        On exit the trained weights are restored bit for bit, also after an exception at any point: a signal (Ctrl-C)
        that arrives during entry or exit is handled after all weights have been exchanged. Use it directly in a `with`
        statement, since `contextlib.ExitStack` and `contextlib.contextmanager` can be interrupted while they enter or
        leave it. A signal handler that runs inside sees W0 in the model.

        Inside, the parameters whose elements change are constants (`requires_grad=False`), so that no gradient of W0
        reaches the optimizer, and a backward pass through a graph built outside raises. A graph built before entry can
        run backward after exit.

        Reentrant checkpointing (`torch.utils.checkpoint` with use_reentrant=True) is not checked. It rebuilds a layer's
        graph during the backward pass, with the weights of that moment: run its backward pass where its forward pass
        ran, either inside or outside.

        Raises:
            RuntimeError: on entry, if the model holds its base weights, the optimizer is closed, or it was built with
                keep_base_weights=False.
        """
        return base_weights.InBaseWeights(
            self._bases_to_swap,
            self._collector,
            self._root,
            lambda: ((name, self._shards[p].unsharded) for name, p in self._named()),
        )

    # State

    def state_dict(self) -> dict[str, Any]:
        """Return the state in torch's layout; each active parameter's entry also has its indices and base weights.

        The indices are those of every active element, for every pattern. They are computed by this call and are not in
        `optimizer.state`.

        With sharded parameters, all ranks must call this. The tensors are copies, as DTensors over all ranks, for
        `torch.distributed.checkpoint`. `sparse_opt.distributed` loads checkpoints, and gathers a full state dict.
        """
        self._require_usable("state_dict")
        params, state = self.param_groups[0]["params"], self.state
        try:
            self.param_groups[0]["params"] = params[: len(params) - self._collector.shown_proxies()]
            self.state = state_entries.with_indices(state, self._buckets, self._bases)
            sharded = [shard for shard in self._shards.values() if not shard.is_whole]
            if sharded:
                from .ranks import sharded_state

                self.state = sharded_state.as_dtensors(self.state, sharded)
            return super().state_dict()
        finally:
            self.param_groups[0]["params"], self.state = params, state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Copy a saved state, bit for bit, into the existing buffers, and drop the gradients.

        Hooks of `register_load_state_dict_pre_hook` and `register_load_state_dict_post_hook` run as in torch. With a
        process group, all ranks must call this. With sharded parameters, the state may also be that of one device, from
        which each rank takes its part.

        Raises:
            ValueError: the state is malformed, or was saved with another mask, shape, dtype or set of parameters, on
                any rank; the optimizer's state, options and gradients have not changed.
            RuntimeError: the ranks load different states; names the first tensor that differs. Nothing has changed.
        """
        self._require_usable("load_state_dict")
        if isinstance(state_dict, dict):
            state_dict = state_dict.copy()  # the hooks may change it
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            replaced = pre_hook(self, state_dict)
            if replaced is not None:
                state_dict = replaced
        self._load(state_dict)
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    @torch.no_grad()
    def _load(self, state_dict: dict[str, Any]) -> None:
        with raise_on_all(self.process_group, self._buckets[0].device):
            saved = SavedState.of(state_dict, self.param_groups, self._shards, self._buckets, self.defaults)
            for i, (group, loaded) in enumerate(zip(self.param_groups, saved.options, strict=True)):
                where = f"parameter group {i} of the saved state: "
                self._check_options({**group, **loaded}, where)
                for bucket in self._buckets:
                    missing = set(self._state_names({**group, **loaded})) - bucket.state.keys()
                    if bucket.group is group and missing:
                        raise ValueError(f"{where}its options require {sorted(missing)}, absent from this optimizer")
            bases = self._bases
            if bases:
                held = saved.base_weights(self._buckets, self._shards)
                bases = self._rebuilt_bases(self._buckets, held)
        if self.process_group is not None:
            checks.require_same_saved_state(saved, self._shards, self.process_group, self._buckets[0].device)
        # Nothing has changed so far.
        self.zero_grad()
        saved.copy_(self._buckets)
        self._n_steps = max(int(state["step"]) for state in saved.states.values() if "step" in state)
        self._history = 0
        for bucket in self._buckets:
            if bucket.weights is not None:
                bucket.weights.forget()
        for group, loaded in zip(self.param_groups, saved.options, strict=True):
            lr = group["lr"]
            group.update(loaded)
            if isinstance(lr, Tensor):  # a CUDA graph may read it
                if any(other is not group and other["lr"] is lr for other in self.param_groups):
                    lr = lr.clone()
                value = loaded["lr"]
                group["lr"] = lr.copy_(value.reshape(lr.shape)) if isinstance(value, Tensor) else lr.fill_(value)
        for bucket in self._buckets:
            bucket.filled_lr = None
        if not base_weights.copied_(self._bases, bases):
            self._bases = bases
            self.generation += 1
        self._publish_state()

    def nbytes(self) -> dict[str, int]:
        """Return the bytes of the compact buffers by purpose: state, master, compact_weights, indices, grad, base.

        With `offload_base_weights`, the base weights are in host memory, and are counted too.
        """
        return state_entries.nbytes(self._buckets, self._bases)
