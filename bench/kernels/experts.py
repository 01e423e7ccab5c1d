"""Benchmark of weight gradients of one layer's experts under a tile mask, against torch's dense grouped products."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sparse_opt import MaskSet, ops

from ..shapes import QWEN3_30B_A3B_SIZES, total_numel
from .bounds import Traffic
from .inputs import segments
from .recorder import TORCH, Recorder
from .tiles import SUM_ATOL, check_close

OP, GROUPED_MM = "tile_weight_grad_, experts", "grouped_mm"
PATTERNS, DENSITY, TOKENS = ("tile64", "tile128"), 0.025, 8192
# A try on a CPU: experts and their tokens.
CPU_EXPERTS, CPU_TOKENS = 8, 64


class ExpertGradients:
    """Weight gradients of the experts of one layer: bf16 operands, fp32 compact gradients."""

    def __init__(self, experts: int, tokens: int, generator: torch.Generator) -> None:
        device, sizes = generator.device, QWEN3_30B_A3B_SIZES
        hidden, intermediate, top_k = sizes["hidden"], sizes["expert_intermediate"], sizes["experts_per_token"]
        self.shapes = {
            "gate_up_proj": (experts, 2 * intermediate, hidden),
            "down_proj": (experts, hidden, intermediate),
        }
        chosen = torch.rand(tokens, experts, device=device, generator=generator).topk(top_k).indices
        counts = torch.bincount(chosen.view(-1), minlength=experts)
        self.token_offsets, self.most_tokens = counts.cumsum(0).int(), int(counts.max())

        def draw(width: int) -> Tensor:
            shape = tokens * top_k, width
            return torch.randn(shape, dtype=torch.bfloat16, device=device, generator=generator)

        self.grad_outputs = [draw(rows) for _, rows, _ in self.shapes.values()]
        self.inputs = [draw(columns) for _, _, columns in self.shapes.values()]

    def dense(self) -> list[Tensor]:
        """torch's gradients, [experts, rows, columns]."""
        pairs = zip(self.grad_outputs, self.inputs, strict=True)
        return [F.grouped_mm(g.t(), x, offs=self.token_offsets) for g, x in pairs]


class Tiled:
    """The arguments of the op for a random mask."""

    def __init__(self, gradients: ExpertGradients, pattern: str) -> None:
        self.gradients = gradients
        device = gradients.token_offsets.device
        self.tile_size = int(pattern.removeprefix("tile"))
        flat = {name: (experts * rows, columns) for name, (experts, rows, columns) in gradients.shapes.items()}
        mask = MaskSet.random(flat, density=DENSITY, pattern=pattern, seed=0)
        self.positions = [mask[name].to(device).long() for name in flat]
        self.slots, _ = segments(map(len, self.positions))
        tables = [
            ops.tile_table(positions, shape, self.tile_size, first_slot=slot)
            for positions, shape, slot in zip(self.positions, flat.values(), self.slots, strict=True)
        ]
        self.starts, self.ends = segments(map(len, tables))
        self.tiles = torch.cat(tables)
        self.out = torch.empty(mask.nnz, device=device)

    def compute(self, backend: str) -> None:
        ops.tile_weight_grad_(
            self.out,
            self.gradients.grad_outputs,
            self.gradients.inputs,
            self.tiles,
            self.starts,
            self.ends,
            tile_size=self.tile_size,
            token_offsets=self.gradients.token_offsets,
            backend=backend,
        )

    def check(self, backend: str) -> None:
        """Compare with the reference. Raises WrongResult: an element is further off than sums in two orders can be."""
        self.compute("reference")
        expected = self.out.clone()
        self.out.fill_(float("nan"))
        self.compute(backend)
        check_close(
            f"{OP} on backend {backend}", self.out, expected, SUM_ATOL * self.gradients.most_tokens, "the reference"
        )

    def bound_bytes(self) -> float:
        """bf16 operands of tiles, each element read once, and fp32 gradients written; all experts with equal tokens."""
        widths, experts = 0, len(self.gradients.token_offsets)
        for (_, rows, columns), start, end in zip(self.gradients.shapes.values(), self.starts, self.ends, strict=True):
            first_row, first_column = self.tiles[start:end, 0], self.tiles[start:end, 1]
            widths += len(first_row.unique()) + len((first_row // rows * columns + first_column).unique())
        tokens = len(self.gradients.inputs[0]) / experts
        return 2.0 * tokens * widths * self.tile_size + 4.0 * self.out.numel()


def time_rows(recorder: Recorder, generator: torch.Generator) -> None:
    """Time the rows."""
    cpu = recorder.device.type == "cpu"
    experts, tokens = (CPU_EXPERTS, CPU_TOKENS) if cpu else (QWEN3_30B_A3B_SIZES["experts"], TOKENS)
    gradients = ExpertGradients(experts, tokens, generator)
    recorder.common = {**recorder.common, "numel": total_numel(gradients.shapes)}
    peers: dict[str, Any] = {GROUPED_MM: {"work": GROUPED_MM, "backend": TORCH, "density": None, "pattern": None}}
    works = [recorder.work(GROUPED_MM, TORCH, None, gradients.dense, tokens=tokens)]
    for pattern in PATTERNS:
        tiled = Tiled(gradients, pattern)
        traffic = Traffic(tiled.bound_bytes())
        for backend in recorder.backends:
            works.append(
                recorder.work(
                    OP,
                    backend,
                    DENSITY,
                    functools.partial(tiled.compute, backend),
                    traffic,
                    check=functools.partial(tiled.check, backend),
                    peers=peers,
                    pattern=pattern,
                    tokens=tokens,
                )
            )
    recorder.time(works)
