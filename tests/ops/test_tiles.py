"""tile_table against a count, and tile_weight_grad_ on every backend against the reference and against fp64.

Where values are small integers, every product and partial sum is exact in fp32: the order of additions does not show,
and results are compared bit by bit.
"""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from cases import bits_of, name_of
from torch import Tensor

from sparse_opt import MaskSet, ops

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
# Multiples of neither tile size, nor of 8 or 2; narrower than a tile, a single row, a single column; many tiles.
SHAPES = ((130, 77), (1, 201), (201, 1), (64, 128), (9, 5))
PADDING = 3  # slots before and after, which belong to no tile


@dataclass
class Call:
    """The op's arguments; `masks` are the active elements as bool matrices."""

    out: Tensor
    grad_outputs: list[Tensor]
    inputs: list[Tensor]
    tiles: Tensor
    starts: list[int]
    ends: list[int]
    tile_size: int
    masks: list[Tensor]

    def run(self, backend: str, **options: object) -> Tensor:
        """The op's result in a copy of `out`."""
        out = self.out.clone()
        where = self.tiles, self.starts, self.ends
        ops.tile_weight_grad_(
            out, self.grad_outputs, self.inputs, *where, tile_size=self.tile_size, backend=backend, **options
        )
        return out

    def slots(self) -> list[slice]:
        """Of each matrix, in the order of its elements."""
        found, first = [], PADDING
        for mask in self.masks:
            found.append(slice(first, first + int(mask.sum())))
            first = found[-1].stop
        return found

    def exact(self) -> tuple[Tensor, Tensor]:
        """In fp64, over all slots of matrices: the gradients, and the same sums of absolute values."""
        values, sizes = [], []
        for g, x, mask in zip(self.grad_outputs, self.inputs, self.masks, strict=True):
            g, x, mask = g.flatten(0, -2).double(), x.flatten(0, -2).double(), mask.to(g.device)
            values.append((g.T @ x)[mask])
            sizes.append((g.abs().T @ x.abs())[mask])
        return torch.cat(values), torch.cat(sizes)


