"""The library of the ops, which is the only backend of this package."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from . import _kernels  # type: ignore[attr-defined]  # it registers the ops' kernels
from .errors import BackendUnavailable
from .ops.namespace import NATIVE

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
    return getattr(getattr(torch.ops, NATIVE), op).default


def bind(*args: Any, **kwargs: Any) -> None:
    """Return None: the library has no tensors that are converted once, which depend on the version of torch."""
