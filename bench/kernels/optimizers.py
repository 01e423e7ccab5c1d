"""The timed optimizers, which keep their gradients so that they can step repeatedly, and checks of their results."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from sparse_opt import MaskSet, SparseAdamW
from sparse_opt.ops import STEP_OPS
from sparse_opt.tensors import as_bits

from . import bounds
from .cases import SUM_RTOL, Active, WrongResult, check_bits, segments, step_case_of

Named = dict[str, nn.Parameter]
Gradients = Literal["dense", "compact"]

ADAMW = "indexed_adamw_"  # the op of SparseAdamW
# The same for all optimizers, and large enough that every active bf16 weight changes in a step.
LR, WEIGHT_DECAY = 1e-3, 0.1
# A learning rate as in reinforcement learning, where few weights change in a step.
SMALL_LR = 1e-6


def parameters(weights: Mapping[str, Tensor]) -> Named:
    """Parameters that share the weights' storage."""
    return {name: nn.Parameter(weight) for name, weight in weights.items()}


def torch_adamw(params: Named, grads: Mapping[str, Tensor]) -> torch.optim.AdamW:
    """torch's fused AdamW; its states have the parameters' dtype."""
    for name, param in params.items():
        param.grad = grads[name]
    return torch.optim.AdamW(params.values(), lr=LR, weight_decay=WEIGHT_DECAY, fused=True)


def sparse_adamw(
    params: Named,
    grads: Mapping[str, Tensor],
    mask: MaskSet,
    gradients: Gradients,
    backend: str | None = None,
    *,
    lr: float = LR,
    **options: Any,
) -> SparseAdamW:
    """SparseAdamW over the mask, with compact fp32 gradients and moments."""
    options |= {"weight_decay": WEIGHT_DECAY, "grads": gradients, "backend": backend}
    optimizer = SparseAdamW(params.items(), mask, lr=lr, **options)
    trained = {name: param for name, param in params.items() if param.requires_grad}
    if gradients == "dense":
        for name, param in trained.items():
            param.grad = grads[name]
    else:
        torch.autograd.backward(list(trained.values()), [grads[name] for name in trained])
    return optimizer


def step_again(optimizer: SparseAdamW) -> None:
    """Step with the gradients of the last step; normally a step consumes its compact gradients."""
    optimizer.collector.stepped = False  # they stay in the buffers until the next ones arrive
    optimizer.step()


def mask_of(names: Mapping[str, Tensor], active: Active) -> MaskSet:
    """The mask of the named tensors' active elements."""
    indices = active.indices.cpu()
    segments = zip(names, active.starts, active.ends, strict=True)
    shapes = {name: tuple(tensor.shape) for name, tensor in names.items()}
    return MaskSet({name: indices[start:end] for name, start, end in segments}, shapes)


def active_of(mask: MaskSet, device: torch.device) -> Active:
    """The active elements of a mask's tensors, in the order of the mask, on the device."""
    parts = [mask[name] for name in mask.names]
    return Active(torch.cat(parts).to(device), *segments(map(len, parts)))


def check_first_step(optimizer: SparseAdamW, params: Named, grads: Mapping[str, Tensor], active: Active) -> None:
    """Make the optimizer's first step and compare weights and moments bit by bit with those of the reference op.

    Raises:
        WrongResult: a bit differs.
    """
    states = {name: torch.zeros(active.nnz, device=active.indices.device) for name in STEP_OPS[ADAMW].states}
    oracle = step_case_of(
        ADAMW,
        [param.detach().clone() for param in params.values()],
        active,
        states,
        lr=float(optimizer.param_groups[0]["lr"]),
        step=1,
        dense_grads=list(grads.values()),
        weight_decay=WEIGHT_DECAY,
    )
    oracle.run("reference")
    optimizer.step()
    for i, (name, param) in enumerate(params.items()):
        check_bits(f"the first step: {name}", param.detach(), oracle.arguments["params"][i])
        where = slice(active.starts[i], active.ends[i])
        if where.stop > where.start:
            for state, expected in states.items():
                check_bits(f"the first step: {state} of {name}", optimizer.state[param][state], expected[where])


def changed_share(optimizer: SparseAdamW, params: Named, nnz: int) -> float:
    """Make a step and return the share of the ``nnz`` active weights whose bits it changed."""
    before = [as_bits(param.detach()).clone() for param in params.values()]
    step_again(optimizer)
    return _differing(params, before) / nnz


def _differing(params: Named, bits: list[Tensor]) -> int:
    counts = [(as_bits(p.detach()) != other).sum() for p, other in zip(params.values(), bits, strict=True)]
    return int(torch.stack(counts).sum())


def check_norm(optimizer: SparseAdamW, grads: Mapping[str, Tensor], active: Active) -> None:
    """Compare the norm computed for clipping with an fp64 sum.

    Raises:
        WrongResult: they differ by more than rounding.
    """
    total = torch.zeros((), dtype=torch.float64, device=active.indices.device)
    for grad, start, end in zip(grads.values(), active.starts, active.ends, strict=True):
        total += grad.view(-1)[active.indices[start:end].long()].double().square().sum()
    found, expected = optimizer.clip_grad_norm_(max_norm=float("inf")).item(), total.sqrt().item()
    if not abs(found - expected) <= SUM_RTOL * expected:
        raise WrongResult(f"the norm of the active gradients is {found!r}, expected {expected!r}")


def check_base_weights(optimizer: SparseAdamW, params: Named) -> None:
    """Make a step, then compare the model inside and outside `base_weights()` bit by bit.

    Raises:
        WrongResult: a bit differs, or the step changed nothing.
    """
    base = {name: param.detach().clone() for name, param in params.items()}
    optimizer.step()
    trained = {name: param.detach().clone() for name, param in params.items()}
    if all(torch.equal(base[name], trained[name]) for name in base):
        raise WrongResult("base_weights: a step changed no weight, so the two states cannot be distinguished")
    with optimizer.base_weights():
        for name, param in params.items():
            check_bits(f"base_weights: {name} inside", param.detach(), base[name])
    for name, param in params.items():
        check_bits(f"base_weights: {name} outside again", param.detach(), trained[name])


def swapped_share(optimizer: SparseAdamW, params: Named, nnz: int) -> float:
    """The share of the ``nnz`` active weights whose bits differ inside and outside `base_weights()`."""
    outside = [as_bits(param.detach()).clone() for param in params.values()]
    with optimizer.base_weights():
        return _differing(params, outside) / nnz


def index_itemsize(optimizer: SparseAdamW) -> int:
    """Bytes per index that the optimizer stores: for element masks per element, for patterns per unit (4)."""
    mask = optimizer.mask
    return round(optimizer.nbytes()["indices"] / mask.nnz) if mask.pattern == "element" else 4


def step_traffic(
    optimizer: SparseAdamW, *, param_itemsize: int, dense_grads: bool, changed: float = 1.0
) -> bounds.Traffic:
    """The minimum memory traffic of a step, whose compact gradients are fp32."""
    return bounds.step_traffic(
        optimizer.mask.numel,
        optimizer.mask.nnz,
        states=len(STEP_OPS[ADAMW].states),
        param_itemsize=param_itemsize,
        grad_itemsize=param_itemsize if dense_grads else 4,
        dense_grads=dense_grads,
        reads_params=not optimizer.compact_weights,
        weights_itemsize=param_itemsize if optimizer.compact_weights else 0,
        index_itemsize=index_itemsize(optimizer),
        pattern=optimizer.mask.pattern,
        changed=changed,
    )
