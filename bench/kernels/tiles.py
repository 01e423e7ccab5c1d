"""Benchmark of weight gradients under tile masks, against torch's dense matrix products.

X [tokens, columns] is an input of a layer, shared by q, k and v, and by gate and up; dY [tokens, rows] is the gradient
of a matrix's output. Each layer has its own X and dY, so that none is cached from another layer.

| work | calls |
|---|---|
| tile_weight_grad_ | one for each layer, similar to a backward pass, which collects tiles until they fill the GPU |
| | one for the matrices that share an input |
| | one for each matrix |
| torch.mm | one for each matrix, into a dense bf16 gradient that is kept |
| tile_weight_grad_, experts | one for the experts of a layer, whose tokens are sorted by expert |
| grouped_mm | torch's product for each expert, dense |

Compact gradients are fp32, the optimizer's default.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sparse_opt import MaskSet, ops
from sparse_opt.masks.patterns import PATTERNS

from ..harness import Work
from ..shapes import SHAPES, Shapes, total_numel
from .bounds import Traffic, of_tiles
from .cases import WrongResult, segments
from .recorder import TORCH, Recorder

OP, MM = "tile_weight_grad_", "torch.mm"
EXPERTS_OP, GROUPED_MM = "tile_weight_grad_, experts", "grouped_mm"
TILE_PATTERNS = ("tile64", "tile128")
# Densities of the masks: the one with targets, and a denser one for comparison. Experts have the first.
DENSITIES = (0.025, 0.1)
EXPERT_TOKENS = 8192
# A try on a CPU: experts and their tokens.
CPU_EXPERTS, CPU_TOKENS = 8, 64
# Operands are standard normal. The sum over t of T tokens has a standard deviation of sqrt(t), and an addition to it is
# rounded (truncated by tensor cores) by at most 2^-23 of it: T roundings of either sign add up to 2^-23 T. Truncation
# has one sign: over the T / 16 additions of a tensor core's sum that ends at 7 standard deviations, it adds up to
# T / 16 * 2^-24 * 3.5 sqrt(T), 10 * 2^-23 T at T = 8192. 32 covers both, on both sides. A token that is missing or
# counted twice is an error of about 1, 32 times as much at T = 8192.
SUM_ATOL = 32 * 2.0**-23  # for each token
# The sum of squares has positive terms, and each addition rounds by at most 2^-24 of the sum. No chain of additions is
# longer than this: a thread's share of a tile, then the tiles of a matrix of this shape.
SUM_RTOL = 2048 * 2.0**-24

# Projections of a layer that share an input, by their names in transformers.
_SHARED = {"q_proj": "attention", "k_proj": "attention", "v_proj": "attention", "gate_proj": "mlp", "up_proj": "mlp"}


@dataclass
class Operands:
    """bf16 X and dY of matrices, or of stacks of experts; matrices with a shared input refer to one tensor."""

    shapes: Mapping[str, tuple[int, ...]]  # (rows, columns), or (experts, rows, columns)
    inputs: list[Tensor]  # [tokens, columns] each
    grad_outputs: list[Tensor]  # [tokens, rows] each
    calls: dict[str, list[list[int]]]  # "layer" -> the adjacent matrices of each call
    most_tokens: int  # of a product
    token_offsets: Tensor | None = None  # [experts] int32, the ends of their tokens

    @classmethod
    def of_layers(cls, shapes: Shapes, tokens: int, generator: torch.Generator) -> Operands:
        """Standard normal values for the matrices of the layers of `llama_matrices`."""

        def call_of(kind: str, i: int, name: str) -> object:
            _, _, layer, _, projection, _ = name.split(".")
            return {"layer": layer, "input": (layer, _SHARED.get(projection, projection)), "matrix": i}[kind]

        calls = {}
        for kind in ("layer", "input", "matrix"):
            found = itertools.groupby(enumerate(shapes), key=lambda item: call_of(kind, *item))
            calls[kind] = [[i for i, _ in matrices] for _, matrices in found]
        sizes = list(shapes.values())
        inputs = [x for of_one in calls["input"] for x in [_draw(tokens, sizes[of_one[0]][1], generator)] * len(of_one)]
        return cls(shapes, inputs, [_draw(tokens, rows, generator) for rows, _ in sizes], calls, tokens)

    @classmethod
    def of_experts(cls, experts: int, tokens: int, generator: torch.Generator) -> Operands:
        """Standard normal values for the experts of one layer, each token at random ones."""
        shape = SHAPES["qwen3_30b_a3b"]
        hidden, intermediate, top_k = shape.hidden, shape.intermediate, shape.experts_per_token
        shapes = {"gate_up_proj": (experts, 2 * intermediate, hidden), "down_proj": (experts, hidden, intermediate)}
        chosen = torch.rand(tokens, experts, device=generator.device, generator=generator).topk(top_k).indices
        counts = torch.bincount(chosen.view(-1), minlength=experts)
        grad_outputs = [_draw(tokens * top_k, rows, generator) for _, rows, _ in shapes.values()]
        inputs = [_draw(tokens * top_k, columns, generator) for _, _, columns in shapes.values()]
        offsets = counts.cumsum(0).int()
        return cls(shapes, inputs, grad_outputs, {"layer": [[0, 1]]}, int(counts.max()), offsets)

    def nbytes(self) -> int:
        """Bytes of X and dY, of shared ones once."""
        return sum(tensor.nbytes for tensor in {id(t): t for t in (*self.inputs, *self.grad_outputs)}.values())

    def multiply(self, gradients: Sequence[Tensor]) -> None:
        """Compute torch's product of each matrix into its own gradient."""
        for grad_output, x, gradient in zip(self.grad_outputs, self.inputs, gradients, strict=True):
            torch.mm(grad_output.t(), x, out=gradient)

    def multiply_experts(self) -> list[Tensor]:
        """torch's gradients, [experts, rows, columns]."""
        pairs = zip(self.grad_outputs, self.inputs, strict=True)
        return [F.grouped_mm(g.t(), x, offs=self.token_offsets) for g, x in pairs]


