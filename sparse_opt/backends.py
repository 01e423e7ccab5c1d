"""Backend choice: which implementation of an op runs on a device.

A backend is a module of plain functions with the ops' names and arguments. `auto` takes the first backend of
`AUTO_ORDER` that can run on the device. A backend named by argument or by the environment variable SPARSE_OPT_BACKEND
runs or raises `BackendUnavailable` with the cause. The choice is made per device, since GPUs of one machine may differ.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.util
import os
import sys
import sysconfig
import warnings
from collections.abc import Callable
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from . import __version__, cuda_archs
from .errors import BackendUnavailable
from .ops.namespace import NATIVE
from .ops.schemas import SCHEMAS

OPS = tuple(SCHEMAS)
BACKENDS = ("reference", "cpu", "triton", "cuda")
ENVIRONMENT_VARIABLE = "SPARSE_OPT_BACKEND"
# The lowest compute capability that Triton 3.6 and 3.7 compile the Triton kernels for.
TRITON_MINIMUM = (7, 0)

# The first available backend is used. On an H200 (bench/results/kernels_gpu.json) the CUDA kernels take less host time
# than Triton's and are as fast or faster, except for some tile products, mostly large ones, and the AdamW step from
# dense gradients at 10 %, which are 2 to 8 % slower.
# `reference` is last on a GPU because it reads scalars back to the host.
AUTO_ORDER: dict[str, tuple[str, ...]] = {"cpu": ("cpu", "reference"), "cuda": ("cuda", "triton", "reference")}


# Two cores of a busy CPU, torch 2.13, by hand with bench/kernels/host_time.py (the lab notebook, Host time), and two
# H200s (docs/distributed.md, Costs).
WITHOUT_AUTOGRAD = (
    "gradients are collected in Python, to the same bits. For 197 tensors a step took 0.7 ms of host time in place of "
    "0.1 ms with compact gradients, 1.2 ms in place of 0.1 ms with dense ones, and a backward pass with gradient hooks "
    "13 ms in place of 3 ms; an FSDP2 step took 1.07 times as long as fused AdamW's in place of 0.72 times."
)


# In an installed package: what `sparse-opt build` compiles.
AUTOGRAD_SOURCE = Path(__file__).parent / "_autograd_source"
_CSRC = Path(__file__).parents[1] / "csrc"
BUILD_CHECKOUT = "run `make build`, or in another environment `pip install --no-build-isolation -e .`"


def is_checkout() -> bool:
    """Return whether the package is imported from a checkout, whose extensions `make build` builds."""
    return (_CSRC / "build_native.py").exists()


@functools.cache
def native_module() -> tuple[ModuleType | None, str]:
    """Return the library of the ops, or None and the reason why it could not be loaded."""
    return _extension(
        "_kernels", "build it with `pip install --no-build-isolation .`, torch and a C++ compiler present"
    )


@functools.cache
def autograd_module() -> tuple[ModuleType | None, str]:
    """Return the library of native gradient collection, or None and the reason why it could not be loaded.

    A build from source has it in the package, and `sparse-opt build` compiles it into the cache for a wheel. It is
    optional: see `WITHOUT_AUTOGRAD`.
    """
    kernels, cause = native_module()
    if kernels is None:
        return None, cause
    if is_checkout():
        return _extension("_autograd", BUILD_CHECKOUT)
    module, cause = _extension("_autograd", "`sparse-opt build` compiles it, in about a minute")
    path = compiled_autograd()
    if module is not None or not path.exists():
        return module, cause
    try:
        return _load_autograd(path), ""
    except ImportError as error:
        return None, f"{error} (`sparse-opt build --force` compiles it again)"


def compiled_autograd() -> Path:
    """Return where `sparse-opt build` puts sparse_opt._autograd for the installed sparse_opt, torch and Python."""
    digest = hashlib.sha256()
    for path in sorted(path for path in AUTOGRAD_SOURCE.rglob("*") if path.is_file()):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(AUTOGRAD_SOURCE).as_posix()} {len(content)}\n".encode() + content)
    python = sysconfig.get_config_var("SOABI")
    folder = f"{__version__}-torch{torch.__version__}-{python}-{digest.hexdigest()[:16]}"
    cache = Path(os.environ.get("XDG_CACHE_HOME", ""))
    # A relative path is invalid and to be ignored: https://specifications.freedesktop.org/basedir-spec/latest/
    cache = cache if cache.is_absolute() else Path.home() / ".cache"
    return cache / "sparse-opt" / "autograd" / folder / "_autograd.so"


def _load_autograd(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("sparse_opt._autograd", path)
    assert spec is not None and spec.loader is not None  # by the suffix .so
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules[spec.name] = module
    return module


def _extension(name: str, hint: str) -> tuple[ModuleType | None, str]:
    # In this folder alone: the finder of an editable installation would find a checkout's.
    spec = PathFinder.find_spec(f"sparse_opt.{name}", [str(Path(__file__).parent)])
    if spec is None:
        return None, f"the extension sparse_opt.{name} was not built ({hint})"
    if spec.origin is not None and (cause := _why_outdated(Path(spec.origin))):
        return None, cause
    try:
        return importlib.import_module(f"sparse_opt.{name}"), ""
    except ImportError as error:
        return None, f"{error} ({hint})"


def _why_outdated(extension: Path) -> str:
    """Return "" unless the package is in a checkout where a native source is newer than the extension.

    It must not be loaded then: its kernels might read other arguments than the schemas in ops/schemas.py have.
    """
    if not is_checkout():
        return ""  # an installed package
    sources = (path for path in _CSRC.rglob("*") if path.suffix in (".cpp", ".cu", ".h", ".cuh"))
    newest = max(sources, key=lambda path: path.stat().st_mtime)
    if newest.stat().st_mtime <= extension.stat().st_mtime:
        return ""
    return f"the extension was built before the last change of {newest}: run `make build`"


@functools.cache
def triton_module() -> tuple[ModuleType | None, str]:
    """Return the Triton kernels' module, or None and the reason why it could not be loaded."""
    try:
        importlib.import_module("triton")
    except ImportError as error:
        return None, f"triton cannot be imported: {error}"
    return importlib.import_module("sparse_opt.triton_kernels"), ""


