"""Benchmark of weight gradients of linear layers under tile masks, against torch's dense matrix products.

| work | calls |
|---|---|
| tile_weight_grad_ | one for each layer, similar to a backward pass, which collects tiles until they fill the GPU |
| tile_weight_grad_, a call an input | one for the matrices that share an input |
| tile_weight_grad_, a call a matrix | one for each matrix |
| torch.mm | one for each matrix, into a dense bf16 gradient that is kept |
| torch.mm, masked_grad_gather_ | the same into a scratch buffer, followed by a gather under an element mask |

Compact gradients are fp32, the optimizer's default.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from sparse_opt import ops
from sparse_opt.ops.narrow import FRAME

from ..harness import Work
from ..shapes import Shapes, total_numel
from .bounds import Traffic
from .cases import WrongResult, check_bits
from .inputs import narrowed, random_active
from .recorder import TORCH, Recorder
from .tile_operands import Operands, TileMask, layer_of, linear_layers, operand_bytes, total_width

OP = "tile_weight_grad_"
TILE_PATTERNS = ("tile64", "tile128")
# Densities of the masks: the one with targets, and a denser one for comparison.
DENSITIES = (0.025, 0.1)
# All tiles active, at the first token count: the cost of computing dense gradients in tiles and keeping a part of each.
FULL_PATTERN, FULL_ROUNDS = "tile128", 3
# Few rounds: calls take up to 0.1 s each and vary little.
ROUNDS = 10
# Operands are standard normal. The sum over t of T tokens has a standard deviation of sqrt(t), and an addition to it is
# rounded (truncated by tensor cores) by at most 2^-23 of it: T roundings of either sign add up to 2^-23 T. Truncation
# has one sign: over the T / 16 additions of a tensor core's sum that ends at 7 standard deviations, it adds up to
# T / 16 * 2^-24 * 3.5 sqrt(T), 10 * 2^-23 T at T = 8192. 32 covers both, on both sides. A token that is missing or
# counted twice is an error of about 1, 32 times as much at T = 8192.
SUM_ATOL = 32 * 2.0**-23  # for each token
# The sum of squares has positive terms, and each addition rounds by at most 2^-24 of the sum. No chain of additions is
# longer than this: a thread's share of a tile, then the tiles of a matrix of this shape.
SUM_RTOL = 2048 * 2.0**-24


Calls = Literal["layer", "input", "matrix"]
CALLS: tuple[Calls, ...] = ("layer", "input", "matrix")
MM, GATHERED_MM = "torch.mm", "torch.mm, masked_grad_gather_"


class TileGradients:
    """The compact fp32 gradient of a mask, computed by one backend at a time."""

    def __init__(self, operands: Operands, mask: TileMask) -> None:
        self.operands, self.mask = operands, mask
        device, n = mask.tiles.device, len(operands.shapes)
        self.out, self.sum_sq = torch.empty(mask.nnz, device=device), torch.empty(n, device=device)
        self.found_inf = torch.zeros(1, device=device)
        layers = itertools.groupby(enumerate(operands.shapes), key=lambda item: layer_of(item[1]))
        self.calls: dict[Calls, list[list[int]]] = {
            "layer": [[i for i, _ in found] for _, found in layers],
            "input": [group.matrices for group in operands.groups],
            "matrix": [[i] for i in range(n)],
        }

    @functools.cached_property
    def expected(self) -> Tensor:
        """The expected gradient [nnz] fp32, from products of whole matrices."""
        found = torch.empty_like(self.out)
        for i, shape in enumerate(self.operands.shapes.values()):
            where = slice(self.mask.slots[i], self.mask.slots[i + 1])
            found[where] = self.operands.product(i)[self.mask.elements(i, shape)]
        return found

    @functools.cached_property
    def reference(self) -> Tensor:
        """The gradient of the first layer's slots, which are the first ones, computed by the reference."""
        first = self.calls["layer"][0]
        out = torch.empty(self.mask.slots[len(first)], device=self.out.device)
        self._call(first, out, "reference")
        return out

    def compute(self, backend: str, calls: Calls) -> None:
        """Compute all gradients, sums of squares and the flag, with a call for each of ``calls``."""
        for matrices in self.calls[calls]:
            where = slice(matrices[0], matrices[-1] + 1)
            self._call(matrices, self.out, backend, sum_sq=self.sum_sq[where], found_inf=self.found_inf)

    def _call(self, matrices: list[int], out: Tensor, backend: str, **sums: Any) -> None:
        where = slice(matrices[0], matrices[-1] + 1)  # the matrices of a call are adjacent
        ops.tile_weight_grad_(
            out,
            self.operands.grad_outputs[where],
            self.operands.inputs[where],
            self.mask.tiles,
            self.mask.starts[where],
            self.mask.ends[where],
            tile_size=self.mask.tile_size,
            backend=backend,
            **sums,
        )


