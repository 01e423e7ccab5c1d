"""Inputs for the ops' tests: lists of odd-shaped tensors, masks of every kind, and copies of them for each backend."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

from sparse_opt import ops
from sparse_opt.masks.patterns import expand_units
from sparse_opt.ops import STEP_OPS, narrow_indices, tile_table
from sparse_opt.ops.narrow import widened
from sparse_opt.tensors import as_bits

SHAPES = [(7, 33), (1,), (129,), (4, 5, 6), (64, 64), (3, 1030)]
MASKS = ("random", "empty", "full", "single", "ragged", "some-empty")
# How indices are stored: one for each element, in two bytes, or one for each run of so many.
LAYOUTS = ("element", "narrow", "run16", "run64")

# Values of the step ops' options, by name. A bool option may be valid only with these values of the others.
OPTIONS = {"beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.1, "momentum": 0.9, "dampening": 0.1}
BOOL_OPTIONS = {"nesterov": {"nesterov": True, "dampening": 0.0}}
# The step ops with other options: without each optional state, and with each bool option.
VARIANTS = [
    (op.name, options)
    for op in STEP_OPS.values()
    for options in [
        *({option: 0.0, "dampening": 0.0} for option in op.optional.values()),
        *(BOOL_OPTIONS[option] for option, default in op.options.items() if isinstance(default, bool)),
    ]
]


def half_of(*lists: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Every other combination of values of three lists or more: all pairs of values of any two lists are among them."""
    numbered = itertools.product(*(enumerate(values) for values in lists))
    return [tuple(value for _, value in chosen) for chosen in numbered if sum(i for i, _ in chosen) % 2 == 0]


def name_of(value: object) -> str:
    """For test ids."""
    return str(value).removeprefix("torch.")


def runs_of(kind: str, count: int, i: int, generator: torch.Generator) -> Tensor:
    """Which of `count` runs are active; with runs of one element, which elements."""
    if count == 0 or kind == "empty" or (kind == "some-empty" and i % 2):
        return torch.empty(0, dtype=torch.int64)
    if kind == "full":
        return torch.arange(count)
    if kind == "single":
        return torch.tensor([count - 1])
    if kind == "ragged":  # the first, the last, and a stretch that ends inside a vector
        return torch.unique(torch.cat([torch.arange(min(count, 5)), torch.arange(max(0, count - 3), count)]))
    density = 0.01 if kind == "far-apart" else 0.2
    return (torch.rand(count, generator=generator) < density).nonzero().view(-1)