def why_not_built(backend: str) -> str:
    """Return "" if the extension has the kernels of `backend`, "cpu" or "cuda", otherwise the cause in one line."""
    module, cause = native_module()
    if module is None:
        return cause
    if backend == "cuda" and not module.build_info()["cuda"]:
        return "the extension was built without CUDA kernels: " + module.build_info()["cuda_missing"]
    return ""


@functools.cache
def compute_capability(index: int) -> tuple[int, int]:
    """Return the CUDA device's compute capability. It is cached: torch's query takes as long as some of the ops."""
    return torch.cuda.get_device_capability(index)


def why_unavailable(backend: str, device: torch.device | str) -> str:
    """Return "" if `backend` can run on tensors on `device`, otherwise the cause in one line.

    "cuda" without an index is the current GPU. If torch finds no GPU, the answer depends only on what is installed.
    """
    device = torch.device(device)
    if backend not in BACKENDS:
        return f"no backend has this name; there are {', '.join(BACKENDS)}"
    if backend == "reference":
        return ""
    if backend in ("cpu", "cuda"):
        if backend != device.type:
            return f"it runs on {backend} tensors, these are on {device.type}"
        return why_not_built(backend) or (_why_no_cuda_code(device) if backend == "cuda" else "")
    module, cause = triton_module()
    if module is None:
        return cause
    if device.type == "cuda":
        return _why_too_old(device, "Triton", TRITON_MINIMUM)
    if device.type == "cpu" and module.interpreted():
        return ""
    return f"it runs on cuda tensors, these are on {device.type} (TRITON_INTERPRET=1 runs it on a CPU, for tests)"


def _gpu_index(device: torch.device) -> int | None:
    """Return the index of an NVIDIA GPU, or None if there is none."""
    if torch.version.hip is not None:
        return None
    if device.index is None:
        return torch.cuda.current_device() if torch.cuda.is_available() else None
    return device.index


def _why_too_old(device: torch.device, kernels: str, minimum: tuple[int, int]) -> str:
    index = _gpu_index(device)
    if index is None or compute_capability(index) >= minimum:
        return ""
    return f"{_gpu_text(index)}, the {kernels} kernels need {minimum[0]}.{minimum[1]} or newer"


