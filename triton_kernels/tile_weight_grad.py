"""Weight gradients of the active tiles only, written to a compact buffer."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import SLOT_OPTIONS, SLOTS, Sizes, element_dtype, interpreted, sizes_of
from .masked_grad_gather import _sum_partials_kernel
from .rounding import round_nearest, widen
from .tables import block_table, check_list, operand_rows, operand_table


class TileOptions(NamedTuple):
    """Options of the kernel. The step and the warps decide in which order products and squares are added up."""

    step: int  # tokens of one tl.dot
    num_warps: int
    num_stages: int  # steps in shared memory at a time
    max_registers: int  # of a thread, if operands are aligned; 0 is the compiler's choice

    def compiler_options(self, aligned: bool) -> dict[str, Any]:
        options: dict[str, Any] = {
            "num_warps": self.num_warps,
            "num_stages": self.num_stages,
            "enable_fp_fusion": False,  # as in SLOT_OPTIONS; does not affect tl.dot
        }
        # Triton's AMD backend rejects unknown options, such as this one.
        if aligned and self.max_registers and torch.version.hip is None:
            options["maxnreg"] = self.max_registers
        return options


def tile_options(tile_size: int, operand_size: int, sizes: Sizes) -> TileOptions:
    """The options for tiles of 64 or 128 and operands of 2 or 4 bytes.

    4 warps compute 64 rows of a wgmma. fp32 operands are multiplied by FMAs from registers, which would spill with more
    tokens in a step. Large calls on an H200 take 0.95 to 1.18 times as long as with the CUDA kernel (the lab notebook).
    """
    if operand_size == 4:
        return TileOptions(16, 4 if tile_size == 64 else 8, 2, 0)
    if tile_size == 64:
        return TileOptions(64, 4, sizes.tile64_stages, 0)
    return TileOptions(64, 8, sizes.tile128_stages, sizes.tile128_registers)


# If active tiles are few, the tokens of a tile are split into as many parts as give PROGRAMS programs for each
# multiprocessor, with at least LEAST_TOKENS each and sums of at most SCRATCH_BYTES. Calls of fewer than WHOLE_BELOW
# tokens are not split. Chosen on an H200: "Tuning tables" in docs/dev/notebook.md. bench/kernels/tiles.py times
# such calls. No table of a GPU has these numbers, because the parts decide in which order products are added up.
PROGRAMS = {64: 3, 128: 1}
WHOLE_BELOW = 2048  # tokens
LEAST_TOKENS = 512
MOST_SPLITS = 8
SCRATCH_BYTES = 64 << 20
# Rows of a tile for which one program adds up the sums of all parts.
BAND = 16
BAND_OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}

# The interpreter, which has no multiprocessors, uses the splits of an H200.
_MULTIPROCESSORS = 132
# The interpreter's tl.dot would multiply the bits of bf16 as integers.
_WIDEN = tl.constexpr(interpreted())


@triton.jit
def _sizes_of(operands, matrix, rows, columns):
    """(rows, columns) of a matrix: from the operand table, or as passed for one matrix."""
    if operands is None:
        return rows, columns
    else:
        return tl.load(operands + 5 * matrix + 3), tl.load(operands + 5 * matrix + 4)


@triton.jit
def _store_columns(
    g,  # [ROWS, WIDTH] fp32, from first_column on
    first_column,
    at,  # [ROWS] addresses of column 0
    row_mask,
    width,  # columns of the tile
    scale,
    ACCUMULATE: tl.constexpr,
    WIDTH: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """Store a part of a tile's columns. Return (sums of squares, 1 if a value is not finite), [ROWS] each."""
    column = first_column + tl.arange(0, WIDTH)
    at = at[:, None] + column[None, :]
    mask = None if WHOLE else row_mask[:, None] & (column < width)[None, :]
    if scale is not None:
        g = g * scale
    if ACCUMULATE:
        g = widen(tl.load(at, mask=mask)) + g
    rounded = round_nearest(g, at.dtype.element_ty)
    tl.store(at, rounded, mask=mask)
    stored = widen(rounded)
    if not WHOLE:
        stored = tl.where(mask, stored, 0.0)
    return tl.sum(stored * stored, axis=1), tl.max((tl.abs(stored) < float("inf")).to(tl.int32) ^ 1, axis=1)


