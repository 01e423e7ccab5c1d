"""The optimizers that are timed, each holding its gradients so that it can step again and again, and their checks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor, nn

from sparse_opt import MaskSet, SparseAdamW

from .cases import SUM_RTOL, Active, AdamWCase, WrongResult, check_bits

Named = dict[str, nn.Parameter]
Gradients = Literal["dense", "compact"]

# The same for all, and large enough that a step shows in bf16 weights.
LR, WEIGHT_DECAY = 1e-3, 0.1


def parameters(weights: Mapping[str, Tensor]) -> Named:
    """Parameters that share the weights' storage."""
    return {name: nn.Parameter(weight) for name, weight in weights.items()}


def torch_adamw(params: Named, grads: Mapping[str, Tensor]) -> torch.optim.AdamW:
    """torch's fused AdamW; its states have the parameters' dtype."""
    for name, param in params.items():
        param.grad = grads[name]
    return torch.optim.AdamW(params.values(), lr=LR, weight_decay=WEIGHT_DECAY, fused=True)


def sparse_adamw(
    params: Named, grads: Mapping[str, Tensor], mask: MaskSet, gradients: Gradients, backend: str | None = None
) -> SparseAdamW:
    """SparseAdamW over the mask, with fp32 moments and gradients."""
    optimizer = SparseAdamW(
        params.items(),
        mask,
        lr=LR,
        weight_decay=WEIGHT_DECAY,
        grads=gradients,
        keep_base_weights=False,
        backend=backend,
    )
    trained = {name: param for name, param in params.items() if param.requires_grad}
    if gradients == "dense":
        for name, param in trained.items():
            param.grad = grads[name]
    else:
        torch.autograd.backward(list(trained.values()), [grads[name] for name in trained])
    return optimizer


def mask_of(names: Mapping[str, Tensor], active: Active) -> MaskSet:
    """The mask of the named tensors' active elements."""
    indices = active.indices.cpu()
    segments = zip(names, active.starts, active.ends, strict=True)
    shapes = {name: tuple(tensor.shape) for name, tensor in names.items()}
    return MaskSet({name: indices[start:end] for name, start, end in segments}, shapes)


def check_first_step(optimizer: SparseAdamW, params: Named, grads: Mapping[str, Tensor], active: Active) -> None:
    """Take the optimizer's first step and compare weights and moments, bit by bit, with the reference op's.

    Raises:
        WrongResult: a bit differs.
    """
    device = active.indices.device
    oracle = AdamWCase(
        params=[param.detach().clone() for param in params.values()],
        active=active,
        lr=torch.tensor([LR], device=device),
        steps=torch.ones(len(params), device=device),
        dense_grads=list(grads.values()),
        options={"weight_decay": WEIGHT_DECAY},
        exp_avg=torch.zeros(active.nnz, device=device),
        exp_avg_sq=torch.zeros(active.nnz, device=device),
    )
    oracle.run("reference")
    optimizer.step()
    for i, (name, param) in enumerate(params.items()):
        check_bits(f"the first step: {name}", param.detach(), oracle.params[i])
        where = slice(active.starts[i], active.ends[i])
        for moment in ("exp_avg", "exp_avg_sq"):
            if where.stop > where.start:
                wanted = getattr(oracle, moment)[where]
                check_bits(f"the first step: {moment} of {name}", optimizer.state[param][moment], wanted)


def check_norm(optimizer: SparseAdamW, grads: Mapping[str, Tensor], active: Active) -> None:
    """Compare the norm that clipping finds with one summed up in fp64.

    Raises:
        WrongResult: it differs by more than rounding.
    """
    total = torch.zeros((), dtype=torch.float64, device=active.indices.device)
    for grad, start, end in zip(grads.values(), active.starts, active.ends, strict=True):
        total += grad.view(-1)[active.indices[start:end].long()].double().square().sum()
    found, wanted = optimizer.clip_grad_norm_(max_norm=float("inf")).item(), total.sqrt().item()
    if not abs(found - wanted) <= SUM_RTOL * wanted:
        raise WrongResult(f"the norm of the active gradients is {found!r}, wanted {wanted!r}")
