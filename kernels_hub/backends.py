"""The library of the ops, which is the only backend of this package."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from . import _kernels  # type: ignore[attr-defined]  # it registers the ops' kernels
from .errors import BackendUnavailable
from .ops.namespace import NATIVE
from .tuning import builtin

BACKENDS = ("cpu", "cuda") if _kernels.build_info()["cuda"] else ("cpu",)


def function(op: str, device: torch.device, backend: str | None = None) -> Callable[..., Any]:
    """Return the implementation of `op` for `device`.

    Raises:
        BackendUnavailable: the library has no kernels for the device, or `backend` is another one.
    """
    if device.type not in BACKENDS:
        raise BackendUnavailable(f"this build has kernels for {' and '.join(BACKENDS)} tensors, found {device.type}")
    if backend not in (None, "auto", device.type):
        raise BackendUnavailable(f"backend {backend!r} (argument backend): {device.type} tensors need {device.type!r}")
    if device.type == "cuda" and device.index not in _tuned_gpus:
        _tune(device)
    return getattr(getattr(torch.ops, NATIVE), op).default


_tuned_gpus: set[int | None] = set()  # those whose kernels have their launch sizes


def _tune(device: torch.device) -> None:
    """Set the launch sizes that come with the package. Measured ones are those of an installed sparse-opt."""
    major, minor = torch.cuda.get_device_capability(device)
    table, _ = builtin(torch.cuda.get_device_name(device), f"{major}.{minor}")
    _kernels.set_tuning(device.index, **table.of("cuda"))
    _tuned_gpus.add(device.index)


def bind(*args: Any, **kwargs: Any) -> None:
    """Return None: the library has no tensors that are converted once, which depend on the version of torch."""