def integers(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.randint(-8, 9, shape, generator=generator).float()


def normals(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator)


def make(
    device: str,
    *,
    shapes: tuple[tuple[int, int], ...] = SHAPES,
    tokens: tuple[int, ...] = (65,),
    tile_size: int = 64,
    dtype: torch.dtype = torch.float32,
    out_dtype: torch.dtype = torch.float32,
    density: float = 0.6,
    draw: Callable[[tuple[int, ...], torch.Generator], Tensor] = integers,
) -> Call:
    """Random operands and tiles. `out` is NaN where slots belong to no tile, and anything where they do."""
    generator = torch.Generator().manual_seed(1)
    mask = MaskSet.random({str(i): s for i, s in enumerate(shapes)}, density=density, pattern=f"tile{tile_size}")
    tables, starts, ends, first_slot = [], [], [], PADDING
    for i, shape in enumerate(shapes):
        tables.append(ops.tile_table(mask[str(i)], shape, tile_size, first_slot=first_slot))
        first_slot += mask[str(i)].numel()
        starts.append(sum(len(t) for t in tables[:-1]))
        ends.append(starts[-1] + len(tables[-1]))
    out = torch.full((first_slot + PADDING,), math.nan)
    out[PADDING:-PADDING] = draw((first_slot - PADDING,), generator)
    return Call(
        out=out.to(device, out_dtype),
        grad_outputs=[draw((*tokens, rows), generator).to(device, dtype) for rows, _ in shapes],
        inputs=[draw((*tokens, columns), generator).to(device, dtype) for _, columns in shapes],
        tiles=torch.cat(tables).to(device),
        starts=starts,
        ends=ends,
        tile_size=tile_size,
        masks=[mask.bool(str(i)) for i in range(len(shapes))],
    )


def assert_bits(got: Tensor, expected: Tensor) -> None:
    differ = bits_of(got) != bits_of(expected)
    assert not differ.any(), (
        f"{int(differ.sum())} of {got.numel()} slots differ, the first at {int(differ.nonzero()[0])}"
    )


def assert_sums(sum_sq: Tensor, call: Call, out: Tensor) -> None:
    """Of positive terms: each of n squares and additions rounds by 2^-24, at random; 4 standard deviations."""
    for i, slots in enumerate(call.slots()):
        stored = out[slots].double().square().sum().item()
        n = slots.stop - slots.start
        assert abs(sum_sq[i].item() - stored) <= 4 * n**0.5 * 2**-24 * stored, i


# tile_table


@pytest.mark.parametrize("tile_size", [64, 128])
@pytest.mark.parametrize("shape", [(256, 384), (130, 200), (200, 130), (5, 700), (700, 5), (1, 1), (64, 64)], ids=str)
def test_tile_table_lists_the_tiles_of_a_mask(shape, tile_size):
    rows, columns = shape
    for seed, density in enumerate((0.0, 0.6, 1.0)):
        if 0 < density < 1 and rows <= tile_size and columns <= tile_size:
            continue  # less than one tile
        mask = MaskSet.random({"w": shape}, density=density, pattern=f"tile{tile_size}", seed=seed)
        dense = mask.bool("w")
        slots = (dense.view(-1).cumsum(0) - 1).view(shape)
        expected = []
        for row in range(0, rows, tile_size):
            for column in range(0, columns, tile_size):
                if dense[row, column]:
                    expected.append([row, column, int(slots[row, column]) + 17, int(dense[row].sum())])
        for index_dtype in (torch.int32, torch.int64):
            table = ops.tile_table(mask["w"].to(index_dtype), shape, tile_size, first_slot=17)
            assert table.dtype == torch.int64 and table.shape == (len(expected), 4)
            assert table.tolist() == expected
        for row, column, slot, stride in expected:  # as the op reads them
            for r in range(min(tile_size, rows - row)):
                assert slots[row + r, column] == slot - 17 + r * stride


def test_tile_table_refuses_what_is_not_whole_tiles():
    whole = MaskSet.random({"w": (128, 128)}, density=0.5, pattern="tile64")["w"]
    for positions in (whole[1:], whole[:-1], torch.arange(64), torch.tensor([5])):
        with pytest.raises(ValueError, match=rf"tile_table: {len(positions)} positions .* expected whole aligned"):
            ops.tile_table(positions, (128, 128), 64)
    mask = torch.zeros(256, 256, dtype=torch.bool)
    for row, column in ((0, 0), (0, 1), (0, 3), (1, 1)):  # as many elements as one tile of 128
        mask[64 * row : 64 * row + 64, 64 * column : 64 * column + 64] = True
    with pytest.raises(ValueError, match="expected whole aligned tiles"):
        ops.tile_table(mask.view(-1).nonzero().view(-1), (256, 256), 128)
    with pytest.raises(ValueError, match="tile_table: tile_size is 32, expected 64 or 128"):
        ops.tile_table(whole, (128, 128), 32)
    with pytest.raises(ValueError, match=r"tile_table: shape is \[128\], expected \(rows, columns\)"):
        ops.tile_table(whole, (128,), 64)


# tile_weight_grad_


@pytest.mark.parametrize("tile_size", [64, 128])
@pytest.mark.parametrize("out_dtype", FLOATS, ids=name_of)
@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
def test_tiles_of_every_dtype(dtype, out_dtype, tile_size, place):
    device, backend = place
    call = make(device, dtype=dtype, out_dtype=out_dtype, tile_size=tile_size, tokens=(3, 11))
    if backend == "triton" and device == "cpu":  # the interpreter is slow
        call = make(
            device, dtype=dtype, out_dtype=out_dtype, tile_size=tile_size, tokens=(7,), shapes=((65, 3), (1, 130))
        )
    scale = torch.tensor([0.3], device=device)
    for options in ({}, {"accumulate": True}, {"scale": scale}, {"scale": scale, "accumulate": True}):
        sum_sq = torch.full((len(call.inputs),), math.nan, device=device)
        got = call.run(backend, **options, sum_sq=sum_sq)
        assert_bits(got, call.run("reference", **options))
        assert_sums(sum_sq, call, got)
    # Every slot of a tile is overwritten, and slots outside all tiles are unchanged.
    call.out[PADDING:-PADDING] = math.nan
    got = call.run(backend)
    assert got[PADDING:-PADDING].isfinite().all()
    assert_bits(got[:PADDING], call.out[:PADDING])
    assert_bits(got[-PADDING:], call.out[-PADDING:])


@pytest.mark.parametrize("tokens", [0, 1, 3, 63, 64, 65, 300])
def test_tiles_of_any_number_of_tokens(tokens, any_place):
    device, backend = any_place
    small = backend == "triton" and device == "cpu"
    for dtype in (torch.float32, torch.bfloat16):
        call = make(device, tokens=(tokens,), dtype=dtype, shapes=((70, 33),) if small else SHAPES)
        values, _ = call.exact()  # at most 64 * 300: integers that fp32 holds
        assert torch.equal(call.run(backend)[PADDING:-PADDING].double(), values)
        held = call.out[PADDING:-PADDING].double()
        assert torch.equal(call.run(backend, accumulate=True)[PADDING:-PADDING].double(), held + values)


@pytest.mark.parametrize("tile_size", [64, 128])
def test_tiles_sum_in_fp32(tile_size, any_place):
    """Against fp64, T tokens: each product and each addition rounds by 2^-24 at most of what is added up by then.

    That is T * 2^-24 of the sum of |g x|, in the worst case and any order; in truth it grows as sqrt(T). Operands of 24
    bits that are cut to TF32's 11 err by 2^-11 of one product each, far more where T is small.
    """
    device, backend = any_place
    tokens = (1, 5) if backend == "triton" and device == "cpu" else (1, 5, 70, 700)
    for n in tokens:
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            shapes = ((66, 70),) if len(tokens) == 2 else ((130, 77), (64, 200))
            call = make(device, tokens=(n,), dtype=dtype, tile_size=tile_size, draw=normals, shapes=shapes, density=1.0)
            values, sizes = call.exact()
            error = (call.run(backend)[PADDING:-PADDING].double() - values).abs()
            assert (error <= n * 2**-24 * sizes).all(), (n, dtype, (error / sizes).max().item() * 2**24)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["cuda", "triton"])
