"""The named tensors of a model as masks and delta logs see them: ties found, bits hashed.

Digests are xxh3_128. They find damage and mix-ups, not forgery.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import xxhash
from torch import Tensor, nn


def dtype_name(tensor: Tensor) -> str:
    """`bfloat16`, not `torch.bfloat16`."""
    return str(tensor.dtype).removeprefix("torch.")


def is_wrapper(tensor: Tensor) -> bool:
    """True for tensors made of other tensors (DTensor, quantized subclasses), which have no bits of their own."""
    return hasattr(type(tensor), "__tensor_flatten__")


def named_parameters_of(
    model_or_named: nn.Module | Mapping[str, Tensor] | Iterable[tuple[str, Tensor]],
) -> dict[str, Tensor]:
    """Name -> parameter, every name of a tied parameter included, in the model's order."""
    if isinstance(model_or_named, nn.Module):
        return dict(model_or_named.named_parameters(remove_duplicate=False))
    return dict(model_or_named)


def canonical_names(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Name -> the first name under which the same storage is seen; a tensor that is not tied maps to itself."""
    first: dict[Any, str] = {}
    return {name: first.setdefault(_storage_key(tensor), name) for name, tensor in tensors.items()}


def _storage_key(tensor: Tensor) -> Any:
    if not _has_address(tensor):
        return id(tensor)
    # A lazy conjugate or negative has the address of the tensor that it is a view of, and other bits.
    lazy = tensor.is_conj(), tensor.is_neg()
    return (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, lazy)


def _has_address(tensor: Tensor) -> bool:
    """Whether the tensor has memory; meta, empty, freed and wrapper tensors have none that would tell them apart."""
    return not (tensor.is_meta or tensor.numel() == 0 or is_wrapper(tensor)) and tensor.data_ptr() != 0


def sharing_parameters(tensors: Mapping[str, Tensor]) -> list[tuple[str, str]]:
    """Pairs of different `Parameter`s that have memory in common, by their first names.

    One parameter under several names shares nothing here, and neither do disjoint views of one storage.
    """
    named: dict[int, tuple[str, Tensor]] = {}
    for name, tensor in tensors.items():
        if isinstance(tensor, nn.Parameter) and tensor.layout == torch.strided and _has_address(tensor):
            named.setdefault(id(tensor), (name, tensor))
    order = {name: i for i, (name, _) in enumerate(named.values())}
    found: list[tuple[str, str]] = []
    reaching: list[tuple[str, Tensor]] = []  # the spans before, up to those that end where the next one begins
    for name, tensor in sorted(named.values(), key=lambda item: (str(item[1].device), item[1].data_ptr())):
        reaching = [p for p in reaching if p[1].device == tensor.device and _end(p[1]) > tensor.data_ptr()]
        for other, earlier in reaching:
            if _share_bytes(earlier, tensor):
                first, second = sorted((other, name), key=order.__getitem__)
                found.append((first, second))
        reaching.append((name, tensor))
    return found


def _end(tensor: Tensor) -> int:
    """The address behind the last element."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr() + (last + 1) * tensor.element_size()


def _share_bytes(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors whose spans overlap have elements in the same memory."""
    if a.is_contiguous() and b.is_contiguous():
        return True
    begin = min(a.data_ptr(), b.data_ptr())
    taken = torch.zeros(max(_end(a), _end(b)) - begin, dtype=torch.bool, device="cpu")
    _bytes_of(a, taken, begin).fill_(True)
    return bool(_bytes_of(b, taken, begin).any())


def _bytes_of(tensor: Tensor, memory: Tensor, begin: int) -> Tensor:
    """The part of `memory`, an element for each byte from `begin` on, that is the tensor's."""
    size = tensor.element_size()
    dims = [(n, size * stride) for n, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride > 0]
    shape, strides = [n for n, _ in dims], [stride for _, stride in dims]
    return memory.as_strided((*shape, size), (*strides, 1), tensor.data_ptr() - begin)


def materialized(tensor: Tensor) -> Tensor:
    """The tensor itself if it is contiguous and aligned and its memory holds its bits, else such a copy.

    The memory of a lazy conjugate (`torch.conj`) or negative (`torch.conj(x).imag`) holds other bits. A tensor of a
    mapped file may begin at any address.
    """
    plain = tensor.resolve_conj().resolve_neg().contiguous()
    return plain if plain.data_ptr() % plain.element_size() == 0 else plain.clone()


def tensor_digest(tensor: Tensor) -> str:
    """xxh3_128 of a tensor's bytes in row-major order, as 32 hex digits. Copies to the host what is not there."""
    bits = materialized(tensor.detach().cpu()).view(-1)
    return xxhash.xxh3_128_hexdigest(bits.view(torch.uint8).numpy().data)


def combined_digest(entries: Iterable[tuple[str, str, Sequence[int], str]]) -> str:
    """xxh3_128 over (name, dtype, shape, digest of the bytes) of many tensors, in the order of their names.

    Each entry is hashed as one line of compact ASCII JSON, `["name","dtype",[shape],"digest"]` and a newline.
    """
    state = xxhash.xxh3_128()
    for name, dtype, shape, digest in sorted(entries):
        state.update(compact_json([name, dtype, list(shape), digest]).encode("ascii") + b"\n")
    return state.hexdigest()


def metadata_digest(metadata: Mapping[str, str]) -> str:
    """xxh3_128 over string metadata, as compact ASCII JSON with sorted keys."""
    return xxhash.xxh3_128_hexdigest(compact_json(dict(metadata)).encode("ascii"))


def compact_json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), sort_keys=True, ensure_ascii=True)


# Any dtype of these sizes can be moved or compared by its bits.
BITS_DTYPE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def as_bits(tensor: Tensor) -> Tensor:
    """The same storage as integers of the same size, flattened."""
    return tensor.view(-1).view(BITS_DTYPE[tensor.element_size()])
