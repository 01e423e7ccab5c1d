"""Tensors of any bits, tensors that differ from them in some, and patches with damage."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from sparse_opt.delta.codec import Patch
from sparse_opt.delta.codec.words import RAW_BIT, RECORD_UNIT, word_kind

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


def as_op_arguments(patch: Patch, device: torch.device, offsets: Tensor | None = None) -> list[object]:
    """The arguments of patch_apply_ after the tensors."""
    kind, tables = word_kind(patch.dtype), patch.tables
    arrays = [tables.row_of, tables.rows, tables.class_table, tables.values]
    return [
        patch.sizes.to(device),
        (patch.offsets() if offsets is None else offsets).to(device),
        patch.records.to(device),
        kind.is_float,
        kind.class_shift,
        *(torch.from_numpy(np.ascontiguousarray(array)).to(device) for array in arrays),
    ]


def records_of(patch: Patch) -> list[np.ndarray]:
    offsets = patch.offsets().tolist()
    return [patch.records.numpy()[a:b] for a, b in pairwise(offsets)]


def with_record(patch: Patch, tile: int, record: np.ndarray, raw: bool) -> Patch:
    """`patch` whose tile `tile` has another record, and the size that fits it."""
    records = records_of(patch)
    records[tile] = record
    sizes = patch.sizes.numpy().copy()
    sizes[tile] = len(record) // RECORD_UNIT | (RAW_BIT if raw else 0)
    return replace(patch, records=torch.from_numpy(np.concatenate(records)), sizes=torch.from_numpy(sizes))


def damaged(source: np.random.Generator, patch: Patch) -> tuple[Patch, int]:
    """The patch with one tile damaged, mostly slightly, and the tile."""
    tile, unit = int(source.integers(len(patch.sizes))), RECORD_UNIT
    record = records_of(patch)[tile].copy()
    raw = bool(int(patch.sizes[tile]) & RAW_BIT)
    way = source.integers(6)
    if way == 0:
        record = record[: source.integers(len(record) // unit + 1) * unit]
    elif way == 1:
        record = np.concatenate([record, source.integers(0, 2, source.integers(1, 4) * unit).astype(np.uint8)])
    elif way == 2:
        raw = not raw
    elif len(record):
        for at in source.integers(len(record), size=source.integers(1, 3)):
            record[at] = source.integers(256) if way == 3 else record[at] ^ 1 << source.integers(8)
    return with_record(patch, tile, record, raw), tile