@pytest.mark.parametrize("tile_size", [64, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=name_of)
@pytest.mark.parametrize("side", [200, 512, 640, 768, 1280])  # into 8 parts to 2, of either size also into 3, or none
def test_tokens_in_parts_are_all_there(side, dtype, tile_size, backend):
    """Where tiles are few and tokens many, each tile's are cut into parts: of whole steps or not, some without any."""
    for n in (1024, 2048, 4097, 20001):
        call = make(
            "cuda", shapes=((side, side), (64, 200)), tokens=(n,), dtype=dtype, tile_size=tile_size, density=1.0
        )
        call.grad_outputs[1], call.inputs[1] = call.grad_outputs[1][:70], call.inputs[1][:70]
        values, _ = call.exact()
        sum_sq, flag = torch.full((2,), math.nan, device="cuda"), torch.zeros(1, device="cuda")
        got = call.run(backend, sum_sq=sum_sq, found_inf=flag)
        assert torch.equal(got[PADDING:-PADDING].double(), values), n
        assert_sums(sum_sq, call, got)
        assert flag.item() == 0
        assert torch.equal(call.run(backend)[PADDING:-PADDING].double(), values), n
        added = call.run(backend, accumulate=True, sum_sq=sum_sq)
        assert torch.equal(added[PADDING:-PADDING].double(), values + call.out[PADDING:-PADDING].double()), n
        assert_sums(sum_sq, call, added)
        call.inputs[0][n - 1, side - 1] = math.inf  # the last part of the last tile finds it
        call.run(backend, found_inf=flag)
        assert flag.item() == math.inf


def stack_mask(shape: tuple[int, int, int], tile_size: int) -> Tensor:
    """The active elements of random tiles of each matrix of a stack; the first has all, the last none."""
    experts, rows, columns = shape
    mask = MaskSet.random({str(e): (rows, columns) for e in range(experts)}, density=0.5, pattern=f"tile{tile_size}")
    dense = torch.stack([mask.bool(str(e)) for e in range(experts)])
    dense[0], dense[-1] = True, False
    return dense


@pytest.mark.parametrize("counts", [(5, 0, 9, 1), pytest.param((3000, 0, 5000, 20), marks=pytest.mark.gpu)], ids=str)
@pytest.mark.parametrize("tile_size", [64, 128])
@pytest.mark.parametrize("rows", [128, 200])
def test_tiles_of_experts(rows, tile_size, counts, any_place):
    """Of sorted tokens, with experts that have none, and tokens of no expert at the end."""
    device, backend = any_place
    generator = torch.Generator().manual_seed(0)
    experts, tokens, bounds = len(counts), sum(counts) + 3, [0, *itertools.accumulate(counts)]
    offsets = torch.tensor(bounds[1:], dtype=torch.int32)
    for dtype in (torch.float32, torch.bfloat16):
        tables, starts, ends, expected, first = [], [], [], [], 0
        grad_outputs, inputs = [], []
        for columns in (130,) if backend == "triton" and device == "cpu" else (130, 64):
            g, x = integers((tokens, rows), generator), integers((tokens, columns), generator)
            dense = stack_mask((experts, rows, columns), tile_size)
            positions = dense.view(-1).nonzero().view(-1)
            tables.append(ops.tile_table(positions, dense.shape, tile_size, first_slot=first))
            starts.append(sum(map(len, tables[:-1])))
            ends.append(starts[-1] + len(tables[-1]))
            first += len(positions)
            expected.append(torch.stack([g[a:b].T @ x[a:b] for a, b in itertools.pairwise(bounds)])[dense])
            grad_outputs.append(g.to(device, dtype))
            inputs.append(x.to(device, dtype))
        sum_sq = torch.full((len(inputs),), math.nan, device=device)
        for accumulate in (False, True):
            out = torch.full((first,), 7.0, device=device)
            operands = out, grad_outputs, inputs, torch.cat(tables).to(device), starts, ends
            options = {"accumulate": accumulate, "sum_sq": sum_sq, "token_offsets": offsets.to(device)}
            ops.tile_weight_grad_(*operands, tile_size=tile_size, backend=backend, **options)
            assert torch.equal(out.cpu(), torch.cat(expected) + 7.0 * accumulate)
            squares = [
                part.double().square().sum()
                for part in (torch.cat(expected) + 7.0 * accumulate).split([len(part) for part in expected])
            ]
            torch.testing.assert_close(sum_sq.cpu().double(), torch.stack(squares), rtol=2**-14, atol=0)


def test_tiles_of_matrices_that_share_their_input(any_place):
    device, backend = any_place
    shapes = ((70, 33),) * 3 if backend == "triton" and device == "cpu" else ((190, 140),) * 3
    call = make(device, shapes=shapes, tokens=(2, 9))
    call.inputs = [call.inputs[0]] * 3
    values, _ = call.exact()
    assert torch.equal(call.run(backend)[PADDING:-PADDING].double(), values)


def test_tiles_of_matrices_without_any_and_in_any_order(any_place):
    device, backend = any_place
    call = make(device, shapes=((65, 30), (64, 64), (3, 70)), density=1.0, tokens=(5,))
    call.starts[1], call.ends[1] = call.ends[1], call.ends[1]  # the second has no tiles now: its slots do not change
    sum_sq = torch.full((3,), math.nan, device=device)
    got = call.run(backend, sum_sq=sum_sq)
    assert_bits(got, call.run("reference"))
    second = call.slots()[1]
    assert_bits(got[second], call.out[second])
    assert sum_sq[1].item() == 0 and sum_sq[0] > 0 and sum_sq[2] > 0
    for values in (call.grad_outputs, call.inputs, call.starts, call.ends):
        values.reverse()
    flipped = torch.full((3,), math.nan, device=device)
    assert_bits(call.run(backend, sum_sq=flipped), got)
    assert torch.equal(flipped.flip(0), sum_sq)

    call.starts, call.ends = [0] * 3, [0] * 3
    assert_bits(call.run(backend, sum_sq=sum_sq), call.out)
    assert sum_sq.tolist() == [0, 0, 0]
    call.grad_outputs, call.inputs, call.starts, call.ends = [], [], [], []
    assert_bits(call.run(backend, sum_sq=torch.empty(0, device=device)), call.out)


def test_tiles_are_those_of_autograd(any_place):
    """A weight [out, in] of torch.nn.Linear, and one [in, out] of transformers' Conv1D, whose lists are exchanged."""
    device, backend = any_place
    call = make(device, shapes=((70, 33), (33, 70)), tokens=(2, 1, 13), density=1.0)
    grad, x = call.grad_outputs[0], call.inputs[0]
    linear = torch.zeros(70, 33, device=device, requires_grad=True)
    torch.nn.functional.linear(x, linear).backward(grad)
    conv1d = torch.zeros(33, 70, device=device, requires_grad=True)
    torch.addmm(torch.zeros(70, device=device), x.view(-1, 33), conv1d).backward(grad.view(-1, 70))
    call.grad_outputs, call.inputs = [grad, x], [x, grad]
    expected = torch.cat([linear.grad.view(-1), conv1d.grad.view(-1)])
    assert torch.equal(call.run(backend)[PADDING:-PADDING], expected)


@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
def test_tiles_are_the_same_on_every_run(dtype, any_place):
    device, backend = any_place
    small = backend == "triton" and device == "cpu"
    call = make(
        device, draw=normals, dtype=dtype, tokens=(20 if small else 300,), shapes=((70, 33),) if small else SHAPES
    )
    threads, results = torch.get_num_threads(), []
    for n in (1, 2, 3):
        torch.set_num_threads(n)
        sum_sq = torch.full((len(call.inputs),), math.nan, device=device)
        results.append((call.run(backend, sum_sq=sum_sq), sum_sq))
    torch.set_num_threads(threads)
    if (device, backend) == ("cpu", "reference"):  # torch's products may be cut by threads
        return
    for out, sum_sq in results[1:]:
        assert_bits(out, results[0][0])
        assert torch.equal(sum_sq, results[0][1])
    assert_sums(results[0][1], call, results[0][0])


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
def test_tiles_flag_what_is_not_finite(dtype, bad, any_place):
    device, backend = any_place
    call = make(device, dtype=dtype, shapes=((130, 130), (3, 70)), tokens=(5,), density=1.0)
    table = call.tiles.tolist()
    assert [t[:2] for t in table[:9]] == [[r, c] for r in (0, 64, 128) for c in (0, 64, 128)]
    call.tiles, call.starts, call.ends = call.tiles[[0, 9, 10]].contiguous(), [0, 1], [1, 3]
    flag = torch.tensor([0.5], device=device)
    expected = call.run(backend, found_inf=flag)
    assert flag.item() == 0.5  # unchanged
    call.grad_outputs[0][:, 64:] = bad  # next to the tile, where kernels continue to read
    call.inputs[0][:, 64:] = bad
    assert_bits(call.run(backend, found_inf=flag), expected)
    assert flag.item() == 0.5  # elements outside the tiles are not read
    call.inputs[1][4, 69] = bad
    call.run(backend, found_inf=flag)
    assert flag.item() == math.inf


def test_tiles_flag_an_overflow_of_the_stored_dtype(any_place):
    device, backend = any_place
    call = make(device, out_dtype=torch.float16, shapes=((3, 70),), tokens=(2,), density=1.0)
    flag = torch.zeros(1, device=device)
    call.run(backend, found_inf=flag)
    assert flag.item() == 0
    call.grad_outputs[0][1, 2], call.inputs[0][1, 66] = 1e3, 1e3
    got = call.run(backend, found_inf=flag)
    assert flag.item() == math.inf and got[PADDING + 2 * 70 + 66].item() == math.inf
    flag.zero_()
    call.run(backend, found_inf=flag, scale=torch.tensor([1e-3], device=device))
    assert flag.item() == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=name_of)
