"""Selects the GPU architectures to compile the CUDA kernels for, and checks which GPUs a build can run on.

Lists have the form of TORCH_CUDA_ARCH_LIST: "8.0;9.0a;12.0+PTX". setup.py runs this file by its path, before anything
is installed, so it imports only the standard library.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Collection
from typing import NamedTuple

# Tensor cores for bf16 and asynchronous copies into shared memory.
MINIMUM = (8, 0)
# A100, RTX 30, RTX 40, H100 and H200, B200, RTX 50.
USUAL = ("8.0", "8.6", "8.9", "9.0a", "10.0", "12.0")
# Machine code of these and of other GPUs of their major version is not interchangeable.
TEGRA = ((8, 7), (10, 1))

_ENTRY = re.compile(r"(\d+)\.(\d)([af]?)(\+PTX)?")


class Arch(NamedTuple):
    """One entry of a list."""

    capability: tuple[int, int]
    suffix: str  # "a": for this capability alone; "f": for this major version alone; or ""
    ptx: bool  # also as PTX, which the driver compiles for later GPUs

    @property
    def text(self) -> str:
        return f"{self.capability[0]}.{self.capability[1]}{self.suffix}{'+PTX' * self.ptx}"


def parse(arch_list: str) -> list[Arch]:
    """Parse a list, with the separators that torch accepts.

    Raises:
        ValueError: an entry is not an architecture.
    """
    found = []
    for word in re.split(r"[; ]+", arch_list.strip("; ")) if arch_list.strip("; ") else ():
        match = _ENTRY.fullmatch(word)
        if match is None:
            raise ValueError(f"TORCH_CUDA_ARCH_LIST has {word!r}, expected entries such as 8.0, 9.0a or 12.0+PTX")
        found.append(Arch((int(match[1]), int(match[2])), match[3], match[4] is not None))
    return found


def select(requested: str, known: Collection[str]) -> tuple[str, tuple[str, ...]]:
    """Select the architectures to build for: the requested ones, or the usual ones, that kernels and nvcc support.

    9.0 becomes 9.0a: the same GPUs, with their matrix instructions (wgmma). Its PTX stays that of 9.0, because PTX of
    9.0a does not run on later GPUs.

    Args:
        requested: the value of TORCH_CUDA_ARCH_LIST; empty for the usual GPUs, the newest as PTX too.
        known: what `nvcc --list-gpu-arch` prints, such as "compute_90".

    Returns:
        The list, empty if no requested architecture can be built, and a line for each difference from the request.

    Raises:
        ValueError: an entry is not an architecture.
    """

    def compiles(arch: Arch) -> bool:
        return f"compute_{arch.capability[0]}{arch.capability[1]}" in known

    if not requested.strip("; "):
        usual = [arch for name in USUAL for arch in parse(name) if compiles(arch)]
        newest = [arch for arch in usual if not arch.suffix][-1:]
        return ";".join(arch._replace(ptx=arch in newest).text for arch in usual), ()
    archs = parse(requested)
    old = [arch.text for arch in archs if arch.capability < MINIMUM]
    unknown = [arch.text for arch in archs if arch.capability >= MINIMUM and not compiles(arch)]
    chosen: list[Arch] = []
    notes = [f"{', '.join(old)} left out: the CUDA kernels need 8.0 or newer"] * bool(old)
    notes += [f"{', '.join(unknown)} left out: this nvcc cannot compile for it"] * bool(unknown)
    for arch in archs:
        if arch.text in (*old, *unknown):
            continue
        if arch[:2] == ((9, 0), ""):
            chosen += [Arch((9, 0), "a", False), *[arch] * arch.ptx]
            notes += ["9.0 is built as 9.0a, which has wgmma"]
        else:
            chosen.append(arch)
    return ";".join(dict.fromkeys(arch.text for arch in chosen)), tuple(dict.fromkeys(notes))


@functools.cache
def has_code(arch_list: str, capability: tuple[int, int]) -> bool:
    """Whether a binary that was built for `arch_list` runs on a GPU of this compute capability.

    https://docs.nvidia.com/cuda/cuda-c-programming-guide/#binary-compatibility: machine code of X.Y runs on X.Z with
    Z >= Y, PTX of X.Y on everything from X.Y on.
    """
    return any(_runs_on(arch, capability) for arch in parse(arch_list))


def _runs_on(arch: Arch, capability: tuple[int, int]) -> bool:
    if arch.suffix == "a" or capability < arch.capability:
        return capability == arch.capability
    if arch.ptx and not arch.suffix:
        return True
    tegra = arch.capability in TEGRA or capability in TEGRA
    return capability == arch.capability if tegra else capability[0] == arch.capability[0]
