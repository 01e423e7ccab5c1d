"""Random inputs for the cases, generated on the device that runs them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from sparse_opt.masks.patterns import expand_units, unit_grid
from sparse_opt.ops import narrow_indices, tile_table
from sparse_opt.tensors import as_bits

from .cases import (
    Active,
    AdamWCase,
    Case,
    DeltaApplyCase,
    DeltaEncodeCase,
    GatherCase,
    SGDCase,
    SwapCase,
    TileWeightGradCase,
)

# So large that a step changes the bits of nearly every active weight, as the floors assume.
LR = 1.0
TOKENS = 512  # tokens in the batch of the weight gradients


def random_tensors(
    shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, generator: torch.Generator, scale: float = 1.0
) -> list[Tensor]:
    """Normal random values with standard deviation ``scale``, on the generator's device."""
    return [
        torch.randn(shape, dtype=dtype, device=generator.device, generator=generator).mul_(scale)
        for shape in shapes.values()
    ]


def random_active(dense: Sequence[Tensor], density: float, generator: torch.Generator) -> Active:
    """A random mask over ``dense``, on its device: each element is active with probability ``density``."""
    found = [
        (torch.rand(t.numel(), device=t.device, generator=generator) < density).nonzero().view(-1).to(torch.int32)
        for t in dense
    ]
    ends = list(itertools.accumulate(len(f) for f in found))
    return Active(torch.cat(found), [0, *ends[:-1]], ends)


def adamw_case(
    params: list[Tensor], grads: list[Tensor], active: Active, generator: torch.Generator, *, dense_grads: bool
) -> AdamWCase:
    """The third step of AdamW with fp32 moments; the gradient is ``grads``, or a compact fp32 one."""
    device = generator.device
    exp_avg, root = (torch.randn(active.nnz, device=device, generator=generator).mul_(1e-3) for _ in range(2))
    return AdamWCase(
        params=params,
        active=active,
        lr=torch.tensor([LR], device=device),
        steps=torch.full((len(params),), 3.0, device=device),
        **_gradient(grads, active, generator, dense_grads),
        exp_avg=exp_avg,
        exp_avg_sq=root.square_(),
    )


def sgd_case(
    params: list[Tensor], grads: list[Tensor], active: Active, generator: torch.Generator, *, dense_grads: bool
) -> SGDCase:
    """The third step of SGD with an fp32 momentum buffer."""
    device = generator.device
    return SGDCase(
        params=params,
        active=active,
        lr=torch.tensor([LR], device=device),
        steps=torch.full((len(params),), 3.0, device=device),
        **_gradient(grads, active, generator, dense_grads),
        momentum_buffer=torch.randn(active.nnz, device=device, generator=generator),
    )


def _gradient(grads: list[Tensor], active: Active, generator: torch.Generator, dense_grads: bool) -> dict[str, Any]:
    if dense_grads:
        return {"dense_grads": grads}
    return {"grad": torch.randn(active.nnz, device=generator.device, generator=generator)}


def narrowed(active: Active) -> Active:
    """The same elements with two-byte indices, as the optimizer stores them."""
    indices, index_bases = narrow_indices(active.indices, active.starts, active.ends)
    return Active(indices, active.starts, active.ends, index_bases)


def gather_case(grads: list[Tensor], active: Active) -> GatherCase:
    """A gather into a compact fp32 gradient, as in the optimizer."""
    device = grads[0].device
    return GatherCase(
        out=torch.empty(active.nnz, device=device),
        dense=grads,
        active=active,
        sum_sq=torch.empty(len(grads), device=device),
        found_inf=torch.zeros(1, device=device),
    )


def tile_weight_grad_case(
    shapes: Iterable[tuple[int, ...]],
    dtype: torch.dtype,
    density: float,
    generator: torch.Generator,
    *,
    tokens: int = TOKENS,
    tile_size: int = 64,
) -> TileWeightGradCase:
    """The matrices among ``shapes`` with round(density * tiles) random tiles each, at least one unless 0."""
    device = generator.device
    matrices = [shape for shape in shapes if len(shape) == 2]
    pattern = f"tile{tile_size}"
    tables: list[Tensor] = []
    slots: list[int] = []
    for shape in matrices:
        n_tiles = math.prod(unit_grid(shape, pattern))
        n_active = max(round(density * n_tiles), 1 if density > 0 else 0)
        chosen = torch.randperm(n_tiles, device=device, generator=generator)[:n_active].sort().values.cpu()
        positions = expand_units(chosen, shape, pattern)
        tables.append(tile_table(positions, shape, tile_size, first_slot=sum(slots)))
        slots.append(positions.numel())

    def integers(width: int) -> Tensor:
        return torch.randint(-8, 9, (tokens, width), device=device, generator=generator).to(dtype)

    ends = list(itertools.accumulate(len(table) for table in tables))
    return TileWeightGradCase(
        out=torch.empty(sum(slots), device=device),
        grad_outputs=[integers(rows) for rows, _ in matrices],
        inputs=[integers(columns) for _, columns in matrices],
        tiles=torch.cat(tables).to(device),
        starts=[0, *ends[:-1]],
        ends=ends,
        slots=slots,
        tile_size=tile_size,
        sum_sq=torch.empty(len(matrices), device=device),
        found_inf=torch.zeros(1, device=device),
    )


def swap_case(params: list[Tensor], active: Active, generator: torch.Generator) -> SwapCase:
    compact = torch.randn(active.nnz, dtype=params[0].dtype, device=params[0].device, generator=generator)
    return SwapCase(dense=params, compact=compact, active=active)


def delta_encode_case(old: list[Tensor], density: float, generator: torch.Generator) -> DeltaEncodeCase:
    """``old`` against a copy in which the last bit of each element is flipped with probability ``density``."""
    new, n_changed = [], 0
    for tensor in old:
        flips = torch.rand(tensor.numel(), device=tensor.device, generator=generator) < density
        bits = as_bits(tensor) ^ flips
        new.append(bits.view(tensor.dtype).view(tensor.shape))
        n_changed += int(flips.sum())
    return DeltaEncodeCase(old=old, new=new, n_changed=n_changed)


def delta_apply_case(dense: list[Tensor], active: Active, generator: torch.Generator) -> DeltaApplyCase:
    values = torch.randn(active.nnz, dtype=dense[0].dtype, device=dense[0].device, generator=generator)
    return DeltaApplyCase(dense=dense, active=active, values=values)


def random_case(
    op: str,
    shapes: Mapping[str, tuple[int, ...]],
    dtype: torch.dtype,
    density: float,
    generator: torch.Generator,
    *,
    dense_grads: bool = True,
) -> Case:
    """A case of the op ``op`` on random tensors of these shapes; ``dense_grads`` applies to optimizer steps."""
    if op == "tile_weight_grad_":
        return tile_weight_grad_case(shapes.values(), dtype, density, generator)
    dense = random_tensors(shapes, dtype, generator)
    if op == "delta_encode":
        return delta_encode_case(dense, density, generator)
    active = random_active(dense, density, generator)
    if op == "delta_apply_":
        return delta_apply_case(dense, active, generator)
    active = narrowed(active)
    if op == "masked_grad_gather_":
        return gather_case(dense, active)
    if op == "indexed_swap_":
        return swap_case(dense, active, generator)
    make = {"indexed_adamw_": adamw_case, "indexed_sgd_": sgd_case}[op]
    return make(dense, random_tensors(shapes, dtype, generator), active, generator, dense_grads=dense_grads)
