"""SparseOptimizer: parameter groups bound to a mask; their gradients, step, base weights and saved state."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Literal, Never

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from .. import quantised_layers
from ..masks.mask_set import MaskSet, RandomMask, as_mask_set
from ..ops.checks import FLOAT_DTYPES, STATE_DTYPES
from ..ops.step_ops import STEP_OPS
from . import base_weights, binding, lost_updates, options, quantised
from . import state as compact_state
from .buckets import Bucket, BucketStep
from .clipping import clip_coefficient, global_norm, warn_of_clipping_elsewhere
from .gradients import tile_layers
from .gradients.collector import GradientCollector
from .gradients.gradient_buffer import GradientBuffer
from .gradients.reduction import GradientReducer
from .gradients.tile_backward import Route
from .ranks import agreement, sharding
from .ranks.group import group_of, raise_on_all
from .segments import compact

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup  # some builds of torch have none

    from ..delta.sparse_delta import SparseDelta
    from ..delta.state import TensorSpec

__all__ = ["Params", "SparseOptimizer"]

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
        if own and own[-1].kind is inspect.Parameter.VAR_KEYWORD and own[-1].name == "shared":
            names = {p.name for p in own}
            base = inspect.signature(SparseOptimizer.__init__).parameters.values()
            own[-1:] = [p for p in base if p.kind is p.KEYWORD_ONLY and p.name not in names]
        cls.__signature__ = inspect.Signature(own)  # type: ignore[attr-defined]  # inspect and help() read it

    def __init__(
        self,
        params: Params,
        mask: MaskSet | RandomMask | float,
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
        offload_base_weights: bool = False,
        compact_weights: bool = False,
        amp_scaling: bool = False,
        model: nn.Module | None = None,
        tile_backward: bool | None = None,
        backend: str | None = None,
        process_group: ProcessGroup | Literal[False] | None = None,
        **unknown: Never,
    ) -> None:
        if unknown:  # Python's own error would name this class
            raise TypeError(f"{type(self).__name__}() got an unexpected keyword argument {next(iter(unknown))!r}")
        if grads not in ("compact", "dense"):
            raise ValueError(f"grads is {grads!r}, expected 'compact' or 'dense'")
        if state_dtype not in STATE_DTYPES:
            raise ValueError(f"state_dtype is {state_dtype}, expected torch.float32 or torch.bfloat16")
        if grad_dtype not in FLOAT_DTYPES:
            raise ValueError(f"grad_dtype is {grad_dtype}, expected one of {FLOAT_DTYPES}")
        if offload_base_weights and not keep_base_weights:
            raise ValueError("offload_base_weights=True needs keep_base_weights=True")
        self.defaults = {**defaults, "seed": seed}
        options.require_valid(STEP_OPS[self._op], self.defaults, self.defaults)
        self.grads = grads
        if max_grad_norm is not None:
            expected = "a number > 0, or None"
            max_grad_norm = options.require_max_norm("max_grad_norm", max_grad_norm, expected, positive=True)
        self.max_grad_norm = max_grad_norm
        self.state_dtype, self.grad_dtype = state_dtype, grad_dtype
        self.master_weights, self.stochastic_rounding = master_weights, stochastic_rounding
        self.freeze_inactive, self.keep_base_weights = freeze_inactive, keep_base_weights
        self.offload_base_weights, self.compact_weights = offload_base_weights, compact_weights
        self.amp_scaling, self.tile_backward, self.backend = amp_scaling, tile_backward, backend
        self.grad_norm: Tensor | None = None  # of the last step that was clipped, before clipping
        self._buckets: list[Bucket] = []
        self._bases: list[base_weights.BaseWeights] = []
        self._overlays: list[quantised.Overlay] = []  # of quantised layers; they hold the trained weights
        self._frozen: list[Parameter] = []
        self._routes: list[tuple[nn.Module, Route]] = []  # layers with a replaced forward
        # Such a layer refers to itself; without this only the garbage collector would free it.
        weakref.finalize(self, tile_layers.restore, self._routes).atexit = False
        self._groups_fixed = self._closed = self._looked_for_clipping = False
        self._lost_updates: lost_updates.LostUpdates | None = None  # counted, but not read yet
        self.n_steps = 0  # made so far, with those that a GradScaler skipped
        self.generation = 0  # how often the compact buffers were allocated; a captured CUDA graph is valid for one

        if isinstance(params, nn.Module):
            params = getattr(params, "_orig_mod", params)  # torch.compile prefixes every name with "_orig_mod."
            sharding.reshard(params)
            mask = as_mask_set(mask, params).resolve(params)
            model, params = params if model is None else model, quantised_layers.named_parameters(params)
        self._root = binding.model_reference(model)
        super().__init__(params, self.defaults)
        self._groups_fixed = True
        self._check_groups()
        self.collector = GradientCollector(weakref.ref(self), compact=grads == "compact", amp_scaling=amp_scaling)
        self._process_group = process_group
        self._bind(as_mask_set(mask, quantised.whole(dict(self._named()), self._root())))

    # Parameter groups

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group while the optimizer is built, as in torch.

        Raises:
            RuntimeError: the optimizer is already built: the mask has fixed the groups.
            ValueError: the group has no parameter names, or holds a parameter twice.
        """
        if self._groups_fixed:
            raise RuntimeError("the mask has fixed the parameter groups; build a new optimizer to add one")
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        names = group.get("param_names")
        if names is None or len(names) != len(group["params"]):
            raise ValueError(
                f"parameter group {len(self.param_groups) - 1} has no parameter names, which the mask requires; "
                "pass a model, model.named_parameters(), or groups whose 'params' are (name, parameter) pairs"
            )
        if len({id(p) for p in group["params"]}) < len(group["params"]):
            raise ValueError(f"parameter group {len(self.param_groups) - 1} holds a parameter twice")

    def _named(self) -> Iterator[tuple[str, Parameter]]:
        for group in self.param_groups:
            yield from zip(group["param_names"], group["params"], strict=False)

    def _check_groups(self) -> None:
        for i, group in enumerate(self.param_groups):
            for name in self.defaults:
                if name not in group:
                    raise ValueError(f"parameter group {i} has no option {name!r}")
            options.require_valid(STEP_OPS[self._op], group, self.defaults, f"parameter group {i}: ")

    # Binding to a mask

    def _bind(self, mask: MaskSet) -> None:
        """Train the active elements of the parameters in the groups, with new state and base weights."""
        self._overlays = quantised.make_overlays(
            self._root(),
            self.param_groups,
            mask,
            grads=self.grads,
            tile_backward=self.tile_backward,
            backend=self.backend,
        )
        named = dict(self._named())
        mask, active = binding.active_parameters(named, mask, self._frozen, self._root())
        self._shards = sharding.shards_of(named, self._root())
        mesh = next((shard.mesh for shard in self._shards.values() if shard.mesh is not None), None)
        self.process_group = group_of(self._process_group, self.grads, mesh)
        if self.process_group is not None:
            self._require_no_quantised("a process group")
            agreement.require_same_setup(self, mask, self.process_group)
            agreement.require_same_weights(self._shards, named, self.process_group)
        buckets = self._build(active, mask.pattern)
        bases = []
        if self.keep_base_weights:
            bases = base_weights.of_buckets(buckets, self.backend, self.collector, offload=self.offload_base_weights)
        self._adopt(mask, buckets, bases)

    @torch.no_grad()
    def rebind(self, model: nn.Module) -> None:
        """Train the parameters of the same names in `model` from now on, with the same mask and options.

        For code that shards a model after it has built the optimizer, as accelerate does. State and base weights are
        new; an optimizer with process_group=False averages the gradients of sharded parameters over their mesh.
        Prefixes that activation checkpointing and `torch.compile` add to names are ignored. If it raises, the optimizer
        is bound to neither.

        Raises:
            RuntimeError: the optimizer has made a step with other parameters, or is closed, or the model holds its base
                weights.
            ValueError: the model has no parameter of a name; or as the constructor raises.
        """
        self._require_usable("rebind")
        sharding.reshard(model)
        active = {id(overlay.weight): overlay.active for overlay in self._overlays if overlay.active is not None}
        params = {
            name.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", ""): active.get(id(p), p)
            for name, p in quantised_layers.named_parameters(model, remove_duplicate=False)
        }
        names = [name for group in self.param_groups for name in group["param_names"]]
        if missing := [name for name in names if name not in params]:
            raise ValueError(f"rebind: the model has no parameter {missing[0]!r}")
        same = all(params[name] is p for name, p in zip(names, self._shards, strict=True))
        same = same and self._links.replaced() is None and all(b.find_changed() is None for b in self._buckets)
        if not same and any(bool(bucket.steps.any()) for bucket in self._buckets):
            raise RuntimeError("rebind: the optimizer has made a step, and its state is that of other parameters")
        for group in self.param_groups:  # also if they are the same: accelerate may have exchanged them
            group["params"] = [params[name] for name in group["param_names"]]
        if same:
            return
        if self._process_group is False and any(sharding.is_dtensor(params[name]) for name in names):
            self._process_group = None  # that of the mesh
        frozen = {id(p) for p in self._frozen}
        frozen_names = [name for name, p in zip(names, self._shards, strict=True) if id(p) in frozen]
        self.detach()
        for name in names:  # torch.utils.swap_tensors leaves the hooks behind, and the new tensor does not call them
            params[name]._post_accumulate_grad_hooks = params[name]._post_accumulate_grad_hooks
        self._frozen = [params[name] for name in frozen_names]
        self._root = binding.model_reference(model)
        self._bind(self.mask)

    def _build(self, active: dict[Parameter, Tensor], pattern: str) -> list[Bucket]:
        """Build the buckets with their state and gradient buffers. The model and the optimizer do not change."""
        buckets = binding.build_buckets(self.param_groups, active, self._shards, pattern, self.backend)
        compact_grads = self.grads == "compact"
        tiles = tile_layers.choose(buckets, self._root(), pattern, grads=self.grads, tile_backward=self.tile_backward)
        copies = {"master_weights": self.master_weights, "compact_weights": self.compact_weights}
        for bucket, its_tiles in zip(buckets, tiles, strict=True):
            bucket.allocate(STEP_OPS[self._op], self.state_dtype, **copies)
            n_grads = bucket.unsharded.nnz if compact_grads or self.max_grad_norm is not None else 0
            values = torch.zeros(n_grads, dtype=self.grad_dtype, device=bucket.device)
            binding.bind(bucket, self.backend, values=values, tiles=its_tiles, compact=compact_grads)
        return buckets

    def _adopt(self, mask: MaskSet, buckets: list[Bucket], bases: list[base_weights.BaseWeights]) -> None:
        """Train the parameters of new buckets from now on. This is the part of binding that changes the model."""
        self.detach()
        if self.grads == "compact":
            self.zero_grad()
        self.mask, self._buckets, self._bases = mask, buckets, bases
        self._links = binding.ModelLinks(self._root(), dict(self._named()), buckets)
        self.generation += 1
        self._publish_state()
        reducer = None
        if self.process_group is not None:
            root = self._root()
            params = (p for _, p in self._named()) if root is None else root.parameters()
            order = [self._shards[p].unsharded for p in params if p in self._shards]
            reducer = GradientReducer(
                self.gradient_buffers,
                self.process_group,
                self.collector.lock,
                {param: i for i, param in enumerate(order)},
                self.collector.before_reduction,
                self.collector.after_reduction,
                overlap=not any(bucket.is_sharded for bucket in self._buckets),
            )
        self.collector.adopt(list(self.gradient_buffers), reducer)
        self._attach()

    @torch.no_grad()
    def set_mask(self, mask: MaskSet) -> None:
        """Replace the mask. Elements in both masks keep their state; new elements start with zero moments.

        Raises:
            RuntimeError: there are gradients that no step has used, or the model holds its base weights.
        """
        self._require_bound("set_mask")
        self._require_no_quantised("set_mask")
        if self.collector.has_unused():
            raise RuntimeError("set_mask: there are unused gradients; call step() or zero_grad() first")
        sharding.reshard(self._root())
        mask, active = binding.active_parameters(dict(self._named()), mask, self._frozen, self._root())
        if self.process_group is not None:
            agreement.require_same_setup(self, mask, self.process_group)
        buckets = self._build(active, mask.pattern)
        compact_state.copy_common(self._buckets, buckets)
        bases = []
        if self.keep_base_weights:
            held = dict(part for base in self._bases for part in base.parts())
            bases = base_weights.rebuild(buckets, held, self.backend, self.collector, offload=self.offload_base_weights)
        self._adopt(mask, buckets, bases)

    def _publish_state(self) -> None:
        self.state.clear()
        self.state.update(compact_state.entries(self._buckets, self._bases))

    @property
    def gradient_buffers(self) -> tuple[GradientBuffer, ...]:
        """The compact gradients: one buffer for each parameter group, device, dtype and layout of the indices."""
        return tuple(bucket.gradient for bucket in self._buckets)

    @property
    def holds_base_weights(self) -> bool:
        """Whether the model holds its base weights, inside of `base_weights()`."""
        return self.collector.inside_base

    @property
    def tiled_parameters(self) -> tuple[str, ...]:
        """Names of the parameters whose gradients their layers compute tile by tile."""
        return tuple(
            name
            for buffer in self.gradient_buffers
            if buffer.tiles is not None
            for i, name in enumerate(buffer.names)
            if buffer.tiles.has(i)
        ) + tuple(overlay.layer.name for overlay in self._overlays if overlay.is_tiled)

    @property
    def quantised_parameters(self) -> tuple[str, ...]:
        """Names of the active parameters whose base is quantised; their trained weights are in this optimizer alone."""
        return tuple(name for bucket in self._buckets if bucket.is_over_quantised for name in bucket.names)

    def _require_no_quantised(self, what: str) -> None:
        """Raise a NotImplementedError that names the call `what` if an active parameter has a quantised base."""
        overlay = next((overlay for overlay in self._overlays if overlay.active is not None), None)
        if overlay is not None:
            raise NotImplementedError(f"{what} is not supported for a quantised base, which {overlay.layer.name!r} has")

    def _require_usable(self, what: str) -> None:
        """Raise an error that names the call `what` if the optimizer is closed, or inside `base_weights()`."""
        if self._closed:
            raise RuntimeError(f"{what}: the optimizer is closed")
        if self.collector.inside_base:
            raise RuntimeError(f"{what}: the model holds its base weights; leave base_weights() first")

    def _require_bound(self, what: str) -> None:
        """Raise an error as `_require_usable` and `check_binding` do."""
        self._require_usable(what)
        self.check_binding()

    def check_binding(self) -> None:
        """Check that the model still has the active parameters. Calls that use them check it themselves.

        Raises:
            RuntimeError: a parameter was replaced after the optimizer was built; names it.
        """
        self._links.require_intact(self.param_groups)
        for overlay in self._overlays:
            overlay.require_intact()

    # Hooks, frozen parameters and tiled layers in the model

    def _attach(self) -> None:
        active = {shard.param: shard for bucket in self._buckets for shard in bucket.shards}
        for param, shard in active.items():
            shard.unsharded.requires_grad_(param.requires_grad)  # FSDP2 does so in the next forward pass
        if self.freeze_inactive:
            self._frozen = [p for _, p in self._named() if p not in active and p.requires_grad]
            for p in self._frozen:
                p.requires_grad_(False)
        self.collector.attach()
        root = self._root()
        if root is not None:
            for bucket, receiver in zip(self._buckets, self.collector.receivers, strict=True):
                self._routes += tile_layers.install(root, bucket, receiver, everywhere=self.tile_backward is True)
        quantised.connect(self._overlays, self.collector.receivers)

    def detach(self) -> None:
        """Undo the optimizer's changes of the model, until `attach`: hooks, frozen parameters, layers' own forward."""
        self.collector.detach()
        tile_layers.restore(self._routes)
        quantised.disconnect(self._overlays)
        for p in self._frozen:
            p.requires_grad_(True)
        self._frozen = []

    @torch.no_grad()
    def attach(self) -> None:
        """Undo `detach`. Master weights are updated from weights that changed in between."""
        self._require_usable("attach")
        for overlay in self._overlays:
            overlay.require_intact()
        self.detach()
        self.refresh_master_weights()
        self._attach()

    def close(self) -> None:
        """Undo the optimizer's changes of the model for good; `step` raises afterwards."""
        if self.collector.inside_base:
            raise RuntimeError("close: the model holds its base weights; leave base_weights() first")
        self.detach()
        self._closed = True

    @torch.no_grad()
    def refresh_master_weights(self) -> None:
        """Update the master weights, and the copy of `compact_weights`, from weights that other code has changed.

        Without it the next step restores the old values. Master weights of unchanged weights keep their fp32 precision.
        """
        for bucket in self._buckets:
            if "master" in bucket.state:
                master, weights = bucket.state["master"], compact(bucket)
                master.copy_(torch.where(master.to(weights.dtype) == weights, master, weights.float()))
            if bucket.weights is not None:
                bucket.weights.forget()

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            f"{type(self).__name__} holds hooks into its model and can't be copied or pickled; use state_dict()"
        )

    # Gradients

    def compact_grad(self, param: Parameter) -> Tensor | None:
        """Return a view of the gradient that the next step will use: [nnz of the whole param] in `grad_dtype`, or None.

        Raises:
            RuntimeError: a parameter was replaced after the optimizer was built.
        """
        self.check_binding()
        for bucket in self._buckets if self.grads == "compact" else ():
            buffer = bucket.gradient
            for i, shard in enumerate(bucket.shards):
                if shard.param is param and self.collector.received(buffer)[i]:
                    buffer.finish()
                    self.collector.wait_for_reduction()
                    return buffer.values[buffer.segment(i)]
        return None

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients that no step has used; `model.zero_grad()` does not reach compact ones."""
        self.collector.forget()
        for bucket in self._buckets:
            bucket.release_dense_grads()
        super().zero_grad(set_to_none or self.grads == "compact")

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
        self._check_gradients()
        self.collector.reduce()
        if self.grads == "dense":
            for buffer in self.gradient_buffers:
                buffer.gather_dense_grads()
        received = [self.collector.received(buffer) for buffer in self.gradient_buffers]
        reducer, grad_scale = self.collector.reducer, getattr(self, "grad_scale", None)
        clipped = None
        if len(received) == 1 and all(received[0]) and reducer is None:
            clipped = self.gradient_buffers[0].clip(max_norm)
        if clipped is not None and grad_scale is None and not self.collector.shown_proxies():
            return clipped
        if clipped is not None:
            norm = clipped[0]  # of the scaled gradients
        else:
            norm = global_norm(self.gradient_buffers, received) if reducer is None else reducer.norm()
        norm = self.collector.unscaled(norm)
        if grad_scale is not None:
            norm = norm / grad_scale.to(norm.device).squeeze()
        if not any(any(flags) for flags in received):
            return norm, None
        return norm, clip_coefficient(norm, max_norm)

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, error_if_nonfinite: bool = False) -> Tensor:
        """Clip the norm of the active gradients in the next step, as `torch.nn.utils.clip_grad_norm_` does.

        Returns:
            The norm before clipping, one fp32 element on the device; 0 without gradients. There is no synchronization
            unless
            `error_if_nonfinite` is True.

        Raises:
            ValueError: `max_norm` is no number, negative or NaN; or as in `step`.
            RuntimeError: as in `step`.
        """
        self._require_bound("clip_grad_norm_")
        max_norm = options.require_max_norm("max_norm", max_norm, "a number >= 0")
        norm, clip_coef = self._clipping(max_norm)
        if error_if_nonfinite and not norm.isfinite():
            raise RuntimeError(f"the norm of the active gradients is {norm.item()}, so they can't be clipped")
        self.collector.clip_coef = clip_coef
        self.grad_norm = norm
        return norm

    # The step

    # torch's stub has two overloads for the closure; one signature serves both.
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update the active elements once. Parameters without a gradient are skipped, as in torch.

        The step consumes the compact gradients, even if a GradScaler skips the update. With a process group it is a
        collective, and updates all active parameters: a gradient that no rank has is zero.

        All parameter groups are checked before anything is written. After one of the errors below nothing has changed,
        and the step can be repeated. An op can still fail while it runs (out of memory, a failed kernel launch); some
        parameters may then have been updated.

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
        self._check_groups()
        grad_scale, found_inf = self._amp_scaling()
        norm, clip_coef = self.grad_norm, self.collector.clip_coef
        if self.max_grad_norm is not None and clip_coef is None:
            norm, clip_coef = self._clipping(self.max_grad_norm)
        elif self.grads == "compact":
            self._check_gradients()
            self.collector.reduce()
            if clip_coef is None and not self._looked_for_clipping and self.collector.has_unused():
                self._looked_for_clipping = True
                warn_of_clipping_elsewhere(type(self).__name__)
        prepared = [self._prepare(bucket, grad_scale, found_inf, clip_coef) for bucket in self._buckets]
        steps = [step for step in prepared if step is not None]
        for step in steps:
            step.check()
        # Nothing has been written so far, except weights that differed from their masters.
        sampled = self._sample_updates(steps)
        for step in steps:
            step.apply()
        if sampled is not None:
            sampled.count(found_inf)
            self._lost_updates = sampled
        self.grad_norm = norm
        self.collector.mark_stepped()
        self.n_steps += 1
        return loss

    def _sample_updates(self, steps: list[BucketStep]) -> lost_updates.LostUpdates | None:
        """Sample the weights whose updates rounding could discard, before an early step is written; mostly None.

        Also warns of what an earlier step has counted.
        """
        if self._lost_updates is None and self.n_steps + 1 != lost_updates.CHECKED_STEP:
            return None
        if any(step.bucket.device.type == "cuda" for step in steps) and torch.cuda.is_current_stream_capturing():
            return None
        if self._lost_updates is not None:
            if self._lost_updates.warn_if_counted():
                self._lost_updates = None
            return None
        buckets = [step.bucket for step in steps if "master" not in step.bucket.state]
        buckets = [b for b in buckets if b.dtype != torch.float32 and b.device == buckets[0].device]
        if self.stochastic_rounding or not buckets:
            return None
        dense = self.grads == "dense"
        flags = [
            [p.grad is not None for p in b.params] if dense else self.collector.received(b.gradient) for b in buckets
        ]
        return lost_updates.LostUpdates(buckets, flags, dense=dense)

    def _amp_scaling(self) -> tuple[Tensor | None, Tensor | None]:
        """Return (grad_scale, found_inf) as set on this optimizer by a GradScaler; None for what it has not set."""
        grad_scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        if found_inf is not None and self.grads == "compact" and not self.collector.scaler_proxies:
            raise RuntimeError(
                "a GradScaler can't see compact gradients; build the optimizer with amp_scaling=True or grads='dense'"
            )
        # Without any gradient, GradScaler's found_inf is the sum of an empty list, the integer 0.
        return grad_scale, found_inf if isinstance(found_inf, Tensor) else None

    def _prepare(
        self, bucket: Bucket, grad_scale: Tensor | None, found_inf: Tensor | None, clip_coef: Tensor | None
    ) -> BucketStep | None:
        gathered = self.grads == "compact" or clip_coef is not None
        if found_inf is not None and grad_scale is None and self.collector.scaler_proxies:
            factor = self.collector.scaler_proxies[bucket.device].factor  # GradScaler.unscale_ has set it to 1/scale
            clip_coef = factor if clip_coef is None else factor * clip_coef.to(bucket.device)
        scalars = {"grad_scale": grad_scale, "found_inf": found_inf, "clip_coef": clip_coef}
        return bucket.prepare_step(
            STEP_OPS[self._op],
            self.collector.received(bucket.gradient) if gathered else None,
            {name: None if t is None else t.to(bucket.device, torch.float32) for name, t in scalars.items()},
            stochastic_rounding=self.stochastic_rounding,
        )

    # Base weights

    def _bases_to_swap(self, call: str = "base_weights") -> list[base_weights.BaseWeights]:
        self._require_bound(call)
        if not self.keep_base_weights:
            raise RuntimeError(f"{call}: the optimizer was built with keep_base_weights=False")
        for base in self._bases:
            changed = base.find_changed()
            if changed is not None:
                shard = base.shards[changed[0]]
                name = next(name for name, p in self._named() if self._shards[p] is shard)
                raise RuntimeError(f"{call}: {name!r} {changed[1]}")
        self.sync_weights()
        return self._bases

    def _shown_bases(self) -> list[quantised.ShownBase]:
        return [quantised.ShownBase(self._overlays, self._shards)] if self._overlays else []

    def sync_weights(self) -> None:
        """With `compact_weights`, take over what other code has written to the weights, by their version counters."""
        for bucket in self._buckets:
            if bucket.weights is not None:
                bucket.weights.sync()

    def active_weights(self) -> list[tuple[list[str], Tensor]] | None:
        """With `compact_weights`, return the current active weights without reading the model; None otherwise.

        Returns:
            pairs of names of parameters and a tensor [nnz] of their dtype: their active elements, one parameter after
            the other. The tensor may be the optimizer's own: copy it before the next step.

        Raises:
            RuntimeError: the model holds its base weights, or the optimizer is closed.
        """
        self._require_bound("active_weights")
        self._require_no_quantised("active_weights")
        if not self.compact_weights:
            return None
        self.sync_weights()
        return [(bucket.names, bucket.weights.rounded()) for bucket in self._buckets if bucket.weights is not None]

    def base_weights(self) -> AbstractContextManager[None]:
        """Context manager inside which the model has W0, the weights it had when this optimizer was built.

        On exit the trained weights are restored bit for bit, also after an exception or a signal at any point, if it is
        used directly in a `with` statement. Inside, the active parameters are constants. docs/optimizer.md has the
        rules.

        Raises:
            RuntimeError: on entry, if the model holds its base weights, the optimizer is closed, or it was built with
                keep_base_weights=False.
        """
        return base_weights.InBaseWeights(
            lambda: [*self._bases_to_swap(), *self._shown_bases()],
            self.collector,
            self._root,
            lambda: ((name, self._shards[p].unsharded) for name, p in self._named()),
        )

    @torch.no_grad()
    def delta(self) -> SparseDelta:
        """Return what training has changed since W0, as a `SparseDelta` to save and share.

        An optimizer that was built from parameters, without `model`, returns the delta of these alone.

        Raises:
            RuntimeError: as `base_weights`.
            DeltaError: a parameter is sharded by fully_shard.
        """
        from ..delta.sparse_delta import SparseDelta, dense, origin, quantised_digests, read_model

        bases = self._bases_to_swap("delta")
        root = self._root()
        layout, state = read_model(dict(self._named()) if root is None else root, "the model")
        names = {p.data_ptr(): name for name, p in state.items() if isinstance(p, Tensor)}
        held = {
            names[shard.param.data_ptr()]: (base.positions(i), base.values[base.segment(i)])
            for base in bases
            for i, shard in enumerate(base.shards)
        }

        def read(spec: TensorSpec) -> tuple[Tensor, Tensor]:
            weight = state[spec.name]
            if not isinstance(weight, Tensor):  # a quantised layer, whose base needs no copy
                return dense(weight), quantised.current_weight(weight)
            if spec.name not in held:
                return weight, weight
            positions, values = held[spec.name]
            before = weight.clone()
            before.view(-1)[positions.long()] = values.to(weight.device)
            return before, weight

        facts, digests = origin(root, self.mask), quantised_digests(state)
        return SparseDelta.of_tensors(layout, read, metadata=facts, quantised=digests)

    # State

    def state_dict(self) -> dict[str, Any]:
        """Return the state in torch's layout, with the indices and base weights of each active parameter.

        With sharded parameters, all ranks must call this. The tensors are copies, as DTensors over all ranks, for
        `torch.distributed.checkpoint`. `sparse_opt.distributed` loads checkpoints, and gathers a full state dict.
        """
        self._require_usable("state_dict")
        params, state = self.param_groups[0]["params"], self.state
        try:
            self.param_groups[0]["params"] = params[: len(params) - self.collector.shown_proxies()]
            self.state = compact_state.with_indices(state, self._buckets, self._bases)
            sharded = [shard for shard in self._shards.values() if not shard.is_whole]
            if sharded:
                from .ranks import sharded_state

                self.state = sharded_state.as_dtensors(self.state, sharded)
            return super().state_dict()
        finally:
            self.param_groups[0]["params"], self.state = params, state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Copy a saved state, bit for bit, into the existing buffers, and drop the gradients.

        With a process group, all ranks must call this. With sharded parameters, the state may also be that of one
        device.

        Raises:
            ValueError: the state is malformed, or was saved with another mask, shape, dtype or set of parameters, on
                any rank; nothing has changed.
            RuntimeError: the ranks have loaded different states; names the first tensor that differs.
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
        op = STEP_OPS[self._op]
        with raise_on_all(self.process_group, self._buckets[0].device):
            saved = compact_state.SavedState.of(
                state_dict, self.param_groups, self._shards, self._buckets, self.defaults
            )
            for i, (group, loaded) in enumerate(zip(self.param_groups, saved.options, strict=True)):
                where = f"parameter group {i} of the saved state: "
                merged = {**group, **loaded}
                options.require_valid(op, merged, self.defaults, where)
                used = op.used_states(options.op_options(op, merged))
                for bucket in self._buckets:
                    missing = set(used) - bucket.state.keys()
                    if bucket.group is group and missing:
                        raise ValueError(f"{where}its options require {sorted(missing)}, absent from this optimizer")
            bases = self._bases
            if bases:
                held = saved.base_weights(self._buckets, self._shards)
                bases = base_weights.rebuild(
                    self._buckets, held, self.backend, self.collector, offload=self.offload_base_weights
                )
        # Nothing has changed so far.
        self.zero_grad()
        saved.copy_states_(self._buckets)
        self.n_steps = max(int(state["step"]) for state in saved.states.values() if "step" in state)
        for bucket in self._buckets:
            bucket.filled_lr = None
            if bucket.weights is not None:
                bucket.weights.forget()
        saved.copy_options_(self.param_groups)
        if len(bases) == len(self._bases) and all(a.same_elements(b) for a, b in zip(self._bases, bases, strict=True)):
            for base, loaded_base in zip(self._bases, bases, strict=True):
                base.values.copy_(loaded_base.values)
        else:
            self._bases = bases
            self.generation += 1
        self._publish_state()
        if self.process_group is not None:
            agreement.require_same_state(self, self.n_steps, self._shards, dict(self._named()), self.process_group)

    def nbytes(self) -> dict[str, int]:
        """Return the bytes of the compact buffers: state, master, compact_weights, indices, grad, base."""
        return compact_state.nbytes(self._buckets, self._bases)

    # Several ranks

    def no_sync(self) -> AbstractContextManager[None]:
        """Context manager inside which backward passes add to this rank's own gradients, and nothing is averaged.

        The next backward pass outside of it, or the next step, averages all of them.
        """
        reducer = self.collector.reducer
        return nullcontext() if reducer is None else reducer.no_sync()

    def check_ranks(self) -> None:
        """Check that all ranks of the process group have the same weights, options and optimizer state, bit for bit.

        The base weights are part of the state. For tests and debugging: it reads all of them, synchronizes, and is a
        collective.

        Raises:
            RuntimeError: some ranks differ from the first one; names the ranks and the first tensor that differs.
        """
        self._require_usable("check_ranks")
        if self.process_group is not None:
            named = dict(self._named())
            agreement.require_same_weights(self._shards, named, self.process_group)
            agreement.require_same_state(self, self.n_steps, self._shards, named, self.process_group)