def _draw(tokens: int, width: int, generator: torch.Generator) -> Tensor:
    return torch.randn(tokens, width, dtype=torch.bfloat16, device=generator.device, generator=generator)


class TileGradients:
    """The compact fp32 gradient of the operands under a random mask, computed by one backend at a time."""

    def __init__(self, operands: Operands, pattern: str, density: float) -> None:
        self.operands, self.pattern, self.density = operands, pattern, density
        self.tile_size, device = PATTERNS[pattern][0], operands.inputs[0].device
        mask = MaskSet.random(operands.shapes, density=density, pattern=pattern, seed=0)
        positions = [mask[name] for name in operands.shapes]
        self.slots, self.slot_ends = segments(map(len, positions))
        tables = [
            ops.tile_table(of_one.to(device), shape, self.tile_size, first_slot=slot)
            for of_one, shape, slot in zip(positions, operands.shapes.values(), self.slots, strict=True)
        ]
        self.starts, self.ends = segments(map(len, tables))
        self.tiles, self.out = torch.cat(tables), torch.empty(mask.nnz, device=device)
        self.sum_sq: Tensor | None = None  # as in the optimizer, which has no sums of experts
        self.found_inf: Tensor | None = None
        if operands.token_offsets is None:
            self.sum_sq, self.found_inf = torch.empty(len(tables), device=device), torch.zeros(1, device=device)

    def compute(self, backend: str, calls: str) -> None:
        """Compute all gradients, sums of squares and the flag, with a call for each of ``calls``."""
        operands = self.operands
        for matrices in operands.calls[calls]:
            where = slice(matrices[0], matrices[-1] + 1)
            ops.tile_weight_grad_(
                self.out,
                operands.grad_outputs[where],
                operands.inputs[where],
                self.tiles,
                self.starts[where],
                self.ends[where],
                tile_size=self.tile_size,
                sum_sq=None if self.sum_sq is None else self.sum_sq[where],
                found_inf=self.found_inf,
                token_offsets=operands.token_offsets,
                backend=backend,
            )

    @functools.cached_property
    def expected(self) -> Tensor:
        """The gradient of the reference."""
        self.compute("reference", "layer")
        return self.out.clone()

    def check(self, backend: str, calls: str) -> None:
        """Compare the gradients with the reference.

        Raises:
            WrongResult: an element differs by more than fp32 sums in two orders can, or a sum of squares is wrong.
        """
        expected, atol = self.expected, SUM_ATOL * self.operands.most_tokens
        self.out.fill_(float("nan"))
        if self.sum_sq is not None:
            self.sum_sq.fill_(float("nan"))
        self.compute(backend, calls)
        for i, (name, start, end) in enumerate(zip(self.operands.shapes, self.slots, self.slot_ends, strict=True)):
            what, found = f"{OP} on backend {backend}: {name}", self.out[start:end]
            wrong = ~((found - expected[start:end]).abs_() <= atol)  # negated, so that NaN counts as wrong
            if wrong.any():
                first = int(wrong.nonzero()[0])
                raise WrongResult(
                    f"{what}: {int(wrong.sum())} of {found.numel()} elements are further than {atol:.1e} from the "
                    f"reference; at {first} found {found[first].item()!r}, expected {expected[start + first].item()!r}"
                )
            if self.sum_sq is not None:
                squares, total = float(self.sum_sq[i]), float(found.double().square().sum())
                if not abs(squares - total) <= SUM_RTOL * total:
                    raise WrongResult(
                        f"{what}: sum of squares {squares!r}, expected {total!r} to a relative {SUM_RTOL:.1e}"
                    )
        if self.found_inf is not None and self.found_inf.item() != 0:
            raise WrongResult(f"{OP} on backend {backend}: found_inf is set, but every gradient is finite")

    def traffic(self) -> Traffic:
        return of_tiles(vars(self.operands) | vars(self))  # named as the op's arguments


