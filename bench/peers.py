"""`Peer`: another package that a benchmark compares with, if it is installed."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Peer:
    """Another package. If it is not installed, or does not support the device, it is listed with this reason.

    Args:
        name: name in the table.
        packages: names for pip, any of which is sufficient.
        module: name for `import`.
        device_type: the supported device type; None for any.
        make: makes what is timed; errors of the package propagate.
    """

    name: str
    packages: tuple[str, ...]
    module: str
    device_type: str | None
    make: Callable[..., Any]

    def why_absent(self, device: torch.device) -> str:
        """Empty if the package can run on the device, else the reason why not."""
        if self.device_type not in (None, device.type):
            return f"made for {self.device_type}, this is {device.type}"
        return "" if _is_installed(self.module) else f"not installed ({' or '.join(self.packages)})"

    def version(self) -> str:
        """The installed packages and their versions."""
        installed = {found.metadata["Name"].lower(): found.version for found in importlib.metadata.distributions()}
        return ", ".join(f"{name} {installed[name]}" for name in self.packages if name in installed)


def why_failed(error: Exception) -> str:
    """The reason of a row that is left out because another package failed."""
    first_line = str(error).strip().partition("\n")[0]
    return f"FAILED: {type(error).__name__}: {first_line}"


def _is_installed(module: str) -> bool:
    """Whether a module can be imported; False as well if its parent package is missing."""
    parent = module.rpartition(".")[0]
    if parent and not _is_installed(parent):
        return False
    return importlib.util.find_spec(module) is not None