def test_tiles_opcheck(dtype, any_place):
    device, backend = any_place
    call = make(device, dtype=dtype, shapes=((5, 9), (66, 3)), tokens=(2, 2), density=1.0)
    torch.library.opcheck(
        torch.ops.sparse_opt.tile_weight_grad_.default,
        (call.out.nan_to_num(), call.grad_outputs, call.inputs, call.tiles, call.starts, call.ends),
        {
            "tile_size": 64,
            "accumulate": True,
            "scale": torch.ones(1, device=device),
            "sum_sq": torch.zeros(2, device=device),
            "found_inf": torch.zeros(1, device=device),
            "backend": backend,
        },
    )


BAD: dict[str, tuple[Callable[[Call], dict[str, object]], str]] = {
    "tile size": (lambda c: {"tile_size": 32}, "tile_size is 32, expected 64 or 128"),
    "tiles dtype": (
        lambda c: {"tiles": c.tiles.int()},
        r"tiles is torch.int32 of shape \[\d+, 4\], expected contiguous int64 \[tiles, 4\]",
    ),
    "lengths": (
        lambda c: {"inputs": c.inputs[1:]},
        "grad_outputs holds 2 and inputs 1 tensors, starts 2 and ends 2 numbers, expected equal numbers",
    ),
    "more tiles than there are": (
        lambda c: {"ends": [c.ends[0], c.ends[1] + 1]},
        r"matrix 1 has the tiles \[\d+, \d+\), expected within \[0, \d+\)",
    ),
    "shared tiles": (
        lambda c: {"starts": [0, 0]},
        "two matrices share tile 0; expected ranges of tiles that do not overlap",
    ),
    "leading sizes": (
        lambda c: {"inputs": [c.inputs[0][:2].contiguous(), c.inputs[1]]},
        r"grad_outputs\[0\] has shape \[5, 65\] and inputs\[0\] \[2, 70\], expected .* of the same leading sizes",
    ),
    "layout": (
        lambda c: {"inputs": [c.inputs[0].T.contiguous().T, c.inputs[1]]},
        r"inputs\[0\] of shape \[5, 70\] has strides \[1, 5\], expected contiguous",
    ),
    "operands of two dtypes": (
        lambda c: {"inputs": [x.half() for x in c.inputs]},
        r"inputs\[0\] is torch.float16, but grad_outputs\[0\] is torch.float32",
    ),
    "device": (lambda c: {"inputs": [c.inputs[0], c.inputs[1].to("meta")]}, r"inputs\[1\] is on meta, expected cpu"),
    "dtype of out": (lambda c: {"out": c.out.double()}, "out is torch.float64, expected"),
    "dtype of offsets": (
        lambda c: {"token_offsets": torch.tensor([5])},
        "token_offsets is torch.int64, expected int32",
    ),
    "sum_sq": (lambda c: {"sum_sq": torch.ones(3)}, "sum_sq has 3 elements, expected 2"),
}


@pytest.mark.parametrize("what", BAD)
def test_tiles_wrong_argument_is_named(what):
    call = make("cpu", shapes=((65, 70), (3, 64)), tokens=(5,), density=1.0)
    change, message = BAD[what]
    names = ("out", "grad_outputs", "inputs", "tiles", "starts", "ends")
    arguments = {name: getattr(call, name) for name in names} | {"tile_size": 64} | change(call)
    before = call.out.clone()
    with pytest.raises(ValueError, match="tile_weight_grad_: " + message):
        ops.tile_weight_grad_(*[arguments.pop(name) for name in names], **arguments)
    assert_bits(call.out, before)