def first_positions(kind: str, numel: int, i: int, generator: torch.Generator, run_length: int) -> Tensor:
    """The starts of the active runs, none of them aligned. In every other tensor the last run ends with the tensor."""
    shift = 0 if i % 2 else numel % run_length
    return runs_of(kind, numel // run_length, i, generator) * run_length + shift


@dataclass
class Case:
    """One call's dense tensors and compact buffers. The first and last run of slots belong to no segment.

    Tiles are those of dense_grads[i]^T @ params[i], where these have two dimensions or more.
    """

    params: list[Tensor]
    dense_grads: list[Tensor]
    indices: Tensor
    starts: list[int]
    ends: list[int]
    grad: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    master: Tensor
    lr: Tensor
    steps: Tensor
    tiles: Tensor
    tile_starts: list[int]
    tile_ends: list[int]
    tile_grad: Tensor
    run_length: int = 1
    index_bases: Tensor | None = None
    extra: dict[str, Tensor] = field(default_factory=dict)

    @property
    def states(self) -> tuple[Tensor, Tensor]:
        """Compact buffers for the states of a step op."""
        return self.exp_avg, self.exp_avg_sq

    @property
    def nnz(self) -> int:
        return self.indices.numel() * self.run_length

    @property
    def numel(self) -> int:
        """Of all dense tensors."""
        return sum(p.numel() for p in self.params)

    @property
    def layout(self) -> dict[str, object]:
        """The arguments that describe the layout of `indices`."""
        return {"run_length": self.run_length, "index_bases": self.index_bases}

    def positions(self, i: int) -> Tensor:
        """The active elements of tensor i, one by one."""
        if self.index_bases is not None:
            return widened(self.indices, self.index_bases, i, self.starts[i], self.ends[i]).long()
        runs = self.indices[self.starts[i] // self.run_length : self.ends[i] // self.run_length].long()
        return torch.cat([torch.arange(n, n + self.run_length) for n in [0, *runs.tolist()]])[self.run_length :]

    def taken(self) -> Tensor:
        """The active elements of the parameters as a compact buffer, with zeros outside of all segments."""
        compact = torch.zeros(self.nnz, dtype=self.params[0].dtype, device=self.indices.device)
        for i, (param, start, end) in enumerate(zip(self.params, self.starts, self.ends, strict=True)):
            compact[start:end] = param.view(-1)[self.positions(i).to(param.device)]
        return compact

    def clone(self) -> Case:
        def copy(value):
            if isinstance(value, Tensor):
                return value.clone()
            if isinstance(value, dict):
                return {k: copy(v) for k, v in value.items()}
            return [copy(v) for v in value] if isinstance(value, list) else value

        return Case(**{f.name: copy(getattr(self, f.name)) for f in fields(self)})

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor by a name for messages."""
        found: dict[str, Tensor] = {}
        for f in fields(self):
            value = getattr(self, f.name)
            if isinstance(value, Tensor):
                found[f.name] = value
            elif isinstance(value, dict):
                found.update(value)
            elif isinstance(value, list) and value and isinstance(value[0], Tensor):
                found.update({f"{f.name}[{i}]": t for i, t in enumerate(value)})
        return found


def random_tiles(widths: list[int], seed: int) -> tuple[Tensor, list[int], list[int], int]:
    """Tables, starts, ends and slots of two to four tiles of 64 of each square matrix of these widths, or its one."""
    generator = torch.Generator().manual_seed(seed)
    tables, ends, slots = [torch.empty(0, 4, dtype=torch.int64)], [0], 0
    for width in widths:
        n_tiles = (-(-width // 64)) ** 2
        count = int(torch.randint(2, 5, (1,), generator=generator))
        chosen = torch.randperm(n_tiles, generator=generator)[:count].sort().values
        positions = expand_units(chosen, (width, width), "tile64")
        tables.append(tile_table(positions, (width, width), 64, first_slot=slots))
        slots += positions.numel()
        ends.append(ends[-1] + len(tables[-1]))
    return torch.cat(tables), ends[:-1], ends[1:], slots


def make(
    device: torch.device,
    *,
    dtype: torch.dtype = torch.float32,
    grad_dtype: torch.dtype | None = None,
    moment_dtype: torch.dtype = torch.float32,
    index_dtype: torch.dtype = torch.int32,
    mask: str = "random",
    step: int = 3,
    shapes: list[tuple[int, ...]] | None = None,
    seed: int = 0,
    layout: str = "element",
) -> Case:
    run_length = int(layout.removeprefix("run")) if layout.startswith("run") else 1
    generator = torch.Generator().manual_seed(seed)
    shapes = SHAPES if shapes is None else shapes
    grad_dtype = grad_dtype or dtype

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    picked = [first_positions(mask, torch.Size(s).numel(), i, generator, run_length) for i, s in enumerate(shapes)]
    counts = [p.numel() * run_length for p in picked]
    ends = [run_length + sum(counts[: i + 1]) for i in range(len(counts))]
    starts = [e - c for e, c in zip(ends, counts, strict=True)]
    outside = torch.zeros(1, dtype=torch.int64)
    indices, index_bases = torch.cat([outside, *picked, outside]).to(index_dtype), None
    if layout == "narrow":
        indices, index_bases = narrow_indices(indices, starts, ends)
    nnz = indices.numel() * run_length
    params = [randn(*s).mul_(0.02).to(dtype) for s in shapes]
    tiles, tile_starts, tile_ends, tile_slots = random_tiles([s[-1] for s in shapes if len(s) > 1], seed)
    return Case(
        params=[p.to(device) for p in params],
        dense_grads=[randn(*s).to(grad_dtype).to(device) for s in shapes],
        indices=indices.to(device),
        starts=starts,
        ends=ends,
        grad=randn(nnz).to(grad_dtype).to(device),
        exp_avg=randn(nnz).mul_(0.1).to(moment_dtype).to(device),
        exp_avg_sq=randn(nnz).square_().mul_(0.01).to(moment_dtype).to(device),
        master=randn(nnz).mul_(0.02).to(device),
        lr=torch.tensor([1e-2], device=device),
        steps=torch.tensor([float(step + 5 * i) for i in range(len(shapes))], device=device),
        tiles=tiles.to(device),
        tile_starts=tile_starts,
        tile_ends=tile_ends,
        tile_grad=torch.ones(tile_slots, device=device),
        run_length=run_length,
        index_bases=None if index_bases is None else index_bases.to(device),
    )


def step_options(op: str, **changes: object) -> dict[str, object]:
    """The options of a step op: those of OPTIONS, else the op's defaults, and changes."""
    return {**STEP_OPS[op].options, **{n: OPTIONS[n] for n in STEP_OPS[op].options if n in OPTIONS}, **changes}


def step_call(
    op: str, case: Case, *, compact: bool = True, master: bool = False, **changes: object
) -> tuple[tuple[object, ...], dict[str, object]]:
    """The arguments of a step op on a case; `changes` are options of the op or keywords that all step ops have.

    States that the options do not use are None.
    """
    options = step_options(op, **changes)
    used = STEP_OPS[op].used_states(options)
    states = (state if name in used else None for name, state in zip(STEP_OPS[op].states, case.states, strict=False))
    gradient = {"grad": case.grad} if compact else {"dense_grads": case.dense_grads}
    keywords = {**gradient, "master": case.master if master else None, **case.layout, **case.extra, **options}
    return (case.params, case.indices, case.starts, case.ends, *states, case.lr, case.steps), keywords


def run_step(op: str, case: Case, backend: str, **how: object) -> None:
    """Call a step op of `sparse_opt.ops` with the arguments of `step_call`."""
    arguments, keywords = step_call(op, case, **how)
    getattr(ops, op)(*arguments, **keywords, backend=backend)


def bits_of(t: Tensor) -> Tensor:
    """NaN payloads and signed zeros included."""
    return as_bits(t.contiguous())


def behind_its_beginning(t: Tensor) -> Tensor:
    """The same values, one element after the start of the memory, where vector accesses are not allowed."""
    flat = t.reshape(-1)
    return torch.cat([flat[:1], flat])[1:].view(t.shape)


def assert_same_bits(got: Case, expected: Case, context: str = "") -> None:
    other = expected.tensors()
    for name, tensor in got.tensors().items():
        differ = bits_of(tensor) != bits_of(other[name])
        # The payload of a NaN result depends on the hardware; that the result is NaN does not.
        if tensor.is_floating_point():
            differ &= ~(tensor.reshape(-1).isnan() & other[name].reshape(-1).isnan())
        if differ.any():
            at = differ.nonzero()[0].item()
            raise AssertionError(
                f"{context} {name}[{at}] is {tensor.reshape(-1)[at].item()!r}, the reference has "
                f"{other[name].reshape(-1)[at].item()!r}; {int(differ.sum())} of {tensor.numel()} differ"
            )
