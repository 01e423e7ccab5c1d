"""GradientCollector: decides which gradients are accepted, and when those of the previous step are dropped."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils.hooks import RemovableHandle

from ...ops.checks import FLOAT_DTYPES
from .gradient_buffer import GradientBuffer, Product
from .reduction import GradientReducer


def inside_base_error(name: str) -> str:
    """Return the error message for a gradient that is refused inside `base_weights()`."""
    return f"a gradient of {name!r} arrived inside base_weights(), where W0 is not trained"


class GradientCollector:
    """Collects the gradients of an optimizer's buffers between two steps.

    With `compact` it registers hooks on the parameters, which pass each gradient to its buffer; otherwise gradients
    stay in `.grad`. While a gradient only has to be added, buffers may receive it directly, without the hook.

    Several threads may deliver gradients concurrently. One lock makes two sequences atomic: to test whether a gradient
    is accepted, drop the gradients that a step has used, and add it; and to change a condition of that test and notify
    the buffers. It is taken before a buffer's own, never while one is held.
    """

    def __init__(self, optimizer: weakref.ref[torch.optim.Optimizer], *, compact: bool, amp_scaling: bool) -> None:
        self.compact, self.amp_scaling = compact, amp_scaling
        self.lock = threading.RLock()  # reentrant: a signal handler or a finalizer may run while it is held
        self.receivers: list[Receiver] = []
        self.scaler_proxies: dict[torch.device, ScalerProxy] = {}
        self.stepped = False  # a step has used the gradients in the buffers
        self.reducer: GradientReducer | None = None
        self._optimizer = optimizer
        self._clip_coef: Tensor | None = None
        self._inside_base = False
        self._handles: list[RemovableHandle] = []
        self._hooked: set[int] = set()  # ids: a tensor's own hash is Python code

    @property
    def clip_coef(self) -> Tensor | None:
        """The factor that the next step applies to the gradients; once it is set, further gradients are refused."""
        return self._clip_coef

    @clip_coef.setter
    def clip_coef(self, clip_coef: Tensor | None) -> None:
        with self.lock:
            self._clip_coef = clip_coef
            self._notify_buffers()

    @property
    def inside_base(self) -> bool:
        """Whether the model holds its base weights, which are not trained."""
        return self._inside_base

    @property
    def is_attached(self) -> bool:
        """Whether the hooks are in the model."""
        return bool(self._handles)

    def enter_base(self) -> None:
        """Refuse every gradient until `leave_base`. Raises a RuntimeError if the base weights are already in use."""
        with self.lock:
            if self._inside_base:
                raise RuntimeError("base_weights: the model holds its base weights; leave base_weights() first")
            self._inside_base = True
            self._notify_buffers()

    def leave_base(self) -> None:
        with self.lock:
            self._inside_base = False
            self._notify_buffers()

    def has_hook_on(self, param: Tensor) -> bool:
        """Whether autograd calls a hook of this collector with gradients of the parameter."""
        return id(param) in self._hooked

    # Hooks

    def adopt(self, buffers: list[GradientBuffer], reducer: GradientReducer | None) -> None:
        """Collect into `buffers` after the next `attach`. Gradients of the previous buffers must be dropped first.

        Args:
            reducer: averages the gradients over the ranks; None: they are this process's own.
        """
        self.detach()
        self.reducer = reducer
        self.receivers = [Receiver(self, buffer) for buffer in buffers]
        if self.compact and self.amp_scaling:
            self.scaler_proxies = {buffer.device: ScalerProxy(buffer.device) for buffer in buffers}
            for buffer in buffers:
                buffer.set_found_inf(self.scaler_proxies[buffer.device].factor)

    def attach(self) -> None:
        """Register the hooks, with `compact`."""
        if not self.compact:
            return
        with self.lock:
            for receiver in self.receivers:
                for i, param in enumerate(receiver.buffer.params):
                    self._handles.append(receiver.buffer.register_hook(i, receiver.hook(i)))
                    self._hooked.add(id(param))
            if self.reducer is not None:
                self.reducer.attach()
            self._notify_buffers()

    def detach(self) -> None:
        """Remove the hooks, and accept no gradients."""
        with self.lock:
            for handle in self._handles:
                handle.remove()
            if self.reducer is not None:
                self.reducer.detach()
            self._handles = []
            self._hooked = set()
            self._notify_buffers()

    def _notify_buffers(self) -> None:
        """Let buffers receive gradients directly only while a receiver would do nothing but add them.

        Call it with the lock held after each change of that condition.
        """
        refusing = self._inside_base or self.stepped or self._clip_coef is not None
        if self.reducer is not None and self.reducer.reduced:
            refusing = True
        for receiver in self.receivers:
            proxy = self.scaler_proxies.get(receiver.buffer.device)
            shown = proxy is None or proxy.shown  # the first gradient of a step shows the proxy to the scaler
            receiver.buffer.set_direct(bool(self._handles) and not refusing and shown)

    # Acceptance of a gradient: call these methods with the lock held

    def collects(self, receiver: Receiver) -> bool:
        """Whether gradients are collected for the receiver, which may be of an earlier mask."""
        return bool(self._handles) and receiver in self.receivers

    def require_accepting(self, name: str) -> None:
        """Raise an error if a gradient of the parameter must not arrive now."""
        if self._inside_base:
            raise RuntimeError(inside_base_error(name))
        if self._clip_coef is not None:
            raise RuntimeError(
                f"a gradient of {name!r} arrived after clip_grad_norm_(); call step() or zero_grad() first"
            )

    def begin(self, buffer: GradientBuffer) -> None:
        """Prepare for an accepted gradient. Hold the lock until it has been added."""
        if self.stepped:
            self.forget()
        if self.reducer is not None and self.reducer.reduced:
            self.reducer.reopen()
            self._notify_buffers()
        proxy = self.scaler_proxies.get(buffer.device)
        if proxy is not None and not proxy.shown:
            proxy.show(self._first_group())
            self._notify_buffers()

    # From step to step

    def forget(self) -> None:
        """Drop the gradients. Nothing is written; the next gradients overwrite the compact ones."""
        with self.lock:
            if self.reducer is not None:
                self.reducer.reopen()
            for receiver in self.receivers:
                receiver.buffer.drop()
            self._hide_proxies()
            self._clip_coef = None
            self.stepped = False  # last: after an interruption, the next gradient repeats all of this
            self._notify_buffers()

    def reduce(self) -> None:
        """Make the mean of the ranks' gradients available on the current stream, if there is a process group.

        Raises:
            RuntimeError: a backward pass or a collective failed; or a GradScaler has checked this rank's gradients
                only, because every backward pass was inside `no_sync`.
        """
        if self.reducer is None:
            return
        with self.lock:
            if self.stepped:  # this rank has had no backward pass since the last step
                self.forget()
            if self.scaler_proxies and not self.reducer.reduced:
                raise RuntimeError("with a GradScaler, the last backward pass of a step must be outside no_sync()")
            self.reducer.finish()
            self._notify_buffers()

    def wait_for_reduction(self) -> None:
        """Make the current stream wait for the reductions in flight."""
        if self.reducer is not None:
            with self.lock:
                self.reducer.wait()

    def before_reduction(self) -> None:
        """Drop the gradients of the previous step in a pass that has brought none. Called with the lock held."""
        if self.stepped:
            self.forget()

    def after_reduction(self) -> None:
        """Show a GradScaler the means, and let the next gradient wait for them. Called with the lock held."""
        assert self.reducer is not None
        for receiver in self.receivers if self.scaler_proxies else ():
            scaler_proxy = self.scaler_proxies[receiver.buffer.device]
            scaler_proxy.show(self._first_group())
            self.reducer.mark_nonfinite_(receiver.buffer, scaler_proxy.factor)
        self._notify_buffers()

    def mark_stepped(self) -> None:
        """Record that a step has used the gradients; they stay in the buffers until the next ones arrive."""
        with self.lock:
            self.stepped = True
            if self.reducer is not None:
                self.reducer.reduced = False
            self._clip_coef = None
            self._hide_proxies()
            self._notify_buffers()

    def received(self, buffer: GradientBuffer) -> list[bool]:
        """Return, for each parameter of the buffer, whether it has a compact gradient that no step has used."""
        return [False] * len(buffer.params) if self.compact and self.stepped else buffer.received

    def unused_memory(self, buffer: GradientBuffer) -> Tensor:
        """Return the buffer's values, to be overwritten until the next gradient; [0] if a gradient waits for a step."""
        with self.lock:
            return buffer.values[:0] if any(self.received(buffer)) else buffer.values

    def has_unused(self) -> bool:
        """Whether there is a gradient that no step has used."""
        return not self.stepped and any(any(receiver.buffer.received) for receiver in self.receivers)

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


