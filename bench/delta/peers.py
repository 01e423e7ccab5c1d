"""The coders of `sparse-opt bench delta`: patches, and other encodings of changes."""

from __future__ import annotations

import importlib
import importlib.util
import os
from typing import Any

import torch
from torch import Tensor

from sparse_opt.delta import codec as patch_codec
from sparse_opt.delta import patches as delta_patches
from sparse_opt.delta.patches import LogMask, MaskedState
from sparse_opt.delta.state import StateLayout, TensorSpec
from sparse_opt.tensors import as_bits, dtype_name

from .data import Step


class Coder:
    """An encoding of the change between the weights before and after a step."""

    name: str  # in the table
    on_device = False  # only the device works, so that a GPU is timed with events; otherwise wall time is reported

    def start(self, old: list[Tensor]) -> Any:
        """The initial state of encoding and decoding, made from the old weights, untimed. May share their memory."""
        return old

    def encode(self, start: Any, new: list[Tensor]) -> Any:
        """The encoded change; does not modify ``start``."""
        raise NotImplementedError

    def decode(self, start: Any, coded: Any) -> list[Tensor]:
        """The new weights; consumes ``start``."""
        raise NotImplementedError

    def nbytes(self, coded: Any) -> int:
        """Bytes of the encoded change."""
        return sum(map(len, coded))


class PatchCoder(Coder):
    """`delta.codec`; bytes are those of a patch file's tensors, without its header."""

    name, on_device = "patch", True

    def encode(self, start: list[Tensor], new: list[Tensor]) -> patch_codec.Patch:
        return patch_codec.encode(start, new)

    def decode(self, start: list[Tensor], coded: patch_codec.Patch) -> list[Tensor]:
        patch_codec.apply_(start, coded)
        return start

    def nbytes(self, coded: patch_codec.Patch) -> int:
        return coded.nbytes


class MaskedCoder(Coder):
    """Encodes a step of a sparse run like a delta log: over the mask's elements, which are gathered and scattered.

    Encoding also counts all changes, and uses the ordinary form if there is one outside the mask.
    """

    name, on_device = "patch, over the mask", True

    def __init__(self, step: Step) -> None:
        assert step.mask is not None
        self.mask = LogMask(step.mask)
        specs = [
            TensorSpec(name, dtype_name(tensor), tuple(tensor.shape))
            for name, tensor in zip(step.mask.names, step.old, strict=True)
        ]
        self.layout = StateLayout(tuple(specs), {}, frozenset())

    def start(self, old: list[Tensor]) -> list[Tensor]:
        # A log keeps the mask's elements in addition to the state.
        self._masked = MaskedState(self.mask, self.layout, self._named(old))
        return old

    def encode(self, start: list[Tensor], new: list[Tensor]) -> delta_patches.StatePatch:
        return delta_patches.encode(self.layout, self._named(start), self._named(new), masked=self._masked)

    def decode(self, start: list[Tensor], coded: delta_patches.StatePatch) -> list[Tensor]:
        coded.apply_(self._named(start), "bench")
        return start

    def nbytes(self, coded: delta_patches.StatePatch) -> int:
        return coded.nbytes

    def compact(self, tensors: list[Tensor]) -> list[Tensor]:
        """The mask's elements of each tensor."""
        return self.mask.take(self.layout.names, tensors)

    def _named(self, tensors: list[Tensor]) -> dict[str, Tensor]:
        return dict(zip(self.layout.names, tensors, strict=True))


class Peer(Coder):
    """A coder of another package, which may be missing, made for a number of threads."""

    package: str  # its name for pip
    module: str  # its name for `import`

    def __init__(self, threads: int) -> None:
        raise NotImplementedError

    @classmethod
    def why_absent(cls) -> str:
        """Empty if the package is installed, else the reason why it cannot run."""
        return "" if importlib.util.find_spec(cls.module) else f"not installed ({cls.package})"


class ZstdCoder(Peer):
    """The bytes of old XOR new through zstd at level 1 (package zstandard), one thread."""

    name, package, module = "byte XOR + zstd-1", "zstandard", "zstandard"

    def __init__(self, threads: int) -> None:
        zstandard = importlib.import_module("zstandard")
        self._compressor, self._decompressor = zstandard.ZstdCompressor(level=1), zstandard.ZstdDecompressor()

    def encode(self, start: list[Tensor], new: list[Tensor]) -> list[bytes]:
        found = []
        for a, b in zip(start, new, strict=True):
            found.append(self._compressor.compress((as_bits(a) ^ as_bits(b)).cpu().numpy()))
        return found

    def decode(self, start: list[Tensor], coded: list[bytes]) -> list[Tensor]:
        for tensor, data in zip(start, coded, strict=True):
            bits = as_bits(tensor)
            xor = torch.frombuffer(bytearray(self._decompressor.decompress(data)), dtype=bits.dtype)
            bits ^= xor.to(tensor.device)
        return start


class PulseCoder(Peer):
    """PULSEPT1 patches of format 3, a Rice code for each class of old exponents, on the CPU.

    Patches are made and applied as in basilica-sdk, with a copy of the new weights and their digests. The package has
    no public call for the codec itself, which is in `basilica._pulse.codec`. https://pypi.org/project/basilica-sdk,
    arXiv 2602.03839
    """

    name, package, module = "PULSEPT1, format 3", "basilica-sdk", "basilica"

    def __init__(self, threads: int) -> None:
        self._codec = importlib.import_module("basilica._pulse.codec")
        self._threads = threads
        os.environ["BASILICA_PULSE_EXPCTX_THREADS"] = str(threads)  # there is no argument for it

    def start(self, old: list[Tensor]) -> tuple[list[Tensor], Any]:
        return old, self._codec.Snapshot(self._named(old))

    def encode(self, start: tuple[list[Tensor], Any], new: list[Tensor]) -> bytes:
        snapshot = start[1]
        model = self._codec.ModelMeta("bench", "", snapshot.param_count())
        patch, _ = snapshot.encode_step(
            self._named(new).items(), step=1, base_step=0, model=model, workers=self._threads, format_version=3
        )
        snapshot.rollback_last_encode()
        found: bytes = patch
        return found

    def decode(self, start: tuple[list[Tensor], Any], coded: bytes) -> list[Tensor]:
        tensors, snapshot = start
        snapshot.apply_patch(self._codec.parse_patch(coded))
        return [snapshot.tensor(name) for name in self._named(tensors)]

    def nbytes(self, coded: bytes) -> int:
        return len(coded)

    @staticmethod
    def _named(tensors: list[Tensor]) -> dict[str, Tensor]:
        return {f"{i:06}": tensor for i, tensor in enumerate(tensors)}


PEERS: tuple[type[Peer], ...] = (ZstdCoder, PulseCoder)
