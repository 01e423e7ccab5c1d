"""Base class of the sparse optimizers: binds a mask to parameters; gradients, clipping, base weights, saved state."""

from __future__ import annotations

import inspect
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from ..masks.mask_set import MaskSet
from ..ops.checks import FLOAT_DTYPES, STATE_DTYPES
from ..ops.step_ops import STEP_OPS
from . import base_weights, binding, options, state_io, tile_linears
from .buckets import Bucket, compact
from .clipping import global_norm
from .collector import GradientCollector
from .gradient_buffer import GradientBuffer
from .saved_state import SavedState
from .stepping import BucketStep, Stepper
from .tile_backward import Route

Params = nn.Module | Iterable[tuple[str, Parameter]] | Iterable[dict[str, Any]]


class SparseOptimizer(torch.optim.Optimizer):
    """Trains the active elements of a mask; state, gradients and clipping scale with their number (nnz).

    A subclass sets `_op`, the name of its step op, and passes the defaults of its groups' options, which
    `options.VALIDATORS` checks. The names of its states and the arguments of the op follow from `ops.STEP_OPS`.
    """

    _op: str
    _step_supports_amp_scaling = True  # step() unscales and checks for inf, as in torch's fused optimizers

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Show the shared options in the signature of a subclass that takes them as `**shared`."""
        super().__init_subclass__(**kwargs)
        own = list(inspect.signature(cls.__init__).parameters.values())[1:]
        if own and own[-1].kind is inspect.Parameter.VAR_KEYWORD:
            names = {p.name for p in own}
            base = inspect.signature(SparseOptimizer.__init__).parameters.values()
            own[-1:] = [p for p in base if p.kind is p.KEYWORD_ONLY and p.name not in names]
        cls.__signature__ = inspect.Signature(own)  # type: ignore[attr-defined]  # inspect and help() read it

    def __init__(
        self,
        params: Params,
        mask: MaskSet,
        defaults: dict[str, Any],
        *,
        grads: Literal["compact", "dense"] = "compact",
        max_grad_norm: float | None = None,
        state_dtype: torch.dtype = torch.float32,
        grad_dtype: torch.dtype = torch.float32,
        master_weights: bool = False,
        stochastic_rounding: bool = False,
        seed: int = 0,
        freeze_inactive: bool = True,
        keep_base_weights: bool = True,
        amp_scaling: bool = False,
        model: nn.Module | None = None,
        tile_backward: bool | None = None,
        backend: str | None = None,
    ) -> None:
        if grads not in ("compact", "dense"):
            raise ValueError(f"grads is {grads!r}, expected 'compact' or 'dense'")
        if state_dtype not in STATE_DTYPES:
            raise ValueError(f"state_dtype is {state_dtype}, expected torch.float32 or torch.bfloat16")
        if grad_dtype not in FLOAT_DTYPES:
            raise ValueError(f"grad_dtype is {grad_dtype}, expected one of {FLOAT_DTYPES}")
        if max_grad_norm is not None and not max_grad_norm > 0:
            raise ValueError(f"max_grad_norm is {max_grad_norm}, expected a positive number or None")
        self.defaults = {**defaults, "seed": seed}
        self._check_options(self.defaults)
        if grads == "compact" and _several_processes():
            warnings.warn(
                "compact gradients are this process's own, and DistributedDataParallel does not average them (with "
                "find_unused_parameters=True it does not even notice); use grads='dense' under it",
                stacklevel=3,
            )
        self.grads = grads
        self.max_grad_norm = max_grad_norm
        self.state_dtype, self.grad_dtype = state_dtype, grad_dtype
        self.master_weights, self.stochastic_rounding = master_weights, stochastic_rounding
        self.freeze_inactive, self.keep_base_weights = freeze_inactive, keep_base_weights
        self.amp_scaling, self.tile_backward, self.backend = amp_scaling, tile_backward, backend
        self.grad_norm: Tensor | None = None  # of the last step that was clipped, before clipping
        self._buckets: list[Bucket] = []
        self._steppers: list[Stepper] = []
        self._bases: list[base_weights.BaseWeights] = []
        self._frozen: list[Parameter] = []
        self._routes: list[tuple[nn.Module, Route]] = []  # layers with a replaced forward
        # Such a layer refers to itself; without this only the garbage collector would free it.
        weakref.finalize(self, tile_linears.restore, self._routes).atexit = False
        self._groups_fixed = self._closed = False

        if isinstance(params, nn.Module):
            params = getattr(params, "_orig_mod", params)  # torch.compile prefixes every name with "_orig_mod."
            mask = mask.resolve(params)
            model, params = params if model is None else model, params.named_parameters()
        self._model = None if model is None else weakref.ref(getattr(model, "_orig_mod", model))
        super().__init__(params, self.defaults)
        self._groups_fixed = True
        self._check_groups()
        self._collector = GradientCollector(weakref.ref(self), compact=grads == "compact", amp_scaling=amp_scaling)
        self.mask, active = binding.active_parameters(dict(self._named()), mask, self._frozen, self._root())
        steppers = self._build(active, self.mask.pattern)
        bases = [base_weights.BaseWeights.of(s.bucket) for s in steppers] if keep_base_weights else []
        self._adopt(steppers, bases)

    # Binding a mask

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group while the optimizer is built, as in torch; later calls raise, because the mask fixes the groups.

        Raises:
            RuntimeError: the optimizer is already built.
            ValueError: the group has no parameter names, or holds a parameter twice.
        """
        if self._groups_fixed:
            raise RuntimeError("the mask has fixed the parameter groups; build a new optimizer to add one")
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        names = group.get("param_names")
        if names is None or len(names) != len(group["params"]):
            raise ValueError(
                f"parameter group {len(self.param_groups) - 1} has no parameter names, which the mask goes by; "
                "pass a model, model.named_parameters(), or groups whose 'params' are (name, parameter) pairs"
            )
        if len({id(p) for p in group["params"]}) < len(group["params"]):
            raise ValueError(f"parameter group {len(self.param_groups) - 1} holds a parameter twice")

    def _named(self) -> Iterator[tuple[str, Parameter]]:
        for group in self.param_groups:
            yield from zip(group["param_names"], group["params"], strict=False)

    def _build(self, active: dict[Parameter, Tensor], pattern: str) -> list[Stepper]:
        """Build the buckets with their state and gradient buffers. The model and the optimizer do not change."""
        buckets = binding.build_buckets(self.param_groups, active, pattern, self.backend)
        compact_grads = self.grads == "compact"
        tiles = tile_linears.choose(buckets, self._root(), pattern, grads=self.grads, tile_backward=self.tile_backward)
        steppers = []
        for bucket, its_tiles in zip(buckets, tiles, strict=True):
            for name in self._state_names(bucket.group):
                bucket.state[name] = torch.zeros(bucket.nnz, dtype=self.state_dtype, device=bucket.device)
            if self.master_weights and bucket.params[0].dtype != torch.float32:
                bucket.state["master"] = compact(bucket, torch.float32)
            n_grads = bucket.nnz if compact_grads or self.max_grad_norm is not None else 0
            values = torch.zeros(n_grads, dtype=self.grad_dtype, device=bucket.device)
            steppers.append(
                binding.bind(bucket, self._op, self.backend, values=values, tiles=its_tiles, compact=compact_grads)
            )
        return steppers

    def _adopt(self, steppers: list[Stepper], bases: list[base_weights.BaseWeights]) -> None:
        """Train the parameters of new buckets from now on. This is the part of binding that changes the model."""
        self._detach()
        if self.grads == "compact":
            self.zero_grad()
        self._steppers, self._bases = steppers, bases
        self._buckets = [stepper.bucket for stepper in steppers]
        self._publish_state()
        self._collector.adopt(list(self.gradient_buffers))
        self._attach()

    @property
    def gradient_buffers(self) -> tuple[GradientBuffer, ...]:
        """The compact gradients: one buffer for each parameter group, device, dtype and layout of the indices."""
        return tuple(bucket.gradient for bucket in self._buckets)

    def _attach(self) -> None:
        active = {p for bucket in self._buckets for p in bucket.params}
        if self.freeze_inactive:
            self._frozen = [p for _, p in self._named() if p not in active and p.requires_grad]
            for p in self._frozen:
                p.requires_grad_(False)
        self._collector.attach()
        root = self._root()
        if root is not None:
            for receiver in self._collector.receivers:
                self._routes += tile_linears.install(root, receiver.buffer, receiver)

    def _detach(self) -> None:
        self._collector.detach()
        tile_linears.restore(self._routes)
        for p in self._frozen:
            p.requires_grad_(True)
        self._frozen = []

    def _root(self) -> nn.Module | None:
        return None if self._model is None else self._model()

    def _publish_state(self) -> None:
        self.state.clear()
        for bucket in self._buckets:
            for i, param in enumerate(bucket.params):
                self.state[param] = bucket.parameter_state(i)
        for base in self._bases:
            for i, param in enumerate(base.params):
                self.state[param]["base"] = base.values[base.segment(i)]

    @property
    def tiled_parameters(self) -> tuple[str, ...]:
        """Names of the parameters whose gradients their layers compute tile by tile."""
        return tuple(
            name
            for buffer in self.gradient_buffers
            if buffer.tiles is not None
            for i, name in enumerate(buffer.names)
            if buffer.tiles.has(i)
        )

    def detach(self) -> None:
        """Remove the optimizer's hooks from the model, unfreeze parameters, and restore every layer's own forward.

        The optimizer keeps its state and its base weights. `attach` undoes this.
        """
        self._detach()

    @torch.no_grad()
    def attach(self) -> None:
        """Undo `detach`. Master weights are updated from weights that changed in between."""
        self._refuse("attach")
        self._detach()
        self.refresh_master_weights()
        self._attach()

    def close(self) -> None:
        """Remove the hooks, restore every layer's own forward, and unfreeze parameters; `step` raises afterwards."""
        if self._collector.inside_base:
            raise RuntimeError("close: the model holds its base weights; leave base_weights() first")
        self._detach()
        self._closed = True

    @torch.no_grad()
    def refresh_master_weights(self) -> None:
        """Update the master weights of active weights that were changed outside of the optimizer.

        Call it after such a change; otherwise the next step restores the old values. Master weights of unchanged
        weights keep their fp32 precision.
        """
        for bucket in self._buckets:
            if "master" in bucket.state:
                master, weights = bucket.state["master"], compact(bucket)
                master.copy_(torch.where(master.to(weights.dtype) == weights, master, weights.float()))

    @torch.no_grad()
    def set_mask(self, mask: MaskSet) -> None:
        """Replace the mask. Elements in both masks keep their state; new elements start with zero moments.

        Step counts are per parameter and are kept, so bias correction does not scale up the moments of new elements:
        Adam's first updates of them are up to (1 - beta1) / sqrt(1 - beta2) times the learning rate, about 3.2 with the
        usual betas. Elements that leave the mask keep their values, and `base_weights` still restores them.

        Raises:
            RuntimeError: there are gradients that no step has used, or the model holds its base weights.
        """
        self._refuse("set_mask")
        if self._collector.has_unused():
            raise RuntimeError("set_mask: there are unused gradients; call step() or zero_grad() first")
        mask, active = binding.active_parameters(dict(self._named()), mask, self._frozen, self._root())
        steppers = self._build(active, mask.pattern)
        buckets = [stepper.bucket for stepper in steppers]
        state_io.carry(self._buckets, buckets)
        held = dict(part for base in self._bases for part in base.parts())
        bases = base_weights.rebuild(buckets, held, self.backend) if self.keep_base_weights else []
        self.mask = mask
        self._adopt(steppers, bases)

    # Gradients

    def compact_grad(self, param: Parameter) -> Tensor | None:
        """Return a view of the compact gradient that the next step will use: [nnz of param] in `grad_dtype`.

        Returns None if the parameter has none: before a backward pass, after `step` or `zero_grad`, and with
        grads='dense'.
        """
        for buffer in self.gradient_buffers if self.grads == "compact" else ():
            for i, p in enumerate(buffer.params):
                if p is param and self._collector.received(buffer)[i]:
                    buffer.finish()
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

    def _check_gradients(self) -> None:
        """Raise an error that names the parameter if the step cannot read a gradient."""
        for bucket in self._buckets:
            if self.grads == "dense":
                bucket.check_params()
                bucket.gradient.check_dense_grads()
            elif bucket.gradient.has_dense_grads():
                raise RuntimeError(
                    f"{bucket.gradient.names_with_dense_grads()} have dense gradients that no hook has seen (as under "
                    "DistributedDataParallel); use grads='dense'"
                )

    def _clipping(self, max_norm: float) -> tuple[Tensor, Tensor | None]:
        """Return (norm, coefficient that clips the gradients to max_norm); without gradients the latter is None."""
        self._check_gradients()
        if self.grads == "dense":
            for buffer in self.gradient_buffers:
                buffer.gather_dense_grads()
        received = [self._collector.received(buffer) for buffer in self.gradient_buffers]
        norm = self._collector.unscaled(global_norm(self.gradient_buffers, received))
        grad_scale = getattr(self, "grad_scale", None)
        if grad_scale is not None:
            norm = norm / grad_scale.to(norm.device).squeeze()
        if not any(any(flags) for flags in received):
            return norm, None
        return norm, (max_norm / (norm + 1e-6)).clamp(max=1.0)

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
            ValueError, RuntimeError: as in `step`.
        """
        self._refuse("clip_grad_norm_")
        norm, clip_coef = self._clipping(max_norm)
        if error_if_nonfinite and not norm.isfinite():
            raise RuntimeError(f"the norm of the active gradients is {norm.item()}, so they can't be clipped")
        self._collector.clip_coef = clip_coef
        self.grad_norm = norm
        return norm

    # The step

    def _state_names(self, group: dict[str, Any]) -> tuple[str, ...]:
        op = STEP_OPS[self._op]
        return op.used_states(options.op_options(op, group))

    def _check_options(self, group: dict[str, Any], where: str = "") -> None:
        """Raise a ValueError if an option of a group is out of range. `where` is put before the message."""
        for name in self.defaults:
            options.VALIDATORS[name](where, name, group[name])
        op = STEP_OPS[self._op]
        if reason := op.why_invalid(options.op_options(op, group)):
            raise ValueError(where + reason)

    def _check_groups(self) -> None:
        for i, group in enumerate(self.param_groups):
            for name in self.defaults:
                if name not in group:
                    raise ValueError(f"parameter group {i} has no option {name!r}")
            self._check_options(group, f"parameter group {i}: ")

    # torch's stub has two overloads for the closure; one signature serves both.
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update the active elements once. Parameters without a gradient are skipped, as in torch.

        The step consumes the compact gradients, even if a GradScaler skips the update. A second step without a
        backward pass in between does nothing: no decay, no change of moments or step counts. With grads='dense', as in
        torch, the same `param.grad` is applied again until `zero_grad`.

        All parameter groups are checked before anything is written. After one of the errors below nothing has changed,
        the gradients are still available, and the step can be repeated once the cause is removed. An op can still fail
        while it runs (out of memory, a failed kernel launch); some parameters may then have been updated.

        Raises:
            ValueError: an option of a group is missing or out of range; the size, dtype or device of a parameter is not
                what the op takes, or the parameter is not contiguous; the same for `param.grad` with grads='dense'.
            RuntimeError: `param.grad` is not strided; with grads='compact', a parameter has a `param.grad` that no hook
                has received; a GradScaler is used without `amp_scaling`; the optimizer is closed, or the model holds
                its base weights.
        """
        self._refuse("step")
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._check_groups()
        grad_scale, found_inf = self._amp_scaling()
        norm, clip_coef = self.grad_norm, self._collector.clip_coef
        if self.max_grad_norm is not None and clip_coef is None:
            norm, clip_coef = self._clipping(self.max_grad_norm)
        elif self.grads == "compact":
            self._check_gradients()
        steps = [self._prepare(stepper, grad_scale, found_inf, clip_coef) for stepper in self._steppers]
        for step in steps:
            if step is not None:
                step.check()
        # Nothing has been written so far.
        for step in steps:
            if step is not None:
                step.apply()
        self.grad_norm = norm
        self._collector.mark_stepped()
        return loss

    def _amp_scaling(self) -> tuple[Tensor | None, Tensor | None]:
        """Return (grad_scale, found_inf) as a GradScaler has set them on this optimizer, each None if it has not."""
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
            "grad": buffer.values if gathered else None,
            "master": bucket.state.get("master"),
            "stochastic_rounding": self.stochastic_rounding,
            "seed": bucket.group["seed"] + bucket.ordinal,
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
        self._refuse("base_weights")
        if not self.keep_base_weights:
            raise RuntimeError("base_weights: the optimizer was built with keep_base_weights=False")
        return self._bases

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
        return base_weights.InBaseWeights(self._bases_to_swap, self._collector, self._named)

    def _refuse(self, what: str) -> None:
        if self._closed:
            raise RuntimeError(f"{what}: the optimizer is closed")
        if self._collector.inside_base:
            raise RuntimeError(f"{what}: the model holds its base weights; leave base_weights() first")

    # State

    def state_dict(self) -> dict[str, Any]:
        """Return the state in torch's layout; each active parameter's entry also has its indices and base weights.

        The indices are those of every active element, for every pattern. They are computed by this call and are not in
        `optimizer.state`.
        """
        self._refuse("state_dict")
        params, state = self.param_groups[0]["params"], self.state
        try:
            self.param_groups[0]["params"] = params[: len(params) - self._collector.shown_proxies()]
            self.state = state_io.with_indices(state, self._buckets, self._bases)
            return super().state_dict()
        finally:
            self.param_groups[0]["params"], self.state = params, state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Copy a saved state, bit for bit, into the existing buffers, and drop the gradients.

        Hooks of `register_load_state_dict_pre_hook` and `register_load_state_dict_post_hook` run as in torch.

        Raises:
            ValueError: the state is malformed, or was saved with another mask, shape, dtype or set of parameters; the
                optimizer's state, options and gradients have not changed.
        """
        self._refuse("load_state_dict")
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
        saved = SavedState.of(state_dict, self.param_groups, self._buckets, self.defaults)
        for i, (group, loaded) in enumerate(zip(self.param_groups, saved.options, strict=True)):
            where = f"parameter group {i} of the saved state: "
            self._check_options({**group, **loaded}, where)
            for bucket in self._buckets:
                missing = set(self._state_names({**group, **loaded})) - bucket.state.keys()
                if bucket.group is group and missing:
                    raise ValueError(f"{where}its options need {sorted(missing)}, which this optimizer has not")
        bases = self._bases
        if bases:
            bases = base_weights.rebuild(self._buckets, saved.base_weights(self._buckets), self.backend)
        # Nothing has changed so far.
        self.zero_grad()
        saved.copy_(self._buckets)
        for group, loaded in zip(self.param_groups, saved.options, strict=True):
            group.update(loaded)
        for bucket in self._buckets:
            bucket.filled_lr = None
        self._bases = bases
        self._publish_state()

    def nbytes(self) -> dict[str, int]:
        """Return the bytes of the compact buffers by purpose: state, master, indices, grad, base."""
        total = dict.fromkeys(("state", "master", "indices", "grad", "base"), 0)
        for bucket in self._buckets:
            for name, flat in bucket.state.items():
                total["master" if name == "master" else "state"] += flat.nbytes
            total["indices"] += bucket.index_bytes
            total["grad"] += bucket.gradient.values.nbytes
        shared = {id(b.indices) for b in self._buckets}
        for base in self._bases:
            total["base"] += base.values.nbytes + (0 if id(base.indices) in shared else base.index_bytes)
        return total

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            f"{type(self).__name__} holds hooks into its model and can't be copied or pickled; use state_dict()"
        )


def _several_processes() -> bool:
    distributed = torch.distributed
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1