def check(gradients: TileGradients, backend: str, calls: Calls) -> None:
    """Compare the gradients with products of whole matrices, and those of the first layer with the reference.

    Raises:
        WrongResult: an element differs by more than fp32 sums in two orders can, or a sum of squares is wrong.
    """
    operands, mask = gradients.operands, gradients.mask
    for written in (gradients.out, gradients.sum_sq):
        written.fill_(float("nan"))
    gradients.compute(backend, calls)
    atol = SUM_ATOL * operands.tokens
    for i, name in enumerate(operands.shapes):
        where = slice(mask.slots[i], mask.slots[i + 1])
        found = gradients.out[where]
        what = f"{OP} on backend {backend}: {name}"
        check_close(what, found, gradients.expected[where], atol, "torch.mm")
        if where.stop <= len(gradients.reference):
            check_close(what, found, gradients.reference[where], atol, "the reference")
        squares, expected = float(gradients.sum_sq[i]), float(found.double().square().sum())
        if not abs(squares - expected) <= SUM_RTOL * expected:
            raise WrongResult(f"{what}: sum of squares {squares!r}, expected {expected!r} to a relative {SUM_RTOL:.1e}")
    if gradients.found_inf.item() != 0:
        raise WrongResult(f"{OP} on backend {backend}: found_inf is set, but every gradient is finite")


def check_close(what: str, found: Tensor, expected: Tensor, atol: float, peer: str) -> None:
    """Raise WrongResult, with a message that begins with ``what``, unless all elements are within ``atol``."""
    wrong = ~((found - expected).abs_() <= atol)  # negated, so that NaN counts as wrong
    if wrong.any():
        first = int(wrong.nonzero()[0])
        raise WrongResult(
            f"{what}: {int(wrong.sum())} of {found.numel()} elements are further than {atol:.1e} from {peer}; at "
            f"{first} found {found[first].item()!r}, expected {expected[first].item()!r}"
        )


