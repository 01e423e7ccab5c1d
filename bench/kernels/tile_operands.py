"""Operands and tile masks of the weight gradients of linear layers.

X [tokens, columns] is an input of a layer, shared by q, k and v, and by gate and up; dY [tokens, rows] is the gradient
of a matrix's output. Each layer has its own X and dY, so that none is cached from another layer.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from sparse_opt import ops
from sparse_opt.masks.patterns import PATTERNS, unit_grid

from ..shapes import Shapes
from .inputs import segments

# Projections of a layer that share an input, by their names in transformers.
_SHARED = {"q_proj": "attention", "k_proj": "attention", "v_proj": "attention", "gate_proj": "mlp", "up_proj": "mlp"}


class Group(NamedTuple):
    """The indices of the matrices of one layer that share an input."""

    matrices: list[int]
    columns: int


def linear_layers(shapes: Shapes) -> Shapes:
    """The matrices of the layers, without the embedding."""
    return {name: shape for name, shape in shapes.items() if ".layers." in name}


def input_groups(shapes: Shapes) -> list[Group]:
    """The groups of matrices that share an input; they are adjacent in `llama_matrices` and have equal columns."""

    def source(item: tuple[int, str]) -> tuple[str, str]:
        projection = item[1].split(".")[-2]
        return layer_of(item[1]), _SHARED.get(projection, projection)

    groups = [[i for i, _ in found] for _, found in itertools.groupby(enumerate(shapes), key=source)]
    columns = [columns for _, columns in shapes.values()]
    return [Group(matrices, columns[matrices[0]]) for matrices in groups]


def layer_of(name: str) -> str:
    """ "model.layers.3" of any of its matrices."""
    before, _, after = name.partition(".layers.")
    return f"{before}.layers.{after.partition('.')[0]}"


@dataclass
class Operands:
    """bf16 X and dY of every matrix; matrices with a shared input refer to one tensor."""

    shapes: Shapes
    groups: list[Group]
    inputs: list[Tensor]  # [tokens, columns] each
    grad_outputs: list[Tensor]  # [tokens, rows] each

    @classmethod
    def random(cls, shapes: Shapes, tokens: int, generator: torch.Generator) -> Operands:
        """Standard normal values on the generator's device."""

        def draw(width: int) -> Tensor:
            return torch.randn(tokens, width, dtype=torch.bfloat16, device=generator.device, generator=generator)

        groups = input_groups(shapes)
        inputs = {i: x for group in groups for x in [draw(group.columns)] for i in group.matrices}
        return cls(shapes, groups, [inputs[i] for i in range(len(shapes))], [draw(rows) for rows, _ in shapes.values()])

    def first(self, tokens: int) -> Operands:
        """The operands of the first tokens, as views."""
        return Operands(
            self.shapes, self.groups, [x[:tokens] for x in self.inputs], [g[:tokens] for g in self.grad_outputs]
        )

    @property
    def tokens(self) -> int:
        return self.inputs[0].shape[0]

    def product(self, i: int) -> Tensor:
        """The dense fp32 gradient of matrix i, [rows, columns]."""
        grad_output, x = self.grad_outputs[i], self.inputs[i]
        if x.is_cuda:
            return torch.mm(grad_output.t(), x, out_dtype=torch.float32)
        return grad_output.float().t() @ x.float()


@dataclass
class TileMask:
    """A random selection among the tiles of all matrices."""

    pattern: str
    density: float
    active: list[Tensor]  # [tiles down, tiles across] bool each
    tiles: Tensor  # [active tiles, 4] int64
    starts: list[int]  # of each matrix's tiles
    ends: list[int]
    slots: list[int]  # first slot of each matrix, and the end of the last

    @classmethod
    def random(cls, shapes: Shapes, pattern: str, density: float, generator: torch.Generator) -> TileMask:
        """round(density * tiles) tiles, at least one, drawn without replacement."""
        device = generator.device
        grids = [unit_grid(shape, pattern) for shape in shapes.values()]
        sizes = [down * across for down, across in grids]
        chosen = torch.randperm(sum(sizes), device=device, generator=generator)[: max(1, round(density * sum(sizes)))]
        flags = torch.zeros(sum(sizes), dtype=torch.bool, device=device)
        flags[chosen] = True
        active = [part.view(grid) for part, grid in zip(flags.split(sizes), grids, strict=True)]
        mask = cls(pattern, density, active, torch.empty(0, 4, dtype=torch.int64, device=device), [], [], [0])
        tables = []
        for i, shape in enumerate(shapes.values()):
            positions = mask.elements(i, shape).flatten().nonzero().view(-1)
            tables.append(ops.tile_table(positions, shape, mask.tile_size, first_slot=mask.slots[-1]))
            mask.slots.append(mask.slots[-1] + positions.numel())
        mask.starts, mask.ends = segments(map(len, tables))
        mask.tiles = torch.cat(tables)
        return mask

    @property
    def tile_size(self) -> int:
        return PATTERNS[self.pattern][0]

    @property
    def nnz(self) -> int:
        return self.slots[-1]

    def elements(self, i: int, shape: tuple[int, int]) -> Tensor:
        """The active elements of matrix i, [rows, columns] bool."""
        return _spread(self.active[i], self.tile_size, shape)

    def bound_bytes(self, operands: Operands) -> float:
        """bf16 columns of X and dY under an active tile, each read once; fp32 gradients written.

        ``2 * tokens * (columns of each input under a tile of any matrix + rows of each matrix under one) + 4 * nnz``.
        """
        widths = 0
        for group in operands.groups:
            across = torch.stack([self.active[i].any(dim=0) for i in group.matrices]).any(dim=0)
            widths += int(_spread(across[None], self.tile_size, (1, group.columns)).sum())
        for down, (rows, _) in zip(self.active, operands.shapes.values(), strict=True):
            widths += int(_spread(down.any(dim=1)[None], self.tile_size, (1, rows)).sum())
        return 2.0 * operands.tokens * widths + 4.0 * self.nnz


def _spread(tiles: Tensor, tile_size: int, shape: tuple[int, int]) -> Tensor:
    """Expand [tiles down, tiles across] to the elements of a matrix."""
    rows, columns = shape
    return tiles.repeat_interleave(tile_size, 0)[:rows].repeat_interleave(tile_size, 1)[:, :columns]


def operand_bytes(operands: Operands) -> float:
    """Bytes of X and dY read once: ``2 * tokens * (columns of each input + rows of each matrix)``."""
    return 2.0 * operands.tokens * total_width(operands.shapes)


def total_width(shapes: Shapes) -> int:
    """Columns of all inputs and rows of all matrices."""
    return sum(group.columns for group in input_groups(shapes)) + sum(rows for rows, _ in shapes.values())
