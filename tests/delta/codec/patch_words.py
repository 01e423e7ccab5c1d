"""Tensors of any bits, tensors that differ from them in some, and patches with damage."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from sparse_opt.delta.codec import LEVELS, Patch
from sparse_opt.delta.codec.words import RAW_BIT, word_kind

_SIGNED = {1: np.int8, 2: np.int16, 4: np.int32, 8: np.int64}


def name_of(dtype: torch.dtype) -> str:
    """For test ids."""
    return str(dtype).removeprefix("torch.")


def bits(tensor: Tensor) -> Tensor:
    """Its words as integers, on the CPU: NaNs and zeros compare by their bits."""
    return tensor.cpu().view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])


def any_words(source: np.random.Generator, numel: int, dtype: torch.dtype) -> Tensor:
    """[numel], any bits: NaN payloads, both zeros, infinities and denormals are among them; bools are 0 or 1."""
    if dtype == torch.bool:
        return torch.from_numpy(source.integers(0, 2, numel).astype(bool))
    return torch.frombuffer(bytearray(source.bytes(numel * dtype.itemsize)) or bytearray(8), dtype=dtype)[
        :numel
    ].clone()


def changed_words(source: np.random.Generator, old: Tensor, density: float, step: int | None) -> Tensor:
    """A copy with about `density` of the words changed: by up to `step` each way, or to any bits where it is None."""
    new = old.clone()
    words = bits(new).numpy()
    (where,) = (source.random(len(words)) < density).nonzero()
    if old.dtype == torch.bool:
        words[where] ^= 1
    elif step is None:
        words[where] = source.integers(0, 256, (len(where), old.element_size()), dtype=np.uint8).view(words.dtype)[:, 0]
    else:
        by = source.integers(1, step + 1, len(where)) * source.choice([-1, 1], len(where))
        words[where] += by.astype(_SIGNED[old.element_size()]).view(words.dtype)
    return new


def trained_words(source: np.random.Generator, numel: int, scale: float) -> tuple[Tensor, Tensor]:
    """bfloat16 [numel] before and after a step of about `scale` in fp32 master weights of deviation 0.02."""
    master = source.standard_normal(numel, dtype=np.float32) * np.float32(0.02)
    moved = master + source.standard_normal(numel, dtype=np.float32) * np.float32(scale)
    return torch.from_numpy(master).bfloat16(), torch.from_numpy(moved).bfloat16()


UNIT = {"packed": 4, "tight": 2}


def as_op_arguments(patch: Patch, device: torch.device, offsets: Tensor | None = None) -> list[object]:
    """The arguments of patch_apply_ after the tensors."""
    kind, tables = word_kind(patch.dtype), patch.tables
    arrays = [None] * 4 if tables is None else [tables.row_of, tables.rows, tables.class_table, tables.values]
    return [
        None if patch.heads is None else patch.heads.to(device),
        patch.sizes.to(device),
        (patch.offsets() if offsets is None else offsets).to(device),
        patch.records.to(device),
        LEVELS.index(patch.level),
        kind.is_float,
        kind.class_shift,
        patch.width,
        *(None if array is None else torch.from_numpy(np.ascontiguousarray(array)).to(device) for array in arrays),
    ]


def records_of(patch: Patch) -> list[np.ndarray]:
    offsets = patch.offsets().tolist()
    return [patch.records.numpy()[a:b] for a, b in pairwise(offsets)]


def with_record(patch: Patch, tile: int, record: np.ndarray, raw: bool, head: int | None) -> Patch:
    """`patch` whose tile `tile` has another record and head, and the size that fits them."""
    records = records_of(patch)
    records[tile] = record
    sizes = patch.sizes.numpy().copy()
    sizes[tile] = len(record) // UNIT[patch.level] | (RAW_BIT if raw else 0)
    heads = None if patch.heads is None else patch.heads.numpy().copy()
    if heads is not None:
        heads[tile] = head
    return replace(
        patch,
        records=torch.from_numpy(np.concatenate(records)),
        sizes=torch.from_numpy(sizes),
        heads=None if heads is None else torch.from_numpy(heads),
    )


def damaged(source: np.random.Generator, patch: Patch) -> tuple[Patch, int]:
    """The patch with one tile damaged, mostly slightly, and the tile."""
    tile = int(source.integers(len(patch.sizes)))
    record = records_of(patch)[tile].copy()
    unit = UNIT[patch.level]
    raw = patch.level == "tight" and bool(int(patch.sizes[tile]) & RAW_BIT)
    head = None if patch.heads is None else int(patch.heads[tile])
    way = source.integers(6)
    if way == 0:
        record = record[: source.integers(len(record) // unit + 1) * unit]
    elif way == 1:
        record = np.concatenate([record, source.integers(0, 2, source.integers(1, 4) * unit).astype(np.uint8)])
    elif way == 2 and head is not None:
        head = head ^ 1 << int(source.integers(16)) if source.integers(2) else int(source.integers(2**16))
    elif way == 2 and patch.level == "tight":
        raw = not raw
    elif len(record):
        for at in source.integers(len(record), size=source.integers(1, 3)):
            record[at] = source.integers(256) if way == 3 else record[at] ^ 1 << source.integers(8)
    return with_record(patch, tile, record, raw, head), tile