class GatheredGradients:
    """torch's product of each matrix into one scratch buffer, like reused gradient memory, then a gather from it."""

    def __init__(self, operands: Operands, density: float, generator: torch.Generator) -> None:
        self.operands = operands
        shapes, device = operands.shapes, generator.device
        size = max(rows * columns for rows, columns in shapes.values())
        scratch = torch.empty(size, dtype=torch.bfloat16, device=device)
        self.dense = [scratch[: rows * columns].view(rows, columns) for rows, columns in shapes.values()]
        self.wide = random_active(self.dense, density, generator)
        self.active = narrowed(self.wide)
        self.out = torch.empty(self.active.nnz, device=device)

    def __call__(self) -> None:
        for i in range(len(self.dense)):
            self.one(i)

    def one(self, i: int) -> None:
        active = self.active
        assert active.index_bases is not None
        bases = active.index_bases[i : i + active.nnz // FRAME + 1]
        torch.mm(self.operands.grad_outputs[i].t(), self.operands.inputs[i], out=self.dense[i])
        where = active.indices, [active.starts[i]], [active.ends[i]]
        ops.masked_grad_gather_(self.out, [self.dense[i]], *where, index_bases=bases)

    def check(self) -> None:
        """Compare the gathered elements with those of the product, bit by bit.

        Raises:
            WrongResult: a bit differs.
        """
        self.out.fill_(float("nan"))
        for i, name in enumerate(self.operands.shapes):
            self.one(i)
            where = slice(self.wide.starts[i], self.wide.ends[i])
            expected = self.dense[i].view(-1)[self.wide.indices[where].long()].float()
            check_bits(f"torch.mm, then masked_grad_gather_: {name}", self.out[where], expected)

    @property
    def bound_bytes(self) -> float:
        """Bytes of operands read once, indices and fp32 gradients; the scratch buffer may stay in a cache."""
        return operand_bytes(self.operands) + self.active.nnz * (2.0 + 4.0)


def why_absent(shapes: Shapes, tokens: int, device: torch.device) -> str:
    """Empty if everything fits into the GPU's memory, else the reason why not; CPU sizes always fit."""
    if device.type != "cuda":
        return ""
    # Operands, dense bf16 gradients, and the actual and expected fp32 gradients of all tiles. The positions of a
    # matrix, its product and the comparison need more memory.
    needed = 1.1 * (2 * tokens * total_width(shapes) + (2 + 4 + 4) * total_numel(shapes))
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(device)
    return "" if needed < free else f"needs {needed / 2**30:.1f} GiB of GPU memory, {free / 2**30:.1f} are free"


def time_rows(recorder: Recorder, shapes: Shapes, tokens: Sequence[int], generator: torch.Generator) -> None:
    """Time all rows, or note why they do not fit.

    Args:
        shapes: matrices with the names of `llama_matrices`; the embedding is skipped.
        tokens: token counts, the largest first.
    """
    shapes = linear_layers(shapes)
    if why := why_absent(shapes, tokens[0], recorder.device):
        recorder.run.note(f"not timed: weight gradients, {tokens[0]} tokens: {why}")
        return
    for works, n_rounds in comparisons(recorder, shapes, tokens, generator):
        recorder.time(works, min(n_rounds, recorder.n_rounds))
        works.clear()  # free their tensors before the next are made


def comparisons(
    recorder: Recorder, shapes: Shapes, tokens: Sequence[int], generator: torch.Generator
) -> Iterator[tuple[list[Work], int]]:
    """Yield (works to be timed in turns; their maximum number of rounds)."""
    operands = Operands.random(shapes, tokens[0], generator)
    dense = [torch.empty(shape, dtype=torch.bfloat16, device=recorder.device) for shape in shapes.values()]
    masks = {
        density: [TileMask.random(shapes, pattern, density, generator) for pattern in TILE_PATTERNS]
        for density in DENSITIES
    }
    for count in tokens:
        first = operands.first(count)
        for density in DENSITIES:
            works = _dense_works(recorder, first, dense, density, generator) if density == DENSITIES[0] else []
            for mask in masks[density]:
                works += _tile_works(recorder, first, mask)
            yield works, ROUNDS
    masks.clear()
    dense.clear()
    yield _tile_works(recorder, operands, TileMask.random(shapes, FULL_PATTERN, 1.0, generator)), FULL_ROUNDS


_TO_MM = {"torch.mm": {"work": MM, "backend": TORCH, "density": None, "pattern": None, "calls": None}}


def _dense_works(
    recorder: Recorder, operands: Operands, dense: list[Tensor], density: float, generator: torch.Generator
) -> list[Work]:
    traffic = Traffic(operand_bytes(operands) + 2.0 * total_numel(operands.shapes))
    plain = functools.partial(dense_gradients, operands, dense)
    gathered = GatheredGradients(operands, density, generator)
    backend = recorder.auto("masked_grad_gather_")
    tokens = operands.tokens
    return [
        recorder.work(MM, TORCH, None, plain, traffic, tokens=tokens),
        recorder.work(
            GATHERED_MM,
            backend,
            density,
            gathered,
            Traffic(gathered.bound_bytes),
            check=gathered.check,
            peers=_TO_MM,
            tokens=tokens,
        ),
    ]


def _tile_works(recorder: Recorder, operands: Operands, mask: TileMask) -> list[Work]:
    works = []
    gradients, traffic = TileGradients(operands, mask), Traffic(mask.bound_bytes(operands))
    for backend in recorder.backends:
        # How tiles are combined matters only if they are few.
        for calls in CALLS if mask.density == DENSITIES[0] else CALLS[:1]:
            works.append(
                recorder.work(
                    OP,
                    backend,
                    mask.density,
                    functools.partial(gradients.compute, backend, calls),
                    traffic,
                    check=functools.partial(check, gradients, backend, calls),
                    peers=_TO_MM,
                    pattern=mask.pattern,
                    tokens=operands.tokens,
                    calls=f"a call for each {calls}",
                )
            )
    return works


def dense_gradients(operands: Operands, dense: Sequence[Tensor]) -> None:
    """Compute torch's product of each matrix into its own gradient."""
    for grad_output, x, grad in zip(operands.grad_outputs, operands.inputs, dense, strict=True):
        torch.mm(grad_output.t(), x, out=grad)
