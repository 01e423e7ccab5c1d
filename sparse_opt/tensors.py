"""Helpers for a model's named tensors, for masks and delta logs: tied parameters, shared memory, digests, bits.

Digests are xxh3_128. They detect damage and mix-ups, not forgery.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import xxhash
from torch import Tensor, nn

from . import quantised_layers
from .errors import ConfigError


def dtype_name(tensor: Tensor) -> str:
    """Return the dtype's name without `torch.`: `bfloat16`."""
    return str(tensor.dtype).removeprefix("torch.")


def is_wrapper(tensor: Tensor) -> bool:
    """True for tensors made of other tensors (DTensor, quantized subclasses), which have no bits of their own."""
    return hasattr(type(tensor), "__tensor_flatten__")


# Inside `SparseOptimizer.base_weights` the version counters of the parameters begin at this number. Views and results
# of `detach()` share the counter, so that the tensors of a `state_dict()` are marked too; `.data` is not.
BASE_VERSION = 2**30


def holds_base_weights(tensors: Iterable[Tensor]) -> bool:
    """Whether any of a model's weights is inside of `base_weights()`."""
    return any(not tensor.is_inference() and tensor._version >= BASE_VERSION for tensor in tensors)


def named_parameters_of(
    model_or_named: nn.Module | Mapping[str, Tensor] | Iterable[tuple[str, Tensor]],
) -> dict[str, Tensor]:
    """Name -> parameter, every name of a tied parameter included, in the model's order.

    The names of a model that `torch.compile` has wrapped are those of the model inside, without `_orig_mod.`. For a
    quantised weight it has a tensor on the meta device with the shape and dtype of the dequantised weight; scales of
    these weights are left out.
    """
    if not isinstance(model_or_named, nn.Module):
        return dict(model_or_named)
    model = getattr(model_or_named, "_orig_mod", model_or_named)
    named: dict[str, Tensor] = dict(quantised_layers.named_parameters(model, remove_duplicate=False))
    named.update({name: layer.whole for name, layer in quantised_layers.find(model).items()})
    return named


def saved_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters, without scales of quantised ones, and the persistent buffers, under all their names."""
    yield from quantised_layers.named_parameters(model, remove_duplicate=False)
    for path, module in model.named_modules(remove_duplicate=False):
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield f"{path}.{name}" if path else name, buffer


def floating_parameters_of(model: nn.Module) -> dict[str, Tensor]:
    """Name -> floating-point parameter, tied ones once under their first name, in the model's order."""
    parameters = named_parameters_of(model)
    firsts = canonical_names(parameters)
    return {name: p for name, p in parameters.items() if firsts[name] == name and p.is_floating_point()}