def _why_no_cuda_code(device: torch.device) -> str:
    """Return "" if the extension's CUDA kernels were built for this GPU, otherwise the cause in one line."""
    index = _gpu_index(device)
    arch_list = native_module()[0].build_info()["arch_list"]  # type: ignore[union-attr]  # why_not_built() was empty
    if index is None or cuda_archs.has_code(arch_list, compute_capability(index)):
        return ""
    major, minor = compute_capability(index)
    return _why_too_old(device, "CUDA", cuda_archs.MINIMUM) or (
        f"{_gpu_text(index)}, the extension was built for {arch_list}: build it again with "
        f"TORCH_CUDA_ARCH_LIST={major}.{minor}"
    )


def _gpu_text(index: int) -> str:
    major, minor = compute_capability(index)
    return f"{torch.cuda.get_device_name(index)} has compute capability {major}.{minor}"


def available(device: torch.device | str) -> tuple[str, ...]:
    """Return the names of the backends that can run on tensors on `device`."""
    return tuple(name for name in BACKENDS if not why_unavailable(name, device))


@functools.cache
def _warn_slow_auto(device_type: str, taken: str, faster: str, cause: str) -> None:
    warnings.warn(
        f"sparse_opt runs backend {taken!r} on {device_type}: {faster!r} is unavailable: {cause}", stacklevel=5
    )


def choose(device: torch.device | str, backend: str | None = None) -> str:
    """Return the backend that runs the ops on `device`: that of the argument, of the environment variable or of `auto`.

    Raises:
        BackendUnavailable: a backend was named and cannot run; the message says why.
    """
    name, source = backend, "argument backend"
    if name is None:
        name, source = os.environ.get(ENVIRONMENT_VARIABLE, "auto"), ENVIRONMENT_VARIABLE
    if name != "auto":
        cause = why_unavailable(name, device)
        if cause:
            raise BackendUnavailable(f"backend {name!r} ({source}) cannot run: {cause}")
        return name
    device_type = torch.device(device).type
    passed_over: dict[str, str] = {}
    for candidate in AUTO_ORDER.get(device_type, ("reference",)):
        cause = why_unavailable(candidate, device)
        if not cause:
            for faster, why in passed_over.items():
                _warn_slow_auto(device_type, candidate, faster, why)
            return candidate
        passed_over[candidate] = cause
    raise BackendUnavailable(f"no backend runs on {device_type} tensors")


def function(op: str, device: torch.device, backend: str | None = None) -> Callable[..., Any]:
    """Return the implementation of `op` for `device`: unchecked arguments as in `sparse_opt.ops`, without `backend`."""
    name = choose(device, backend)
    if name == "reference":
        return getattr(importlib.import_module("sparse_opt.ops.reference"), op)
    if name == "triton":
        return getattr(triton_module()[0], op)
    # `.default` skips the overload lookup, which takes some microseconds per call.
    return getattr(getattr(torch.ops, NATIVE), op).default


def functions(device: torch.device, backend: str | None = None) -> SimpleNamespace:
    """Return a namespace with all ops for tensors on `device`, so that the backend is chosen once."""
    return SimpleNamespace(**{op: function(op, device, backend) for op in OPS})


def bind(
    params: list[Any],
    indices: Tensor,
    starts: list[int],
    ends: list[int],
    *,
    run_length: int = 1,
    index_bases: Tensor | None = None,
    backend: str | None = None,
) -> Any:
    """Convert parameters and segments to C++ objects once, which saves most of a step's host time.

    Returns None if the backend is not native, or, with a warning, if `autograd_module()` is unavailable. Otherwise the
    object's `step(op, **arguments)` calls a step op without those arguments, and also increments `steps`.
    `take_grads()` keeps the dense gradients for the next of these calls, or returns False if a parameter has none;
    `gradient_buffer(...)` makes the buffer that receives the parameters' compact gradients.
    """
    name = choose(indices.device, backend)
    if name not in ("cpu", "cuda"):
        return None
    module, cause = autograd_module()
    if module is None:
        _warn_without_autograd(cause)
        return None
    return module.BoundParams(params, indices, starts, ends, run_length, index_bases)


@functools.cache
def _warn_without_autograd(cause: str) -> None:
    warnings.warn(f"sparse_opt runs without sparse_opt._autograd: {cause}: {WITHOUT_AUTOGRAD}", stacklevel=3)
