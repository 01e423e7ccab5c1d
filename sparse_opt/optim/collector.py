"""GradientCollector: gathers compact gradients during the backward pass, through hooks and tiled layers."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from . import gradients, tile_linears
from .buckets import Bucket
from .tile_backward import Route


class ScalerProxy:
    """Makes compact gradients, which are not in any `.grad`, visible to `torch.amp.GradScaler`.

    The scaler multiplies each `.grad` in the parameter groups by 1/scale and checks it for inf and NaN. While there are
    unused gradients, the first group has this parameter of one element at its end. Its `.grad` starts at 1, the gather
    sets it to inf if a gradient is not finite, and after the scaler has run it is the factor by which the compact
    gradients still have to be multiplied.
    """

    def __init__(self, device: torch.device) -> None:
        self.param = Parameter(torch.zeros(1, dtype=torch.float32, device=device))
        self.factor = torch.ones(1, dtype=torch.float32, device=device)

    @property
    def shown(self) -> bool:
        return self.param.grad is not None

    def show(self, group: dict[str, Any]) -> None:
        if not self.shown:
            self.factor.fill_(1.0)
            self.param.grad = self.factor
            group["params"].append(self.param)

    def hide(self, group: dict[str, Any]) -> None:
        if self.shown:
            self.param.grad = None
            group["params"][:] = [p for p in group["params"] if p is not self.param]


def arrived_inside(name: str) -> str:
    """Return the error message for a gradient that is refused inside `base_weights()`."""
    return f"a gradient of {name!r} arrived inside base_weights(), where W0 is not trained"


class GradientCollector:
    """Accumulates the active elements of every gradient between two steps.

    With `compact` it registers hooks on the parameters, and gives the layers of tiled parameters their own backward
    pass; otherwise gradients stay in `.grad`. Hooks hold weak references to the collector.

    Backward passes in several threads, or on several devices, may deliver gradients concurrently. One lock makes two
    sequences atomic: to test whether a gradient is accepted, drop the gradients that a step has used, and add it; and
    to change a condition of that test and notify the native objects. The lock is taken before a native object's mutex,
    never while one is held, and waiting for either of them releases the interpreter's lock.
    """

    def __init__(self, optimizer: weakref.ref[torch.optim.Optimizer], *, compact: bool, amp_scaling: bool) -> None:
        self.compact, self.amp_scaling = compact, amp_scaling
        self._lock = threading.RLock()  # reentrant: a signal handler or a finalizer may run while it is held
        self.buckets: list[Bucket] = []
        self.scaler_proxies: dict[torch.device, ScalerProxy] = {}
        self.stepped = False  # a step has used the gradients in the buckets
        self._optimizer = optimizer
        self._clip_coef: Tensor | None = None
        self._inside_base = False
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        self._hooked: set[int] = set()  # ids: a tensor's own hash is Python code
        self._routed: list[tuple[nn.Module, Route]] = []
        # A layer with a replaced forward refers to itself; without this only the garbage collector would free it.
        weakref.finalize(self, tile_linears.restore, self._routed).atexit = False

    @property
    def clip_coef(self) -> Tensor | None:
        """The factor that the next step applies to the gradients; once it is set, further gradients are refused."""
        return self._clip_coef

    @clip_coef.setter
    def clip_coef(self, clip_coef: Tensor | None) -> None:
        with self._lock:
            self._clip_coef = clip_coef
            self._notify_native()

    @property
    def inside_base(self) -> bool:
        """Whether the model holds its base weights, which are not trained."""
        return self._inside_base

    def enter_base(self) -> None:
        """Refuse every gradient until `leave_base`. Raises a RuntimeError if the base weights are already in use."""
        with self._lock:
            if self._inside_base:
                raise RuntimeError("base_weights: the model holds its base weights; leave base_weights() first")
            self._inside_base = True
            self._notify_native()

    def leave_base(self) -> None:
        with self._lock:
            self._inside_base = False
            self._notify_native()

    def has_hook_on(self, param: Tensor) -> bool:
        """Whether autograd calls `receive` with gradients of the parameter."""
        return id(param) in self._hooked

    # Hooks

    def adopt(self, buckets: list[Bucket], model: nn.Module | None) -> None:
        """Collect the gradients of `buckets` from now on. Gradients of the previous buckets must be dropped first."""
        self.detach()
        self.buckets = buckets
        if self.compact and self.amp_scaling:
            self.scaler_proxies = {b.device: ScalerProxy(b.device) for b in buckets}
        self.attach(model)

    def attach(self, model: nn.Module | None) -> None:
        """Register the hooks, with `compact`."""
        if not self.compact:
            return
        with self._lock:
            for bucket in self.buckets:
                if bucket.native is not None:
                    bucket.native.receive_into(bucket.grad, bucket.sum_sq)
                for i, param in enumerate(bucket.params):
                    hook = self._hook(weakref.ref(bucket), i)
                    self._handles.append(param.register_post_accumulate_grad_hook(hook))
                    self._hooked.add(id(param))
                    if bucket.native is not None:  # replaces `hook` whenever that would only gather
                        bucket.native.hook(i, param._post_accumulate_grad_hooks)
                if bucket.tiles is not None and model is not None:
                    if bucket.native is not None:
                        bucket.native.take_tiles_with(self._tiles_hook(weakref.ref(bucket)))
                    self._routed += tile_linears.install(bucket, model, self)
            self._notify_native()

    def detach(self) -> None:
        """Remove the hooks, and restore every layer's own forward."""
        with self._lock:
            for handle in self._handles:
                handle.remove()
            tile_linears.restore(self._routed)
            self._handles = []
            self._hooked = set()
            self._notify_native()

    def _hook(self, bucket: weakref.ref[Bucket], i: int) -> Callable[[Tensor], None]:
        collector = weakref.ref(self)

        def gather(param: Tensor) -> None:
            owner, target = collector(), bucket()
            if owner is not None and target is not None:
                owner.receive(target, i, param)

        return gather

    def _tiles_hook(self, bucket: weakref.ref[Bucket]) -> Callable[[int, Tensor, Tensor], bool]:
        """Return the function that a native object calls with operands of tiles that it does not handle itself."""
        collector = weakref.ref(self)

        def take(i: int, left: Tensor, right: Tensor) -> bool:
            owner, target = collector(), bucket()
            return owner is not None and target is not None and owner.receive_tiles(target, i, left, right)

        return take

    def _notify_native(self) -> None:
        """Enable the native hooks exactly while `receive` would only gather.

        Call it with the lock held after each change of that condition, so that the last notification is the current
        state.
        """
        refusing = self._inside_base or self.stepped or self.scaler_proxies or self._clip_coef is not None
        plain = bool(self._handles) and not refusing
        for bucket in self.buckets:
            if bucket.native is not None:
                bucket.native.set_receiving(plain)

    # Arrivals

    def receive(self, bucket: Bucket, i: int, param: Tensor) -> None:
        """Gather the active elements of `param.grad` and free it."""
        grad, param.grad = param.grad, None  # also if it is refused: later gradients must not be added to it
        with self._lock:
            if grad is None and bucket.came_by_tiles(i) and not self._inside_base:  # tiles are refused inside
                return
            self._refuse(bucket, i)
            if grad is None:
                raise RuntimeError(
                    f"the gradient of {bucket.names[i]!r} is gone: another hook, or a second sparse optimizer, took it"
                )
            if grad.layout != torch.strided:
                raise RuntimeError(f"the gradient of {bucket.names[i]!r} is {grad.layout}, expected a strided tensor")
            gradients.gather_(bucket, i, grad.detach(), self._begin(bucket))

    def receive_tiles(self, bucket: Bucket, i: int, left: Tensor, right: Tensor) -> bool:
        """Add the active tiles of left^T @ right, the gradient of parameter i.

        Returns False, and adds nothing, if this collector does not collect the bucket's gradients.
        """
        with self._lock:
            if not self._takes_tiles(bucket):
                return False
            self._refuse(bucket, i)
            gradients.tiles_(bucket, i, left.detach(), right.detach(), self._begin(bucket))
        return True

    def receive_tile_rows(self, bucket: Bucket, i: int, parts: Iterable[tuple[int, Tensor]], right: Tensor) -> bool:
        """`receive_tiles` with the left operand in parts. If the result is False, no part has been computed."""
        with self._lock:
            if not self._takes_tiles(bucket):
                return False
            self._refuse(bucket, i)
        values = gradients.tile_rows(bucket, i, parts, right.detach())  # unlocked: the caller's code computes parts
        with self._lock:
            self._refuse(bucket, i)
            found_inf = self._begin(bucket)
            bucket.add_values_(i, values, found_inf)
        return True

    def _takes_tiles(self, bucket: Bucket) -> bool:
        return bool(self._handles) and any(b is bucket for b in self.buckets)

    def _refuse(self, bucket: Bucket, i: int) -> None:
        if self._inside_base:
            raise RuntimeError(arrived_inside(bucket.names[i]))
        if self._clip_coef is not None:
            raise RuntimeError(
                f"a gradient of {bucket.names[i]!r} arrived after clip_grad_norm_(); step() or zero_grad() comes first"
            )

    def _begin(self, bucket: Bucket) -> Tensor | None:
        """Prepare for an accepted gradient; return the element to set to inf if it is not finite, or None.

        Call it with the lock held, and hold the lock until the gradient has been added.
        """
        if self.stepped:
            self.forget()
        scaler_proxy = self.scaler_proxies.get(bucket.device) if self.scaler_proxies else None
        if scaler_proxy is None:
            return None
        scaler_proxy.show(self._first_group())
        return scaler_proxy.factor

    # From step to step

    def forget(self) -> None:
        """Drop the gradients. Nothing is written; the next gradients overwrite the compact buffer."""
        with self._lock:
            for bucket in self.buckets:
                bucket.drop_gradients()
            self._hide_proxies()
            self._clip_coef = None
            self.stepped = False  # last: after an interruption, the next gradient repeats all of this
            self._notify_native()

    def mark_stepped(self) -> None:
        """Record that a step has used the gradients; they stay in the buffers until the next ones arrive."""
        with self._lock:
            self.stepped = True
            self._clip_coef = None
            self._hide_proxies()
            self._notify_native()

    def received(self, bucket: Bucket) -> list[bool]:
        """Return, for each parameter of the bucket, whether it has a compact gradient that no step has used."""
        return [False] * len(bucket.params) if self.compact and self.stepped else bucket.received

    def waits(self) -> bool:
        """Whether there is a gradient that no step has used."""
        return not self.stepped and any(any(bucket.received) for bucket in self.buckets)

    def shown_proxies(self) -> int:
        return sum(scaler_proxy.shown for scaler_proxy in self.scaler_proxies.values())

    def unscaled(self, norm: Tensor) -> Tensor:
        """Return the norm of the compact gradients, multiplied by the factor of a scaler's `unscale_`, if any."""
        for scaler_proxy in self.scaler_proxies.values():
            if scaler_proxy.shown:  # the scaler leaves the same factor in each
                return norm * scaler_proxy.factor.to(norm.device).squeeze()
        return norm

    def _hide_proxies(self) -> None:
        for scaler_proxy in self.scaler_proxies.values():
            scaler_proxy.hide(self._first_group())

    def _first_group(self) -> dict[str, Any]:
        optimizer = self._optimizer()
        assert optimizer is not None
        group: dict[str, Any] = optimizer.param_groups[0]
        return group
