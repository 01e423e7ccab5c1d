"""The output layer: whether a model's logits are exactly its product, and the gradient of its weight.

The former is tested in a forward pass, in which the output layer returns a placeholder for the logits. The latter is
computed at the end of the backward pass.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from sparse_opt.optim.gradients.tile_backward import Route, has_plain_forward, install, route_of

from ..models import skip_padding_masks

logger = logging.getLogger(__name__)

# Models that modify the product of their output layer, with their `_state` when this was detected.
_REFUSED: weakref.WeakKeyDictionary[nn.Module, tuple[Any, ...]] = weakref.WeakKeyDictionary()
_replace_lock = threading.Lock()  # held while a layer's forward is read and replaced


def plain_head(model: nn.Module) -> nn.Linear | None:
    """The model's output layer if it is a plain matrix product that can be computed outside the model; else None.

    It is not if it has a bias, hooks or an adapter, if it is quantised or sharded, under autocast, or if the model is
    compiled.
    """
    find = getattr(model, "get_output_embeddings", None)
    compiled = hasattr(model, "_orig_mod") or getattr(model, "_compiled_call_impl", None) is not None
    if find is None or compiled or torch.is_inference_mode_enabled():
        return None
    head = find()
    if type(head) is not nn.Linear or head.bias is not None or type(head.weight) is not nn.Parameter:
        return None
    hooks = (head._forward_hooks, head._forward_pre_hooks, head._backward_hooks, head._backward_pre_hooks)
    if any(hooks) or not has_plain_forward(head) or torch.is_autocast_enabled(head.weight.device.type):
        return None
    if model in _REFUSED and _REFUSED[model] == _state(model, head):
        return None
    return head


def hidden_states(model: nn.Module, head: nn.Linear, inputs: dict[str, Any]) -> Tensor | None:
    """The input of the model's output layer, [B, P, H]; None if the logits are not exactly the product of that layer.

    The layer returns a placeholder for the logits. If the model returns this very tensor and computes nothing with it,
    the model does not modify the logits: no soft-capping, no scale, no cast. If a model modifies them, the first
    call runs the forward pass twice; the result is cached until the model's hooks change.
    """
    logits, why = None, "its logits are not its output layer's product"
    with _recording_inputs(head) as seen:
        if seen is None:
            return None
        try:
            with skip_padding_masks():
                logits = model(**inputs).logits
        except _LogitsAreUsedError as error:
            why = str(error)
    if len(seen) == 1:
        ((hidden, placeholder),) = seen
        if logits is placeholder and hidden.dtype == head.weight.dtype:
            return hidden
    if model not in _REFUSED:
        logger.warning(
            "%s: %s, so log-probabilities are taken from all logits at once, which needs more memory",
            type(model).__name__,
            why,
        )
    _REFUSED[model] = _state(model, head)
    return None


def _state(model: nn.Module, head: nn.Linear) -> tuple[Any, ...]:
    """The state that decides whether a model modifies its logits: its hooks, by their unique ids."""
    hooks = (hook for module in model.modules() for hook in (*module._forward_pre_hooks, *module._forward_hooks))
    return head.weight.dtype, *hooks


@contextmanager
def _recording_inputs(head: nn.Linear) -> Iterator[list[tuple[Tensor, Tensor]] | None]:
    """A context in which the layer, in this thread, records its inputs and returns placeholders for its outputs.

    Calls of other threads reach the layer itself. Yields None if another thread has already replaced the layer.
    """
    seen: list[tuple[Tensor, Tensor]] = []
    owner = threading.get_ident()

    def forward(input: Tensor) -> Tensor:
        if threading.get_ident() != owner:
            output: Tensor = type(head).forward(head, input) if own is None else own(input)
            return output
        placeholder = _LogitsPlaceholder.of_product(input, head.weight)
        seen.append((input, placeholder))
        return placeholder

    with _replace_lock:
        own = vars(head).get("forward")
        if has_plain_forward(head):
            head.forward = forward  # type: ignore[method-assign]
    if vars(head).get("forward") is not forward:
        yield None
        return
    try:
        yield seen
    finally:
        with _replace_lock:
            if vars(head).get("forward") is forward:
                del head.forward
                if (route := route_of(head)) is not None:  # as it is now: an optimizer may have been closed meanwhile
                    install(head, route)


class _LogitsAreUsedError(Exception):
    """A model uses the values of its logits, which were not computed."""


# Attributes that a placeholder supports: shape, dtype and device only.
_KNOWN = frozenset(
    [getattr(Tensor, name).__get__ for name in ("shape", "ndim", "dtype", "device", "layout", "requires_grad")]
    + [getattr(Tensor, name).__get__ for name in ("is_cuda", "is_cpu", "is_meta", "is_sparse", "is_nested", "itemsize")]
    + [Tensor.size, Tensor.dim, Tensor.ndimension, Tensor.numel, Tensor.nelement, Tensor.stride, Tensor.__len__]
    + [Tensor.element_size, Tensor.get_device, Tensor.is_contiguous, Tensor.is_floating_point, Tensor.is_complex]
    + [torch.numel, torch.is_floating_point, torch.is_complex]
)


class _LogitsPlaceholder(Tensor):
    """A tensor without elements: its shape, dtype and device can be read, everything else raises."""

    @classmethod
    def of_product(cls, input: Tensor, weight: Tensor) -> Tensor:
        """A placeholder for input @ weight.T: [..., V] for [..., H] and [V, H]."""
        placeholder: Tensor = cls._make_wrapper_subclass(
            cls,
            (*input.shape[:-1], len(weight)),
            dtype=input.dtype,
            device=input.device,
            requires_grad=torch.is_grad_enabled() and (input.requires_grad or weight.requires_grad),
        )
        return placeholder

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _KNOWN:
            return super().__torch_function__(func, types, args, kwargs)
        raise _used_by(func)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise _used_by(func)  # reached if a call bypasses the Python functions


def _used_by(func: Any) -> _LogitsAreUsedError:
    name = getattr(func, "__name__", str(func))
    if name == "__get__":  # an attribute's
        name = getattr(func.__self__, "__name__", name)
    return _LogitsAreUsedError(f"the model uses its logits itself ({name})")


# The weight's gradient


class WeightGrad:
    """Computes the output layer's weight gradient at the end of the backward pass.

    Autograd runs the most recently created of the ready nodes. The node created here, before the model's forward pass,
    is older than all nodes of the model, so it runs when they have finished and their activations are freed: the
    gradient, 0.73 GiB for 128k words of 3072, is never held together with them. With tied embeddings it is added there
    to that of the embedding, and the parameter receives the sum once. If an optimizer uses only the weight's active
    tiles, only these are computed, one slice of words at a time.
    """

    def __init__(self, weight: Tensor, route: Route | None):
        self.route = route
        # Set by the backward pass of the log-probabilities: slices of words, a function that computes [N, words] of a
        # slice, and an [N, H]. The product of the former, transposed, and the latter is the gradient of these words.
        self.work: tuple[list[slice], Callable[[slice], Tensor], Tensor] | None = None
        self.token: Tensor = _WeightGradNode.apply(weight, self)

    @classmethod
    def of(cls, weight: Tensor, route: Route | None) -> WeightGrad | None:
        """The weight's gradient computation; None if no gradient is needed."""
        return cls(weight, route) if weight.requires_grad and torch.is_grad_enabled() else None


class _WeightGradNode(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, owner: WeightGrad) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.owner = weakref.ref(owner)  # a weak reference, because owner.token refers back to this node
        return weight.new_zeros(())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_token: Tensor) -> tuple[Tensor | None, None]:
        (weight,) = ctx.saved_tensors
        owner = ctx.owner()
        (slices, first, second), owner.work = owner.work, None
        if len(slices) == 1:  # without fp32 sums of all active elements between the product and the compact gradient
            left = first(slices[0])
            if owner.route is not None and owner.route.add_whole_product(left, second):
                return None, None
            return torch.mm(left.T, second), None
        parts = ((words.start, first(words)) for words in slices)
        if owner.route is not None and owner.route.add_product_rows(parts, second):
            return None, None
        grad_weight = torch.empty_like(weight)
        for words in slices:
            torch.mm(first(words).T, second, out=grad_weight[words])
        return grad_weight, None