def time_layers(recorder: Recorder, shapes: Shapes, tokens: Sequence[int], generator: torch.Generator) -> None:
    """Time the rows of the layers.

    Args:
        shapes: matrices with the names of `llama_matrices`; the embedding is skipped.
    """
    shapes = {name: shape for name, shape in shapes.items() if ".layers." in name}
    dense = [torch.empty(shape, dtype=torch.bfloat16, device=recorder.device) for shape in shapes.values()]
    for count in tokens:
        operands = Operands.of_layers(shapes, count, generator)
        for density in DENSITIES:
            few, works = density == DENSITIES[0], []
            if few:
                traffic = Traffic(operands.nbytes() + 2.0 * total_numel(shapes))
                multiply = functools.partial(operands.multiply, dense)
                works.append(recorder.work(MM, TORCH, None, multiply, traffic, tokens=count))
            for pattern in TILE_PATTERNS:
                gradients = TileGradients(operands, pattern, density)
                # How tiles are combined matters only if they are few.
                for kind in operands.calls if few else ("layer",):
                    works += _works(recorder, OP, gradients, kind, MM, tokens=count, calls=f"a call for each {kind}")
            recorder.time(works)


def time_experts(recorder: Recorder, generator: torch.Generator) -> Shapes:
    """Time the rows of one layer's experts, and return the shapes of their weights."""
    cpu = recorder.device.type == "cpu"
    experts, tokens = (CPU_EXPERTS, CPU_TOKENS) if cpu else (SHAPES["qwen3_30b_a3b"].experts, EXPERT_TOKENS)
    operands = Operands.of_experts(experts, tokens, generator)
    recorder.common = {**recorder.common, "numel": total_numel(operands.shapes)}
    works = [recorder.work(GROUPED_MM, TORCH, None, operands.multiply_experts, tokens=tokens)]
    for pattern in TILE_PATTERNS:
        gradients = TileGradients(operands, pattern, DENSITIES[0])
        works += _works(recorder, EXPERTS_OP, gradients, "layer", GROUPED_MM, tokens=tokens)
    recorder.time(works)
    return operands.shapes


def _works(recorder: Recorder, name: str, gradients: TileGradients, kind: str, peer: str, **case: Any) -> list[Work]:
    """The works of each backend, compared with torch's dense product."""
    dense = {"work": peer, "backend": TORCH, "density": None, "pattern": None, "calls": None}
    traffic = gradients.traffic()
    return [
        recorder.work(
            name,
            backend,
            gradients.density,
            functools.partial(gradients.compute, backend, kind),
            traffic,
            check=functools.partial(gradients.check, backend, kind),
            peers={peer: dense},
            pattern=gradients.pattern,
            **case,
        )
        for backend in recorder.backends
    ]
