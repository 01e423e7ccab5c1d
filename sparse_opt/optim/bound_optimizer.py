"""BoundOptimizer: parameter groups bound to a mask, with their compact state and the hooks in the model."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Literal, Never, cast

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from ..masks.mask_set import MaskSet
from ..ops.checks import FLOAT_DTYPES, STATE_DTYPES
from ..ops.step_ops import STEP_OPS
from . import base_weights, binding, options, state_entries
from .buckets import Bucket
from .compact_weights import CompactWeights
from .gradients import tile_layers
from .gradients.collector import GradientCollector
from .gradients.gradient_buffer import GradientBuffer
from .gradients.reduction import GradientReducer
from .gradients.tile_backward import Route
from .ranks import agreement, checks, sharding
from .ranks.group import group_of
from .segments import compact
from .stepping import Stepper

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup  # some builds of torch have none

Params = nn.Module | Iterable[tuple[str, Parameter]] | Iterable[dict[str, Any]]


class BoundOptimizer(torch.optim.Optimizer):
    """The parameter groups of a `SparseOptimizer`, bound to a mask: compact state, base weights, hooks in the model.

    `SparseOptimizer` uses them: for gradients and the step, to swap the base weights, and to save the state.
    """

    _op: str  # the name of the step op

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Show the shared options in the signature of a subclass that takes them as `**shared`."""
        super().__init_subclass__(**kwargs)
        own = list(inspect.signature(cls.__init__).parameters.values())[1:]
        if own and own[-1].kind is inspect.Parameter.VAR_KEYWORD and own[-1].name == "shared":
            names = {p.name for p in own}
            base = inspect.signature(BoundOptimizer.__init__).parameters.values()
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
        self._check_options(self.defaults)
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
        self._steppers: list[Stepper] = []
        self._bases: list[base_weights.BaseWeights] = []
        self._frozen: list[Parameter] = []
        self._routes: list[tuple[nn.Module, Route]] = []  # layers with a replaced forward
        # Such a layer refers to itself; without this only the garbage collector would free it.
        weakref.finalize(self, tile_layers.restore, self._routes).atexit = False
        self._groups_fixed = self._closed = False
        self._n_steps = self._history = 0  # see `Progress`; steps that a GradScaler skips are counted
        self.generation = 0  # how often the compact buffers were allocated; a captured CUDA graph is valid for one

        if isinstance(params, nn.Module):
            params = getattr(params, "_orig_mod", params)  # torch.compile prefixes every name with "_orig_mod."
            sharding.reshard(params)
            mask = mask.resolve(params)
            model, params = params if model is None else model, params.named_parameters()
        self._model = None if model is None else weakref.ref(getattr(model, "_orig_mod", model))
        super().__init__(params, self.defaults)
        self._groups_fixed = True
        self._check_groups()
        self._collector = GradientCollector(weakref.ref(self), compact=grads == "compact", amp_scaling=amp_scaling)
        self._process_group = process_group
        self._bind(mask)

    # Parameter groups

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
                f"parameter group {len(self.param_groups) - 1} has no parameter names, which the mask requires; "
                "pass a model, model.named_parameters(), or groups whose 'params' are (name, parameter) pairs"
            )
        if len({id(p) for p in group["params"]}) < len(group["params"]):
            raise ValueError(f"parameter group {len(self.param_groups) - 1} holds a parameter twice")

    def _named(self) -> Iterator[tuple[str, Parameter]]:
        for group in self.param_groups:
            yield from zip(group["param_names"], group["params"], strict=False)

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

    # Binding to a mask

    def _bind(self, mask: MaskSet) -> None:
        """Train the active elements of the parameters in the groups, with new state and base weights."""
        named = dict(self._named())
        mask, active = binding.active_parameters(named, mask, self._frozen, self._root())
        self._shards = sharding.shards_of(named, self._root())
        self.process_group = group_of(self._process_group, self.grads, sharding.mesh_of(self._shards))
        if self.process_group is not None:
            checks.require_same_setup(self, mask, self.process_group)
            checks.require_same_weights(self._shards, named, self.process_group)
        steppers = self._build(active, mask.pattern)
        bases = self._new_bases([stepper.bucket for stepper in steppers])
        self.mask = mask
        self._adopt(steppers, bases)

    def _new_bases(self, buckets: list[Bucket]) -> list[base_weights.BaseWeights]:
        """Return the current active weights as base weights; none without `keep_base_weights`."""
        if not self.keep_base_weights:
            return []
        self._check_offload(buckets)
        of = base_weights.BaseWeights.of
        return [of(bucket, self.backend, offload=self.offload_base_weights) for bucket in buckets]

    def _check_offload(self, buckets: list[Bucket]) -> None:
        if self.offload_base_weights and (sharded := [bucket for bucket in buckets if bucket.is_sharded]):
            raise ValueError(f"offload_base_weights=True, but {sharded[0].names[0]!r} is sharded by fully_shard")

    def _rebuilt_bases(
        self, buckets: list[Bucket], held: dict[sharding.Shard, tuple[Tensor, Tensor]]
    ) -> list[base_weights.BaseWeights]:
        self._check_offload(buckets)
        return base_weights.rebuild(buckets, held, self.backend, offload=self.offload_base_weights)

    @torch.no_grad()
    def rebind(self, model: nn.Module) -> None:
        """Train the parameters of the same names in `model` from now on, with the same mask and options.

        For code that shards a model after it has built the optimizer, as accelerate does. State and base weights are
        new, as those of an optimizer that is built for `model`; if it was built with process_group=False, the gradients
        of sharded parameters are averaged over their mesh. Nothing changes if the optimizer trains the same parameters
        already. Prefixes that activation checkpointing and `torch.compile` add to names are ignored. If it raises, the
        optimizer is bound to neither model.

        Raises:
            RuntimeError: the optimizer has made a step with other parameters, or is closed, or the model holds its base
                weights.
            ValueError: the model has no parameter of a name; or as the constructor raises.
        """
        self._require_usable("rebind")
        sharding.reshard(model)
        params = {
            name.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", ""): p
            for name, p in model.named_parameters(remove_duplicate=False)
        }
        names = [name for group in self.param_groups for name in group["param_names"]]
        if missing := [name for name in names if name not in params]:
            raise ValueError(f"rebind: the model has no parameter {missing[0]!r}")
        same = all(params[name] is p for name, p in zip(names, self._shards, strict=True))
        same = same and self._links.replaced() is None
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
        self._detach()
        for name in names:  # torch.utils.swap_tensors leaves the hooks behind, and the new tensor does not call them
            params[name]._post_accumulate_grad_hooks = params[name]._post_accumulate_grad_hooks
        self._frozen = [params[name] for name in frozen_names]
        self._model = weakref.ref(getattr(model, "_orig_mod", model))
        self._bind(self.mask)

    def _build(self, active: dict[Parameter, Tensor], pattern: str) -> list[Stepper]:
        """Build the buckets with their state and gradient buffers. The model and the optimizer do not change."""
        buckets = binding.build_buckets(self.param_groups, active, self._shards, pattern, self.backend)
        compact_grads = self.grads == "compact"
        tiles = tile_layers.choose(buckets, self._root(), pattern, grads=self.grads, tile_backward=self.tile_backward)
        steppers = []
        for bucket, its_tiles in zip(buckets, tiles, strict=True):
            for name in self._state_names(bucket.group):
                bucket.state[name] = torch.zeros(bucket.nnz, dtype=self.state_dtype, device=bucket.device)
            if self.master_weights and bucket.params[0].dtype != torch.float32:
                bucket.state["master"] = compact(bucket, torch.float32)
            if self.compact_weights:
                if bucket.is_sharded:
                    raise ValueError(f"compact_weights=True, but {bucket.names[0]!r} is sharded by fully_shard")
                bucket.weights = CompactWeights(bucket, bucket.state.get("master"))
            n_grads = bucket.unsharded.nnz if compact_grads or self.max_grad_norm is not None else 0
            # Behind the gradient are the elements of an `Agreement`, which one reduction averages with it.
            n_more = agreement.n_elements(self.process_group)
            values = torch.zeros(n_grads + n_more, dtype=self.grad_dtype, device=bucket.device)[:n_grads]
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
        self._links = binding.ModelLinks(self._root(), steppers)
        self.generation += 1
        self._publish_state()
        reducer = None
        if self.process_group is not None:
            root = self._root()
            params = (p for _, p in self._named()) if root is None else root.parameters()
            order = [self._shards[p].unsharded for p in params if p in self._shards]
            progress = weakref.WeakMethod(self._progress)
            reducer = GradientReducer(
                self.gradient_buffers,
                self.process_group,
                self._collector.lock,
                {param: i for i, param in enumerate(order)},
                lambda: cast(Callable[[], agreement.Progress], progress())(),
                self._collector.before_reduction,
                self._collector.after_reduction,
                overlap=not any(bucket.is_sharded for bucket in self._buckets),
            )
        self._collector.adopt(list(self.gradient_buffers), reducer)
        self._attach()

    @torch.no_grad()
    def set_mask(self, mask: MaskSet) -> None:
        """Replace the mask. Elements in both masks keep their state; new elements start with zero moments.

        Step counts are per parameter and are kept, so bias correction does not scale up the moments of new elements:
        Adam's first updates of them are up to (1 - beta1) / sqrt(1 - beta2) times the learning rate, about 3.2 with the
        usual betas. Elements that leave the mask keep their values, and `base_weights` still restores them.

        Raises:
            RuntimeError: there are gradients that no step has used, or the model holds its base weights.
        """
        self._require_usable("set_mask")
        self.check_binding()
        if self._collector.has_unused():
            raise RuntimeError("set_mask: there are unused gradients; call step() or zero_grad() first")
        sharding.reshard(self._root())
        mask, active = binding.active_parameters(dict(self._named()), mask, self._frozen, self._root())
        if self.process_group is not None:
            checks.require_same_setup(self, mask, self.process_group)
        steppers = self._build(active, mask.pattern)
        buckets = [stepper.bucket for stepper in steppers]
        state_entries.copy_common_state(self._buckets, buckets)
        held = dict(part for base in self._bases for part in base.parts())
        bases = self._rebuilt_bases(buckets, held) if self.keep_base_weights else []
        self.mask = mask
        self._adopt(steppers, bases)

    def _progress(self) -> agreement.Progress:
        """Return what all ranks of the process group must have in common when they reduce their gradients."""
        return agreement.Progress(self._n_steps % 2**24, self._history % 2**24)

    def _publish_state(self) -> None:
        self.state.clear()
        self.state.update(state_entries.entries(self._buckets, self._bases))

    @property
    def gradient_buffers(self) -> tuple[GradientBuffer, ...]:
        """The compact gradients: one buffer for each parameter group, device, dtype and layout of the indices."""
        return tuple(bucket.gradient for bucket in self._buckets)

    @property
    def holds_base_weights(self) -> bool:
        """Whether the model holds its base weights, inside of `base_weights()`."""
        return self._collector.inside_base

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

    def _require_usable(self, what: str) -> None:
        """Raise an error that names the call `what` if the optimizer is closed, or inside `base_weights()`."""
        if self._closed:
            raise RuntimeError(f"{what}: the optimizer is closed")
        if self._collector.inside_base:
            raise RuntimeError(f"{what}: the model holds its base weights; leave base_weights() first")

    def check_binding(self) -> None:
        """Check that the model still has the active parameters, by the identity of parameters and modules.

        `step`, `clip_grad_norm_`, `compact_grad`, `base_weights`, `active_weights`, `set_mask` and `WeightSender` call
        it. An optimizer that was built from parameters, without `model`, does not know the modules that have them, and
        notices `torch.utils.swap_tensors` alone.

        Raises:
            RuntimeError: a parameter was replaced after the optimizer was built; names it.
        """
        replaced = self._links.replaced()
        if any(group["param_names"] and group["params"][0] not in self._shards for group in self.param_groups):
            given = {id(param) for group in self.param_groups for param in group["params"]}
            replaced = next((param for param in self._shards if id(param) not in given), None)
        if replaced is None:
            return
        names = (name for group in self.param_groups for name in group["param_names"])
        name = next(name for name, param in zip(names, self._shards, strict=True) if param is replaced)
        raise RuntimeError(
            f"{name!r} was replaced after the optimizer was built, as load_state_dict(assign=True), an assignment to a "
            "layer's weight and accelerate's prepare do: call rebind(model) before the first step, or build a new "
            "optimizer after it"
        )

    # Hooks, frozen parameters and tiled layers in the model

    def _root(self) -> nn.Module | None:
        return None if self._model is None else self._model()

    def _attach(self) -> None:
        active = {shard.param: shard for bucket in self._buckets for shard in bucket.shards}
        for param, shard in active.items():
            shard.unsharded.requires_grad_(param.requires_grad)  # FSDP2 does so in the next forward pass
        if self.freeze_inactive:
            self._frozen = [p for _, p in self._named() if p not in active and p.requires_grad]
            for p in self._frozen:
                p.requires_grad_(False)
        self._collector.attach()
        root = self._root()
        if root is not None:
            for bucket, receiver in zip(self._buckets, self._collector.receivers, strict=True):
                self._routes += tile_layers.install(root, bucket, receiver, everywhere=self.tile_backward is True)

    def _detach(self) -> None:
        self._collector.detach()
        tile_layers.restore(self._routes)
        for p in self._frozen:
            p.requires_grad_(True)
        self._frozen = []

    def detach(self) -> None:
        """Remove the optimizer's hooks from the model, unfreeze parameters, and restore every layer's own forward.

        The optimizer keeps its state and its base weights. `attach` undoes this.
        """
        self._detach()

    @torch.no_grad()
    def attach(self) -> None:
        """Undo `detach`. Master weights are updated from weights that changed in between."""
        self._require_usable("attach")
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
        weights keep their fp32 precision. The copy of `compact_weights` is updated, too.
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