@triton.jit
def _halves(g, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """The left and the right columns of [ROWS, WIDTH]."""
    return tl.split(tl.trans(tl.reshape(g, (ROWS, 2, WIDTH // 2)), 0, 2, 1))


@triton.jit
def _store_rows(
    g,  # [ROWS, TILE] fp32, the sums of the tile's rows from first on
    first,
    tiles,
    tile,
    rows,
    columns,
    out,
    scale,
    partials,
    found_inf,
    ACCUMULATE: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    WHOLE: tl.constexpr,
):
    row = first + tl.arange(0, ROWS)
    height = rows - tl.load(tiles + 4 * tile) % rows  # of an expert's matrix, if there are experts
    width = columns - tl.load(tiles + 4 * tile + 1)
    at = out + (tl.load(tiles + 4 * tile + 2) + row * tl.load(tiles + 4 * tile + 3))
    if scale is not None:
        scale = tl.load(scale)
    # Addresses and loaded values of a whole tile would take twice the registers of its sums (compiled for sm_90: 254 a
    # thread for a tile of 128, 128 in quarters), and a second program would not fit on the multiprocessor.
    QUARTER: tl.constexpr = TILE // 4
    left, right = _halves(g, ROWS, TILE)
    parts = _halves(left, ROWS, TILE // 2) + _halves(right, ROWS, TILE // 2)
    squares = tl.zeros([ROWS], dtype=tl.float32)
    bad = tl.zeros([ROWS], dtype=tl.int32)
    for i in tl.static_range(4):
        s, b = _store_columns(parts[i], i * QUARTER, at, row < height, width, scale, ACCUMULATE, QUARTER, WHOLE)
        squares += s
        bad |= b
    # Rows are reduced as [1, ROWS]: reductions of one dimension do not compile for sm_100 (Triton 3.6 and 3.7), where
    # sums of products are in tensor memory.
    if partials is not None:
        tl.store(partials + tl.program_id(0) + tl.arange(0, 1), tl.sum(squares[None, :], axis=1))
    if found_inf is not None:
        # All programs that write here write the same value.
        tl.store(found_inf + tl.arange(0, 1), float("inf"), mask=tl.max(bad[None, :], axis=1) != 0)


# Bytes for a tile of n x n, T tokens, 2-byte operands and S splits: 2 * 2 n T read from the L2 cache, n^2 slots written
# (and read, to accumulate), and 4 n^2 S written and read if S > 1. The parts of the operands that any tile needs are
# read from memory once, because programs that run together are at about the same token. The bandwidth bound is the
# larger of the two times: n^2 T multiply-adds are n / 4 for each byte from L2.
#
# Tokens are masked even in whole steps: the pipeliner makes its loads conditional anyway, and another number of tokens
# must not compile another kernel.
@triton.jit(do_not_specialize=["start", "tokens", "rows", "columns"])
def _tile_weight_grad_kernel(
    operands,  # [n, 5] int64: addresses of grad_output and input, tokens, rows, columns; None for one matrix
    blocks,  # [active tiles, 2] int64: tile; matrix << 32 | 1; or None
    grad_output,  # [tokens, rows] of the one matrix, or None
    x,  # [tokens, columns] of the one matrix, or None
    tiles,  # [k, 4] int64: first row, first column, first slot, slots from row to row
    out,  # [nnz]
    scale,  # [1] or None
    sums,  # [splits, active tiles, TILE, TILE] fp32, or None without splits
    partials,  # [active tiles] fp32 or None
    found_inf,  # [1] or None
    token_offsets,  # [experts] int32 or None
    start: tl.int64,  # first tile of the one matrix
    tokens: tl.int64,
    rows: tl.int64,
    columns: tl.int64,
    OPERAND: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    TILE: tl.constexpr,
    STEP: tl.constexpr,
    ALIGN: tl.constexpr,  # sizes are multiples of it, addresses multiples of 16 bytes; or 1
    WHOLE: tl.constexpr,  # no tile extends past an edge
):
    number = tl.program_id(0).to(tl.int64)
    if operands is None:
        tile = start + number
    else:
        tile = tl.load(blocks + 2 * number)
        entry = operands + 5 * (tl.load(blocks + 2 * number + 1) >> 32)
        grad_output = tl.load(entry).to(tl.pointer_type(OPERAND))
        x = tl.load(entry + 1).to(tl.pointer_type(OPERAND))
        if ALIGN > 1:
            grad_output = tl.multiple_of(grad_output, 16)
            x = tl.multiple_of(x, 16)
        tokens = tl.load(entry + 2)
        rows = tl.load(entry + 3)
        columns = tl.load(entry + 4)
    # The compiler derives that an argument is a multiple of ALIGN from a computation only.
    rows = rows // ALIGN * ALIGN
    columns = columns // ALIGN * ALIGN
    first_row = tl.load(tiles + 4 * tile)
    if token_offsets is not None:
        expert = first_row // rows
        before = tl.load(token_offsets + expert - 1, mask=expert > 0, other=0).to(tl.int64)
        tokens = tl.minimum(tl.load(token_offsets + expert).to(tl.int64), tokens) - before
        grad_output += before * rows
        x += before * columns
        first_row -= expert * rows
    first_row = tl.multiple_of(first_row, TILE)
    first_column = tl.multiple_of(tl.load(tiles + 4 * tile + 1), TILE)

    steps_each = tl.cdiv(tl.cdiv(tokens, STEP), tl.num_programs(1))
    first_token = tl.program_id(1) * steps_each * STEP
    left = tl.minimum(tokens - first_token, steps_each * STEP)  # negative if no tokens are left
    token = tl.arange(0, STEP)
    row = first_row + tl.arange(0, TILE)
    column = first_column + tl.arange(0, TILE)
    grad_output_at = grad_output + ((first_token + token) * rows)[:, None] + row[None, :]
    x_at = x + ((first_token + token) * columns)[:, None] + column[None, :]
    acc = tl.zeros([TILE, TILE], dtype=tl.float32)
    for step in range(tl.cdiv(left, STEP).to(tl.int32)):
        here = (token < left - step * STEP)[:, None]
        if WHOLE:
            a = tl.load(grad_output_at, mask=here, other=0.0)
            b = tl.load(x_at, mask=here, other=0.0)
        else:
            a = tl.load(grad_output_at, mask=here & (row < rows)[None, :], other=0.0)
            b = tl.load(x_at, mask=here & (column < columns)[None, :], other=0.0)
        if _WIDEN:
            a = widen(a)
            b = widen(b)
        acc = tl.dot(tl.trans(a), b, acc, input_precision="ieee")
        grad_output_at += STEP * rows
        x_at += STEP * columns

    if sums is None:
        _store_rows(
            acc,
            0,
            tiles,
            tile,
            rows,
            columns,
            out,
            scale,
            partials,
            found_inf,
            ACCUMULATE=ACCUMULATE,
            ROWS=TILE,
            TILE=TILE,
            WHOLE=WHOLE,
        )
    else:
        place = (tl.program_id(1) * tl.num_programs(0) + number) * (TILE * TILE)
        lane = tl.arange(0, TILE)
        tl.store(sums + place + lane[:, None] * TILE + lane[None, :], acc)


# Reads the sums once, 4 n^2 bytes for each tile and split, from the L2 cache.
@triton.jit(do_not_specialize=["start", "rows", "columns", "active", "splits"])
def _add_splits_kernel(
    operands,  # as in _tile_weight_grad_kernel
    blocks,  # [active tiles * TILE / ROWS, 2] int64: tile * TILE / ROWS + band; matrix << 32 | 1; or None
    tiles,  # [k, 4]
    sums,  # [splits, active, TILE, TILE] fp32
    out,  # [nnz]
    scale,  # [1] or None
    partials,  # [active * TILE / ROWS] fp32 or None
    found_inf,  # [1] or None
    start: tl.int64,  # first tile of the one matrix
    rows: tl.int64,
    columns: tl.int64,
    active: tl.int64,
    splits: tl.int32,
    ACCUMULATE: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    WHOLE: tl.constexpr,
):
    BANDS: tl.constexpr = TILE // ROWS
    program = tl.program_id(0).to(tl.int64)
    first = (program % BANDS).to(tl.int32) * ROWS
    if operands is None:
        tile = start + program // BANDS
        matrix = program * 0
    else:
        tile = tl.load(blocks + 2 * program) // BANDS
        matrix = tl.load(blocks + 2 * program + 1) >> 32
    rows, columns = _sizes_of(operands, matrix, rows, columns)
    row = first + tl.arange(0, ROWS)
    at = sums + program // BANDS * (TILE * TILE) + row[:, None] * TILE + tl.arange(0, TILE)[None, :]
    g = tl.zeros([ROWS, TILE], dtype=tl.float32)
    for _ in range(splits):
        g += tl.load(at)
        at += active * (TILE * TILE)
    _store_rows(
        g,
        first,
        tiles,
        tile,
        rows,
        columns,
        out,
        scale,
        partials,
        found_inf,
        ACCUMULATE=ACCUMULATE,
        ROWS=ROWS,
        TILE=TILE,
        WHOLE=WHOLE,
    )


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else _MULTIPROCESSORS


def _splits(active: int, tokens: int, tile_size: int, device: torch.device) -> int:
    """The number of parts into which the tokens of each tile are cut."""
    if tokens < WHOLE_BELOW:
        return 1
    multiprocessors = _multiprocessors(device)
    splits = PROGRAMS[tile_size] * multiprocessors // active
    if tile_size == 128 and splits < 2 and tokens >= 6144:
        # More splits are also faster if two programs share a multiprocessor, or if they shorten the last round.
        if active <= multiprocessors:
            splits = 2 * multiprocessors // active
        elif 3 * active <= 4 * multiprocessors:
            splits = 3
    max_by_scratch = SCRATCH_BYTES // (4 * tile_size * tile_size * active)
    return max(1, min(splits, tokens // LEAST_TOKENS, MOST_SPLITS, max_by_scratch))


def tile_weight_grad_(
    out: Tensor,
    grad_outputs: Sequence[Tensor],
    inputs: Sequence[Tensor],
    tiles: Tensor,
    starts: Sequence[int],
    ends: Sequence[int],
    *,
    tile_size: int,
    scale: Tensor | None = None,
    accumulate: bool = False,
    sum_sq: Tensor | None = None,
    found_inf: Tensor | None = None,
    token_offsets: Tensor | None = None,
) -> None:
    """`sparse_opt.ops.tile_weight_grad_` in one launch, a second one if tokens are split, and one for `sum_sq`."""
    n = len(grad_outputs)
    if not n == len(inputs) == len(starts) == len(ends):
        raise ValueError(
            f"{len(inputs)} inputs, {len(starts)} starts and {len(ends)} ends for {n} grad_outputs, "
            "expected equal numbers"
        )
    device = tiles.device
    with torch.cuda.device_of(tiles):
        active = sum(ends) - sum(starts)
        if not active:
            if sum_sq is not None:
                sum_sq.zero_()
            return
        operand_size = grad_outputs[0].element_size()
        options = tile_options(tile_size, operand_size, sizes_of(device))
        matrices = operand_rows(grad_outputs, inputs)
        tokens = max(m.tokens for m in matrices)
        if token_offsets is not None:
            tokens //= max(1, len(token_offsets))  # of an expert, on average
        splits = _splits(active, tokens, tile_size, device)
        bands = tile_size // BAND if splits > 1 else 1

        operands = blocks = grad_output = x = firsts = None
        start, tokens, rows, columns = 0, 0, 0, 0
        if n == 1:
            check_list("grad_outputs", grad_outputs, device)
            check_list("inputs", inputs, device)
            grad_output, x = grad_outputs[0], inputs[0]
            start, (_, _, tokens, rows, columns) = starts[0], matrices[0]
        else:
            operands = operand_table(grad_outputs, inputs, matrices, device)
            blocks, firsts, _ = block_table(starts, ends, 1, device)

        # Compile-time constants, because they hardly change in a model: its sizes are fixed, torch's addresses aligned.
        vector = 16 // operand_size
        align = vector
        whole = True
        for m in matrices:
            if (m.grad_output | m.x) % 16 or (m.rows | m.columns) % vector:
                align = 1
            whole = whole and not (m.rows | m.columns) % tile_size
        sums = partials = None
        if splits > 1:
            sums = torch.empty(splits * active * tile_size * tile_size, dtype=torch.float32, device=device)
        if sum_sq is not None:
            partials = torch.empty(active * bands, dtype=torch.float32, device=device)

        _tile_weight_grad_kernel[(active, splits)](
            operands,
            blocks,
            grad_output,
            x,
            tiles,
            out,
            scale,
            sums,
            None if splits > 1 else partials,
            None if splits > 1 else found_inf,
            token_offsets,
            start,
            tokens,
            rows,
            columns,
            OPERAND=element_dtype(grad_outputs),
            ACCUMULATE=accumulate,
            TILE=tile_size,
            STEP=options.step,
            ALIGN=align,
            WHOLE=whole,
            **options.compiler_options(aligned=align > 1),
        )
        if splits > 1:
            if n > 1:
                scaled = [s * bands for s in starts], [e * bands for e in ends]
                blocks, firsts, _ = block_table(*scaled, 1, device)
            _add_splits_kernel[(active * bands,)](
                operands,
                blocks,
                tiles,
                sums,
                out,
                scale,
                partials,
                found_inf,
                start,
                rows,
                columns,
                active,
                splits,
                ACCUMULATE=accumulate,
                TILE=tile_size,
                ROWS=BAND,
                WHOLE=whole,
                **BAND_OPTIONS,
            )
        if sum_sq is not None:
            _sum_partials_kernel[(n,)](partials, firsts, active * bands, sum_sq, BLOCK=SLOTS, **SLOT_OPTIONS)
