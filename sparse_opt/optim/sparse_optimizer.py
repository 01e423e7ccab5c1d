"""What the sparse optimizers share: the mask's binding to parameters, gradients, clipping, base weights, state."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from ..masks.mask_set import MaskSet
from ..ops.checks import FLOAT_DTYPES
from . import base_weights, gradients, options, state_io, stepping, tile_linears
from .buckets import Bucket, active_parameters, build_buckets, compact
from .collector import GradientCollector
from .saved_state import SavedState

Params = nn.Module | Iterable[tuple[str, Parameter]] | Iterable[dict[str, Any]]


class SparseOptimizer(torch.optim.Optimizer):
    """Trains the active elements of a mask; state, gradients and clipping scale with their number (nnz).

    Subclasses name their op in `_op`, their compact state in `_state_names`, check their groups' options in
    `_check_options`, and call the op in `_update`.
    """

    _op: str
    _step_supports_amp_scaling = True  # GradScaler leaves scale and inf check to step(), as with torch's fused ones

    def __init__(
        self,
        params: Params,
        mask: MaskSet,
        defaults: dict[str, Any],
        *,
        grads: Literal["compact", "dense"],
        max_grad_norm: float | None,
        state_dtype: torch.dtype,
        grad_dtype: torch.dtype,
        master_weights: bool,
        stochastic_rounding: bool,
        freeze_inactive: bool,
        keep_base_weights: bool,
        amp_scaling: bool,
        model: nn.Module | None,
        tile_backward: bool | None,
        backend: str | None,
    ) -> None:
        if grads not in ("compact", "dense"):
            raise ValueError(f"grads is {grads!r}, wanted 'compact' or 'dense'")
        if state_dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(f"state_dtype is {state_dtype}, wanted torch.float32 or torch.bfloat16")
        if grad_dtype not in FLOAT_DTYPES:
            raise ValueError(f"grad_dtype is {grad_dtype}, wanted one of {FLOAT_DTYPES}")
        if max_grad_norm is not None and not max_grad_norm > 0:
            raise ValueError(f"max_grad_norm is {max_grad_norm}, wanted a positive number or None")
        self._check_options(defaults)
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
        self._bases: list[base_weights.BaseWeights] = []
        self._frozen: list[Parameter] = []
        self._groups_fixed = self._closed = False

        if isinstance(params, nn.Module):
            params = getattr(params, "_orig_mod", params)  # of torch.compile, which puts it before every name
            mask = mask.resolve(params)
            model, params = params if model is None else model, params.named_parameters()
        self._model = None if model is None else weakref.ref(getattr(model, "_orig_mod", model))
        super().__init__(params, defaults)
        self._groups_fixed = True
        self._check_groups()
        self._collector = GradientCollector(weakref.ref(self), compact=grads == "compact", amp_scaling=amp_scaling)
        self.mask, active = active_parameters(dict(self._named()), mask, self._frozen, self._root())
        buckets = self._build(active, self.mask.pattern)
        bases = [base_weights.BaseWeights.of(b) for b in buckets] if keep_base_weights else []
        self._adopt(buckets, bases, active)

    # Binding a mask

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in torch while the optimizer is being built; afterwards the mask has fixed the groups."""
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

    def _build(self, active: dict[Parameter, Tensor], pattern: str) -> list[Bucket]:
        buckets = build_buckets(self.param_groups, active, pattern, self._op, self.backend)
        tile_linears.choose(buckets, self._root(), pattern, grads=self.grads, wanted=self.tile_backward)
        for bucket in buckets:
            self._allocate(bucket)
        return buckets

    def _adopt(
        self, buckets: list[Bucket], bases: list[base_weights.BaseWeights], active: dict[Parameter, Tensor]
    ) -> None:
        """Train these from now on: the part of binding that changes the model."""
        self._buckets, self._bases = buckets, bases
        self._freeze(p for _, p in self._named() if p not in active)
        self._publish_state()
        if self.grads == "compact":
            self.zero_grad()
        self._collector.adopt(buckets, self._root())

    def _root(self) -> nn.Module | None:
        return None if self._model is None else self._model()

    def _allocate(self, bucket: Bucket) -> None:
        for name in self._state_names(bucket.group):
            bucket.state[name] = torch.zeros(bucket.nnz, dtype=self.state_dtype, device=bucket.device)
        if self.master_weights and bucket.params[0].dtype != torch.float32:
            bucket.state["master"] = compact(bucket, torch.float32)
        if self.grads == "compact" or self.max_grad_norm is not None:
            bucket.grad = torch.zeros(bucket.nnz, dtype=self.grad_dtype, device=bucket.device)

    def _publish_state(self) -> None:
        self.state.clear()
        for bucket in self._buckets:
            for i, param in enumerate(bucket.params):
                self.state[param] = bucket.parameter_state(i)
        for base in self._bases:
            for i, param in enumerate(base.params):
                self.state[param]["base"] = base.values[base.segment(i)]

    def _freeze(self, inactive: Iterable[Parameter]) -> None:
        self._unfreeze()
        if self.freeze_inactive:
            self._frozen = [p for p in inactive if p.requires_grad]
            for p in self._frozen:
                p.requires_grad_(False)

    def _unfreeze(self) -> None:
        for p in self._frozen:
            p.requires_grad_(True)
        self._frozen = []

    @property
    def tiled_parameters(self) -> tuple[str, ...]:
        """The names of the parameters whose gradients are made tile by tile, by the layers whose weights they are."""
        return tuple(
            name
            for bucket in self._buckets
            if bucket.tiles is not None
            for name, start, end in zip(bucket.names, bucket.tiles.starts, bucket.tiles.ends, strict=True)
            if start < end
        )

    def detach(self) -> None:
        """Leave the model to others for a while: no hook, nothing frozen, every layer with the forward of its class.

        State stays, and so does `base_weights`.
        """
        self._collector.detach()
        self._unfreeze()

    @torch.no_grad()
    def attach(self) -> None:
        """Undo `detach`. Master weights follow weights that have been changed meanwhile."""
        self._refuse("attach")
        self.detach()
        self.refresh_master_weights()
        active = {p for bucket in self._buckets for p in bucket.params}
        self._freeze(p for _, p in self._named() if p not in active)
        self._collector.attach(self._root())

    def close(self) -> None:
        """Give the model back: remove the hooks, give layers their forward back, and unfreeze what was frozen.

        The optimizer can't step after it.
        """
        if self._collector.inside_base:
            raise RuntimeError("close: the model holds its base weights; leave base_weights() first")
        self.detach()
        self._closed = True

    @torch.no_grad()
    def refresh_master_weights(self) -> None:
        """To be called when something else has set active weights: their master weights take the new values.

        The others keep what fp32 holds beyond the weight. Without this the next step would put the old values back.
        """
        for bucket in self._buckets:
            if "master" in bucket.state:
                master, weights = bucket.state["master"], compact(bucket)
                master.copy_(torch.where(master.to(weights.dtype) == weights, master, weights.float()))

    @torch.no_grad()
    def set_mask(self, mask: MaskSet) -> None:
        """Train other elements from now on. Kept elements keep their state; new ones start with zero moments.

        Step counts stay with the parameters, so the bias correction no longer lifts the moments of new elements:
        Adam's first updates there are up to (1 - beta1) / sqrt(1 - beta2) times the learning rate, about 3.2 with the
        usual betas. Elements that leave the mask stay as they are, and `base_weights` still restores them.

        Raises:
            RuntimeError: gradients wait for a step, or the model holds its base weights.
        """
        self._refuse("set_mask")
        if self._collector.waits():
            raise RuntimeError("set_mask: gradients wait for a step; call step() or zero_grad() first")
        mask, active = active_parameters(dict(self._named()), mask, self._frozen, self._root())
        buckets = self._build(active, mask.pattern)
        state_io.carry(self._buckets, buckets)
        held = dict(part for base in self._bases for part in base.parts())
        bases = base_weights.rebuild(buckets, held, self.backend) if self.keep_base_weights else []
        self.mask = mask
        self._adopt(buckets, bases, active)

    # Gradients

    def compact_grad(self, param: Parameter) -> Tensor | None:
        """[nnz of param] the compact gradient that the next step will use, in `grad_dtype`: a view.

        None if the parameter has none: before a backward pass, after `step` or `zero_grad`, and with grads='dense'.
        """
        for bucket in self._buckets if self.grads == "compact" else ():
            for i, p in enumerate(bucket.params):
                if p is param and bucket.grad is not None and self._collector.received(bucket)[i]:
                    bucket.finish_gradients()
                    return bucket.grad[bucket.segment(i)]
        return None

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients that no step has used.

        After `step` there are no compact gradients left to drop, so that a trainer may as well call `model.zero_grad()`
        alone, which sees none of them.
        """
        self._collector.forget()
        super().zero_grad(set_to_none or self.grads == "compact")

    def _check_gradients(self) -> None:
        """Raise unless every gradient is where the step reads it and as it reads it; names the parameter."""
        for bucket in self._buckets:
            if self.grads == "compact" and bucket.has_dense_grads():
                raise RuntimeError(
                    f"{bucket.names_with_dense_grads()} have dense gradients that no hook has seen (as under "
                    "DistributedDataParallel); use grads='dense'"
                )
            if self.grads == "dense":
                bucket.check_params()
                gradients.check_dense(bucket)

    def _norm(self) -> Tensor:
        """Global 2-norm over the active gradients, one fp32 element, without a synchronisation."""
        self._check_gradients()
        home = self._buckets[0].device
        sums = []
        for bucket in self._buckets:
            if self.grads == "dense":
                if bucket.grad is None:
                    bucket.grad = torch.zeros(bucket.nnz, dtype=self.grad_dtype, device=bucket.device)
                gradients.gather_all_(bucket)
            elif bucket.native is not None:
                bucket.native.sum_squares_(bucket.sum_sq)  # finishes gradients first
            received = self._collector.received(bucket)
            if self.grads == "compact" and not all(received):  # the others' sums are of an earlier step
                received_mask = gradients.to_device(received, torch.bool, bucket.device)
                bucket.sum_sq.copy_(torch.where(received_mask, bucket.sum_sq, 0.0))
            sums.append(bucket.sum_sq.sum().to(home))
        total = sums[0] if len(sums) == 1 else torch.stack(sums).sum()
        norm = self._collector.unscaled(total.sqrt())
        grad_scale = getattr(self, "grad_scale", None)
        return norm if grad_scale is None else norm / grad_scale.to(home).squeeze()

    def _clipping(self, max_norm: float) -> tuple[Tensor, Tensor | None]:
        """(norm, the coefficient that clips the gradients to max_norm; None if there is no gradient)."""
        norm = self._norm()
        if not any(any(self._collector.received(bucket)) for bucket in self._buckets):
            return norm, None
        return norm, (max_norm / (norm + 1e-6)).clamp(max=1.0)

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, error_if_nonfinite: bool = False) -> Tensor:
        """`torch.nn.utils.clip_grad_norm_` over the active gradients. The next step() multiplies by the coefficient.

        The norm comes from the pass that gathered the gradients; with grads='dense' it gathers them now, and the
        step reads what was gathered. Nothing waits for the device, unless `error_if_nonfinite`.

        Returns:
            The norm before clipping, one fp32 element on the device; 0 if there is no gradient, and the next step then
            clips nothing.

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
        raise NotImplementedError

    def _check_options(self, group: dict[str, Any], where: str = "") -> None:
        """Raise a ValueError unless a group's options are in their ranges. `where` begins the message."""
        options.require_lr(where, group["lr"])
        options.require_seed(where, group["seed"])

    def _update(self, bucket: Bucket, op: Callable[..., None], target: tuple[Any, ...], **arguments: Any) -> None:
        """Call `op` on `target`, which names the parameters and segments, with the group's options.

        Also called with a check of the op's arguments in the place of `op`.
        """
        raise NotImplementedError

    def _check_groups(self) -> None:
        for i, group in enumerate(self.param_groups):
            for name in self.defaults:
                if name not in group:
                    raise ValueError(f"parameter group {i} has no option {name!r}")
            self._check_options(group, f"parameter group {i}: ")

    # torch's stub has two overloads for the closure; one signature serves both.
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One update of the active elements. Parameters without a gradient are skipped, as torch does.

        The step consumes the compact gradients, also one that a GradScaler makes do nothing. A second step without a
        backward pass in between does nothing: no decay, no change of the moments and step counts. torch applies the
        same `param.grad` again until `zero_grad`, and so does grads='dense'.

        All parameter groups are checked before the first one is written. After an error of those below nothing has
        changed, the gradients are still there, and the step may be repeated once its cause is removed. What remains is
        an op that fails at work: out of memory for its temporaries, or a kernel that the device can't launch. Some
        parameters may have been stepped then.

        Raises:
            ValueError: an option of a group is missing or out of its range; a parameter has another size, dtype or
                device than the op takes, or is not contiguous; so has its `param.grad`, with grads='dense'.
            RuntimeError: `param.grad` is not strided; with grads='compact', a parameter has a `param.grad` that no hook
                has seen; a GradScaler is used without `amp_scaling`; the optimizer is closed, or the model has its
                base weights.
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
        steps = [self._prepare(bucket, grad_scale, found_inf, clip_coef) for bucket in self._buckets]
        for step in steps:
            if step is not None:
                step.check(self._update)
        # Nothing has been written so far.
        for step in steps:
            if step is not None:
                step.apply(self._update)
        self.grad_norm = norm
        self._collector.mark_stepped()
        return loss

    def _amp_scaling(self) -> tuple[Tensor | None, Tensor | None]:
        """(grad_scale, found_inf) as a GradScaler has set them on this optimizer, if one has."""
        grad_scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        if found_inf is not None and self.grads == "compact" and not self._collector.scaler_proxies:
            raise RuntimeError(
                "a GradScaler can't see compact gradients; build the optimizer with amp_scaling=True or grads='dense'"
            )
        # With no gradient at all GradScaler sums an empty list to the integer 0.
        return grad_scale, found_inf if isinstance(found_inf, Tensor) else None

    def _prepare(
        self, bucket: Bucket, grad_scale: Tensor | None, found_inf: Tensor | None, clip_coef: Tensor | None
    ) -> stepping.BucketStep | None:
        gathered = self.grads == "compact" or clip_coef is not None
        bucket.finish_gradients()
        arguments = {
            "lr": bucket.refresh_lr(),
            "grad": bucket.grad if gathered else None,
            "master": bucket.state.get("master"),
            "stochastic_rounding": self.stochastic_rounding,
            "seed": bucket.group["seed"] + bucket.ordinal,
            **self._scalars(bucket.device, grad_scale, found_inf, clip_coef),
        }
        return stepping.prepare(bucket, self._op, self._collector.received(bucket) if gathered else None, arguments)

    def _scalars(
        self,
        device: torch.device,
        grad_scale: Tensor | None,
        found_inf: Tensor | None,
        clip_coef: Tensor | None,
    ) -> dict[str, Tensor | None]:
        """The device scalars that a step multiplies and divides gradients by, and its flag to do nothing."""
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
        """The model is W0, the weights it had when this optimizer was built, inside; itself again outside.

        Bit for bit, also after an exception, whenever it is raised: a signal (Ctrl-C) that arrives on the way in or out
        is handled when all weights are in their places. Use it in a `with` statement of its own, since
        `contextlib.ExitStack` and `contextlib.contextmanager` can be interrupted while they enter or leave it. A signal
        handler that is called inside finds W0 in the model.

        Inside, the parameters whose elements change are constants (`requires_grad=False`), so that no gradient of W0
        reaches the optimizer, and a backward pass through a graph that was made outside raises. A graph made outside,
        before, runs backward after it as if nothing had happened.

        Not checked is reentrant checkpointing (`torch.utils.checkpoint` with use_reentrant=True), which makes the graph
        of a layer again in the backward pass, with the weights as they are then: run its backward pass where its
        forward pass ran, inside or outside.

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
        """torch's layout; each active parameter's state holds its indices and base weights beside the moments.

        The indices are those of every active element, whatever pattern the mask has. They are made here:
        `optimizer.state` does not hold them.
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
        """Copy a state in, bit for bit, into the buffers that are there, and drop the gradients.

        Hooks of `register_load_state_dict_pre_hook` and `register_load_state_dict_post_hook` run as in torch.

        Raises:
            ValueError: it is malformed, or was saved under another mask, shape, dtype or set of parameters. Nothing has
                changed then: not the state, nor the groups' options, nor the gradients.
        """
        self._refuse("load_state_dict")
        if isinstance(state_dict, dict):
            state_dict = state_dict.copy()  # which the hooks may change
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
        """Bytes held by the compact buffers, by what they are for: state, master, indices, grad, base."""
        total = dict.fromkeys(("state", "master", "indices", "grad", "base"), 0)
        for bucket in self._buckets:
            for name, flat in bucket.state.items():
                total["master" if name == "master" else "state"] += flat.nbytes
            total["indices"] += bucket.index_bytes
            total["grad"] += 0 if bucket.grad is None else bucket.grad.nbytes
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