class Receiver:
    """Receives the gradients of one buffer's parameters for the collector, from hooks and from routes of tiled layers.

    The collector owns it; hooks and routes have weak references to it.
    """

    def __init__(self, collector: GradientCollector, buffer: GradientBuffer) -> None:
        self._collector, self.buffer = weakref.ref(collector), buffer

    def hook(self, i: int) -> Callable[[Tensor], None]:
        """Return the post-accumulate-grad hook of parameter i."""
        this = weakref.ref(self)

        def gather(param: Tensor) -> None:
            receiver = this()
            if receiver is not None:
                receiver.receive(i, param)

        return gather

    def receive(self, i: int, param: Tensor) -> None:
        """Gather the active elements of `param.grad` and free it."""
        collector, buffer, name = self._collector(), self.buffer, self.buffer.names[i]
        if collector is None:
            return
        grad, param.grad = param.grad, None  # also if it is refused: later gradients must not be added to it
        with collector.lock:
            if grad is None and buffer.received_tiles(i) and not collector.inside_base:  # tiles are refused inside
                return
            collector.require_accepting(name)
            if grad is None and not param.requires_grad:
                if buffer.tiles is not None and buffer.tiles.has(i):
                    return  # as in torch
                raise RuntimeError(
                    f"{name!r} was frozen (requires_grad=False) between its forward and its backward pass; freeze it "
                    "before the forward pass"
                )
            if grad is None:
                raise RuntimeError(
                    f"the gradient of {name!r} is gone: another hook, or a second sparse optimizer, took it"
                )
            if grad.layout != torch.strided:
                raise RuntimeError(f"the gradient of {name!r} is {grad.layout}, expected a strided tensor")
            if grad.dtype not in FLOAT_DTYPES:
                raise ValueError(f"the gradient of {name!r} is {grad.dtype}, expected bfloat16, float16 or float32")
            buffer.require_numel(i, grad.numel())
            collector.begin(buffer)
            buffer.add_dense(i, grad.detach())

    def receive_tiles(self, products: Sequence[Product]) -> bool:
        """Add the active tiles of each product to the gradient of its parameter; False if none is collected now."""
        collector, buffer = self._collector(), self.buffer
        if collector is None:
            return False
        with collector.lock:
            if not collector.collects(self):
                return False
            for product in products:
                collector.require_accepting(buffer.names[product.i])
                experts = 1 if product.token_offsets is None else len(product.token_offsets)
                buffer.require_numel(product.i, experts * product.left.shape[-1] * product.right.shape[-1])
            collector.begin(buffer)
            buffer.add_tiles([p._replace(left=p.left.detach(), right=p.right.detach()) for p in products])
        return True

    def receive_values(self, i: int, compute: Callable[[], Tensor]) -> bool:
        """Add the result of `compute`, the active elements of the gradient of parameter i: fp32 [its slots].

        False, without calling it, if no gradient is collected now.
        """
        collector, buffer = self._collector(), self.buffer
        if collector is None:
            return False
        with collector.lock:
            if not collector.collects(self):
                return False
            collector.require_accepting(buffer.names[i])
        values = compute()  # unlocked: it may be any code
        with collector.lock:
            collector.require_accepting(buffer.names[i])
            collector.begin(buffer)
            buffer.add_values(i, values)
        return True


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
