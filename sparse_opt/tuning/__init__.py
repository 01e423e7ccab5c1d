"""Launch sizes of the GPU kernels that were measured on one kind of GPU, as one table for each.

No entry changes a bit of any result: whatever would, such as the number of parts of a sum, is a constant next to its
kernel. Names begin with the backend that reads the entry, so that a table can be handed over by keyword.
`sparse-opt bench kernels --tune` measures the allowed values on the GPU at hand; `files` reads and writes such tables,
and `sparse_opt.backends.tuning_of` chooses one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any


def _entry(default: int, allowed: tuple[int, ...], meaning: str) -> int:
    entry: int = field(default=default, metadata={"allowed": allowed, "meaning": meaning})
    return entry


@dataclass(frozen=True)
class Tuning:
    """The table of one GPU. The defaults run well within the limits of every supported GPU, and were tuned on none."""

    triton_step_slots: int = _entry(512, (256, 512, 1024, 2048), "compact slots of a program of an optimizer step")
    triton_swap_slots: int = _entry(512, (256, 512, 1024, 2048), "compact slots of a program of indexed_swap_")
    triton_apply_slots: int = _entry(512, (256, 512, 1024, 2048), "changes of a program of delta_apply_")
    triton_encode_elements: int = _entry(4096, (2048, 4096, 8192), "dense elements of a program of delta_encode")
    triton_encode_changes: int = _entry(128, (64, 128, 256), "changes that a program of delta_encode writes at a time")
    triton_tile64_stages: int = _entry(
        3, (2, 3, 4), "steps of 64 tokens in shared memory, 16 KiB each: tiles of 64, 16-bit operands"
    )
    triton_tile128_stages: int = _entry(
        2, (2, 3), "steps of 64 tokens in shared memory, 32 KiB each: tiles of 128, 16-bit operands"
    )
    triton_tile128_registers: int = _entry(
        0, (0, 128), "most registers of a thread: tiles of 128, 16-bit operands; 0 is the compiler's choice"
    )
    cuda_encode_blocks: int = _entry(2, (1, 2, 3), "blocks of delta_encode for each multiprocessor, 44 KiB each")
    cuda_scattered_swap_bytes: int = _entry(
        0,
        (0, 256, 128, 64, 32),
        "dense bytes per active element from which indexed_swap_ has few elements in flight; 0: never",
    )

    def of(self, backend: str) -> dict[str, int]:
        """Return the entries of "triton" or "cuda", without the prefix."""
        prefix = f"{backend}_"
        return {name.removeprefix(prefix): value for name, value in asdict(self).items() if name.startswith(prefix)}


ALLOWED: Mapping[str, tuple[int, ...]] = {entry.name: entry.metadata["allowed"] for entry in fields(Tuning)}
MEANING: Mapping[str, str] = {entry.name: entry.metadata["meaning"] for entry in fields(Tuning)}

# By the resources of a multiprocessor of compute capability 9.0, which the H100, H200 and GH200 share: three and two
# programs with these stages fit into its 227 KiB of shared memory, and two programs of 8 warps have 128 registers for
# each thread.
SM_90 = Tuning(triton_tile64_stages=4, triton_tile128_stages=3, triton_tile128_registers=128)
# "Tuning tables" in docs/notebook.md. These depend on the memory too, and an H100's is slower.
H200 = replace(
    SM_90,
    triton_swap_slots=1024,
    triton_encode_elements=8192,
    cuda_encode_blocks=3,
    cuda_scattered_swap_bytes=32,
)


def builtin(device_name: str, compute_capability: str) -> tuple[Tuning, str]:
    """Return the table of an NVIDIA GPU that comes with the package, and which one it is."""
    if compute_capability == "9.0" and device_name.startswith("NVIDIA H200"):
        return H200, "built-in for the H200"
    if compute_capability == "9.0":
        return SM_90, "built-in for compute capability 9.0, otherwise the conservative default"
    return Tuning(), "conservative default"


def why_invalid(entries: Mapping[str, Any]) -> str:
    """Return "" if these are the entries of a table, each with an allowed value, otherwise the cause in one line."""
    if missing := [name for name in ALLOWED if name not in entries]:
        return f"it has no entry {missing[0]}"
    for name, value in entries.items():
        if name not in ALLOWED:
            return f"entry {name} is unknown"
        if type(value) is not int or value not in ALLOWED[name]:
            return f"{name} is {value!r}, expected one of {', '.join(map(str, sorted(ALLOWED[name])))}"
    return ""