def canonical_names(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return name -> first name of the same storage; a tensor that is not tied has its own name."""
    first: dict[Any, str] = {}
    return {name: first.setdefault(_storage_key(tensor), name) for name, tensor in tensors.items()}


def _storage_key(tensor: Tensor) -> Any:
    if not _has_address(tensor):
        return id(tensor)
    # A lazy conjugate or negative has the address of the tensor that it is a view of, and other bits.
    lazy = tensor.is_conj(), tensor.is_neg()
    return (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, lazy)


def _has_address(tensor: Tensor) -> bool:
    """Whether the tensor has memory of its own; meta, empty, freed and wrapper tensors do not."""
    return not (tensor.is_meta or tensor.numel() == 0 or is_wrapper(tensor)) and tensor.data_ptr() != 0


def sharing_parameters(tensors: Mapping[str, Tensor]) -> list[tuple[str, str]]:
    """Return pairs of different `Parameter`s whose ranges of addresses overlap, by their first names.

    One parameter under several names is not such a pair, and neither are views of separate parts of one storage, such
    as rows of a matrix. Columns of one matrix are: each reaches from its first row to the last.
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
        for other, _ in reaching:
            first, second = sorted((other, name), key=order.__getitem__)
            found.append((first, second))
        reaching.append((name, tensor))
    return found


def _end(tensor: Tensor) -> int:
    """Return the address after the last element."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr() + (last + 1) * tensor.element_size()


def materialized(tensor: Tensor) -> Tensor:
    """Return the tensor if it is contiguous and aligned and its memory holds its bits, otherwise such a copy.

    The memory of a lazy conjugate (`torch.conj`) or negative (`torch.conj(x).imag`) has different bits. A tensor of a
    mapped file may be unaligned.
    """
    plain = tensor.resolve_conj().resolve_neg().contiguous()
    return plain if plain.data_ptr() % plain.element_size() == 0 else plain.clone()


def tensor_digest(tensor: Tensor) -> str:
    """Return xxh3_128 of a tensor's bytes in row-major order, 32 hex digits. Copies them to the host if needed."""
    bits = materialized(tensor.detach().cpu()).view(-1)
    return xxhash.xxh3_128_hexdigest(bits.view(torch.uint8).numpy().data)


def combined_digest(entries: Iterable[tuple[str, str, Sequence[int], str]]) -> str:
    """Return xxh3_128 over (name, dtype, shape, digest of the bytes) of many tensors, in the order of their names.

    Each entry is hashed as one line of compact ASCII JSON, `["name","dtype",[shape],"digest"]` and a newline.
    """
    state = xxhash.xxh3_128()
    for name, dtype, shape, digest in sorted(entries):
        state.update(compact_json([name, dtype, list(shape), digest]).encode("ascii") + b"\n")
    return state.hexdigest()


def metadata_digest(metadata: Mapping[str, str]) -> str:
    """Return xxh3_128 over string metadata, as compact ASCII JSON with sorted keys."""
    return xxhash.xxh3_128_hexdigest(compact_json(dict(metadata)).encode("ascii"))


def compact_json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), sort_keys=True, ensure_ascii=True)


# Any dtype of these sizes can be moved or compared by its bits.
BITS_DTYPE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def as_bits(tensor: Tensor) -> Tensor:
    """Return a flat view of the tensor's storage as integers of the same size."""
    return tensor.view(-1).view(BITS_DTYPE[tensor.element_size()])


class HostCopy:
    """A copy of tensors to the host: from a GPU to pinned memory, while the host does other work.

    CPU tensors are passed through. The tensors must not be written to on other streams until `result` has returned.

    Args:
        tensors: of any devices.
        aside: copy on a side stream, after the work on the current stream of each GPU, which does not wait for it. The
            tensors must then not be written to on any stream. False: copy on the current stream.
    """

    def __init__(self, tensors: Sequence[Tensor], *, aside: bool = False) -> None:
        self._sources = list(tensors)  # not freed while they are copied
        self._copies = list(tensors)
        self._events: list[torch.cuda.Event] = []
        for device in sorted({tensor.device for tensor in tensors if tensor.is_cuda}, key=str):
            current = torch.cuda.current_stream(device)
            stream = _copy_stream(device) if aside else current
            if aside:
                stream.wait_stream(current)
            with torch.cuda.stream(stream):
                for i, tensor in enumerate(tensors):
                    if tensor.device == device:
                        copy = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
                        self._copies[i] = copy.copy_(tensor, non_blocking=True)
            event = torch.cuda.Event(blocking=True)  # the thread that waits for it does not spin
            event.record(stream)
            self._events.append(event)

    def result(self) -> list[Tensor]:
        """Wait for the copies and return them. May be called from another thread."""
        for event in self._events:
            event.synchronize()
        self._sources = []
        return self._copies


@functools.cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def resolve_device(name: str) -> torch.device:
    """The device that an option names; `auto` is cuda if available, else cpu.

    Raises:
        ConfigError: the device is neither a CPU nor a CUDA device, or is not available.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    wrong = f"option 'device' is '{name}': expected auto, cpu, cuda or cuda:N"
    try:
        device = torch.device(name)
    except (RuntimeError, ValueError) as error:
        raise ConfigError(wrong) from error
    if device.type not in ("cpu", "cuda"):  # meta has no values, and other devices are untested
        raise ConfigError(wrong)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"option 'device' is '{name}': torch {torch.__version__} finds no CUDA device here")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"option 'device' is '{device}': there are {torch.cuda.device_count()} CUDA devices here")
    return device
