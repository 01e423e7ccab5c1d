"""Digests of the bytes of many tensors: of a GPU's by the extension, of the host's by the package xxhash.

The digest of a tensor is xxh3_128 over the digests (16 bytes, big-endian) of its chunks of 65536 bytes in row-major
order; the last chunk may be shorter. An empty tensor has the digest of no bytes. Unlike one xxh3_128 over all bytes,
chunks can be hashed in parallel.
https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import xxhash
from torch import Tensor

from .. import backends
from ..tensors import HostCopy, is_wrapper, materialized

CHUNK = 65536  # bytes
_DIGEST_BYTES = 16


@dataclass(frozen=True)
class _Part:
    """The digests of the chunks of one device's tensors, on their way to the host."""

    places: tuple[int, ...]  # of the tensors in the list
    chunks: tuple[int, ...]  # of each tensor
    digests: HostCopy  # of one tensor, uint8 [sum(chunks), 16]


@dataclass(frozen=True)
class StateDigest:
    """Digests that are being computed: `StateDigest.start(tensors).result()`."""

    _count: int
    _parts: tuple[_Part, ...]

    @classmethod
    def start(cls, tensors: Sequence[Tensor]) -> StateDigest:
        """Start to compute the digests of the tensors' current bytes; later writes do not affect them.

        GPU tensors are hashed on the current stream, without a synchronization; CPU tensors are hashed before this
        returns. Without an extension for the tensors' device, they are copied to the host one by one, with one warning.

        Args:
            tensors: of any shapes, dtypes, strides and devices. Non-contiguous tensors are copied for hashing.

        Raises:
            ValueError: a tensor consists of other tensors, as a DTensor does; the message gives its list index.
        """
        places: dict[torch.device, list[int]] = {}
        for i, tensor in enumerate(tensors):
            if is_wrapper(tensor):
                raise ValueError(f"tensors[{i}] is a {type(tensor).__name__}, which has no bytes of its own")
            places.setdefault(tensor.device, []).append(i)
        parts = []
        for device, at in places.items():
            parts.append(_start(device, at, [tensors[i].detach() for i in at]))
        return cls(len(tensors), tuple(parts))

    def result(self) -> tuple[str, ...]:
        """Return one digest of 32 hex digits per tensor, in order. May be called from another thread than `start`."""
        digests = [""] * self._count
        for part in self._parts:
            data, begin = part.digests.result()[0].numpy().tobytes(), 0
            for place, chunks in zip(part.places, part.chunks, strict=True):
                end = begin + chunks * _DIGEST_BYTES
                digests[place] = xxhash.xxh3_128_hexdigest(data[begin:end])
                begin = end
        return tuple(digests)


def _start(device: torch.device, places: Sequence[int], tensors: Sequence[Tensor]) -> _Part:
    chunks = tuple(-(-tensor.nbytes // CHUNK) for tensor in tensors)
    if device.type == "cpu" or (cause := _why_not_native(device)):
        if device.type != "cpu":
            _warn_copied(device.type, cause)
        digests = torch.empty(sum(chunks), _DIGEST_BYTES, dtype=torch.uint8, device="cpu")
        digests.view(-1).numpy()[:] = memoryview(b"".join(map(_host_chunk_digests, tensors)))
    else:
        digests = torch.ops.sparse_opt_native.chunk_digests([materialized(tensor) for tensor in tensors])
    return _Part(tuple(places), chunks, HostCopy([digests]))


def _host_chunk_digests(tensor: Tensor) -> bytes:
    # A contiguous tensor of one element may have any stride, which a view as bytes refuses.
    flat = materialized(tensor).cpu().as_strided((tensor.numel(),), (1,))
    data = flat.view(torch.uint8).numpy().data
    return b"".join(xxhash.xxh3_128_digest(data[at : at + CHUNK]) for at in range(0, len(data), CHUNK))


def _why_not_native(device: torch.device | str) -> str:
    """Return "" if the extension can hash tensors on `device`, a GPU, otherwise the cause in one line."""
    return backends.why_unavailable("cuda", device)


@functools.cache
def _warn_copied(device_type: str, cause: str) -> None:
    warnings.warn(
        f"sparse_opt copies tensors from {device_type} to the host to take their digests: {cause}", stacklevel=4
    )
