"""Embeddings whose backward pass computes only the active tiles of the weight gradient, in plain torch ops.

All shapes follow from those of the operands and of the mask: nothing waits for the device, and a CUDA graph can hold
it. The result has the same bits every time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..segments import Segments, Tiles
from .collector import Receiver
from .tile_backward import LayerRoute

# Of the fp32 sums that `gradient` computes at once. One call suffices for 1024 tokens of width 3072.
_MAX_SUMS_BYTES = 16 * 2**20


@dataclass(frozen=True, eq=False)
class TileSlots:
    """The compact slots of one weight's active tiles, for looking up the slots of any row.

    A row is divided into pieces of `width` elements, such that none crosses the edge of a tile; so are the slots.
    """

    first_piece: Tensor  # [tile rows, pieces of a row] int64: of the first row of each tile; -1 where inactive
    row_stride: Tensor  # [tile rows] int64: pieces from one row of a tile to the next
    n_pieces: int  # active ones
    width: int
    tile_size: int
    n_rows: int

    @classmethod
    def of(cls, segments: Segments, tiles: Tiles, i: int) -> TileSlots:
        """Build the slots of parameter i of the segments, which has tiles."""
        n_rows, n_columns = segments.params[i].shape
        size = tiles.tile_size
        width = math.gcd(n_columns, size)
        first_row, first_column, slot, stride = tiles.table[tiles.starts[i] : tiles.ends[i]].unbind(1)
        grid = -(-n_rows // size), -(-n_columns // size)
        first = slot.new_full(grid, -1)
        first[first_row // size, first_column // size] = (slot - segments.starts[i]) // width
        row_stride = stride.new_zeros(grid[0])
        row_stride[first_row // size] = stride // width
        pieces = torch.arange(n_columns // width, device=first.device)
        tile, in_tile = pieces // (size // width), pieces % (size // width)
        first_piece = torch.where(first[:, tile] >= 0, first[:, tile] + in_tile, -1)
        n_pieces = (segments.ends[i] - segments.starts[i]) // width
        return cls(first_piece, row_stride, n_pieces, width, size, n_rows)


def gradient(slots: TileSlots, grad_output: Tensor, ids: Tensor, padding_idx: int | None) -> Tensor:
    """Compute the active elements of an embedding's weight gradient: fp32 [the weight's slots].

    The rows of equal ids are added up into that of the first of them, in the order of the tokens, as torch's own
    backward pass does; what is active of each of these sums is then written to its slots.

    Args:
        grad_output: [T, columns].
        ids: [T] int64.
        padding_idx: a row without gradient.
    """
    n_tokens, width = len(ids), slots.width
    token = torch.arange(n_tokens, device=ids.device)
    first_token = ids.new_full((slots.n_rows,), n_tokens).scatter_reduce_(0, ids, token, "amin")[ids]
    written = first_token == token
    if padding_idx is not None:
        written &= ids != padding_idx
    tile_row = ids // slots.tile_size
    piece = slots.first_piece[tile_row]  # [T, pieces of a row]
    target = piece + (ids % slots.tile_size * slots.row_stride[tile_row])[:, None]
    # What is not written goes to a piece that is cut off, one for each token: a single one would have many writers.
    target = torch.where((piece >= 0) & written[:, None], target, slots.n_pieces + token[:, None])
    values = torch.zeros(slots.n_pieces + n_tokens, width, dtype=torch.float32, device=ids.device)
    at_once = max(1, _MAX_SUMS_BYTES // (4 * width * max(n_tokens, 1)))
    for part, columns in zip(target.split(at_once, dim=1), grad_output.split(at_once * width, dim=1), strict=True):
        sums = torch.ops.aten.embedding_dense_backward(columns.float(), first_token, n_tokens, -1, False)
        values[part.reshape(-1)] = sums.view(-1, width)
    return values[: slots.n_pieces].view(-1)


def unsupported_option(embedding: nn.Embedding) -> str:
    """Return the option of the layer with which its gradient is not the plain sum of rows; empty if there is none."""
    if embedding.max_norm is not None:
        return f"max_norm={embedding.max_norm}"
    return "scale_grad_by_freq=True" if embedding.scale_grad_by_freq else "sparse=True" if embedding.sparse else ""


class EmbeddingRoute(LayerRoute):
    """A route of an embedding. Under `torch.compile` and in torch.func's transforms its gradient is dense."""

    def __init__(self, receiver: Receiver, i: int) -> None:
        super().__init__(receiver, i)
        assert receiver.buffer.tiles is not None
        self.slots = TileSlots.of(receiver.buffer, receiver.buffer.tiles, i)

    def output(self, layer: nn.Module, input: Tensor, weight: Tensor) -> Tensor:
        assert isinstance(layer, nn.Embedding)
        compiling = torch.compiler.is_compiling()
        if compiling or unsupported_option(layer) or torch._C._are_functorch_transforms_active():
            return type(layer).forward(layer, input)
        output: Tensor = _TileEmbedding.apply(input, weight, layer.padding_idx, self)
        return output


class _TileEmbedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, padding_idx: int | None, route: EmbeddingRoute) -> Tensor:
        ctx.save_for_backward(input)
        ctx.set_materialize_grads(False)
        ctx.n_rows, ctx.padding_idx, ctx.route = len(weight), padding_idx, route
        return F.embedding(input, weight, padding_idx)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor | None) -> tuple[None, Tensor | None, None, None]:
        if grad_output is None:
            return None, None, None, None
        if torch.is_grad_enabled():
            raise RuntimeError(
                "an embedding whose weight gradient is computed by tiles can't be differentiated twice "
                "(create_graph); build the optimizer with tile_backward=False"
            )
        (input,) = ctx.saved_tensors
        ids, rows = input.reshape(-1).long(), grad_output.reshape(-1, grad_output.shape[-1])
        if ctx.route.add_values(lambda: gradient(ctx.route.slots, rows, ids, ctx.padding_idx)):
            return None, None, None, None
        padding_idx = -1 if ctx.padding_idx is None else ctx.padding_idx
        dense = torch.ops.aten.embedding_dense_backward(rows, ids, ctx.n_rows, padding_idx, False)
        return None, dense, None, None
