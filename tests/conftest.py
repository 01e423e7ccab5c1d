"""Fixtures used by several test folders."""

import gc
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

# Read when torch is imported. On some CPUs MKL's products else depend on where their operands lie in memory.
os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors

import sparse_opt

if folder := os.environ.get("TESTED_PACKAGE"):  # of a wheel
    assert sparse_opt.__file__.startswith(folder), f"tests import {sparse_opt.__file__}, not that of {folder}"
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and find_spec("triton") is not None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests that need an unavailable GPU or nvcc, and run `dist` tests in one worker of pytest-xdist."""
    needs_gpu = pytest.mark.skip(reason=f"needs a CUDA GPU, and torch {torch.__version__} sees none")
    needs_nvcc = pytest.mark.skip(reason="needs nvcc, of CUDA 12.8 or newer, on PATH")
    one_worker = pytest.mark.xdist_group("dist")
    has_gpu, has_nvcc = torch.cuda.is_available(), shutil.which("nvcc") is not None
    for item in items:
        if item.get_closest_marker("gpu") and not has_gpu:
            item.add_marker(needs_gpu)
        if item.get_closest_marker("nvcc") and not has_nvcc:
            item.add_marker(needs_nvcc)
        if item.get_closest_marker("dist"):
            item.add_marker(one_worker)


def pytest_collection_finish() -> None:
    """A collection of garbage takes half a second with the objects of torch and transformers, which all stay."""
    gc.freeze()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("torch defaults", "run under torch defaults that the library must not rely on")
    group.addoption("--default-dtype", choices=("float64", "bfloat16", "float16"), help="torch.set_default_dtype")
    group.addoption(
        "--default-device",
        choices=("meta", "cuda"),
        help="torch.set_default_device; what the library makes on meta by mistake has no values, and fails",
    )


# Functions whose result has the default dtype unless one is given; other functions use it only for Python floats.
_FLOAT_FACTORIES = {
    getattr(torch, name) for name in ("empty", "empty_strided", "eye", "linspace", "logspace", "ones", "rand", "randn")
} | {torch.zeros, torch.normal}
_TORCH = str(Path(torch.__file__).parent)
_LIBRARY = (
    str(Path(sparse_opt.__file__).parent),
    *(str(Path(__file__).parents[1] / folder) for folder in ("triton_kernels", "trainers")),
)


class UsualDefaultsOutsideOfTheLibrary(TorchFunctionMode):
    """Gives tests and other packages float32 on the CPU as usual, and only the library's own code the other defaults.

    The code that makes a tensor is that of the innermost frame outside torch. A default dtype set by other packages, as
    by transformers while it loads a model, is kept.
    """

    def __init__(self, dtype: torch.dtype | None) -> None:
        super().__init__()
        self.dtype = dtype  # the default dtype under test

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # torch.compile cannot inspect frames; it mostly compiles the library's code.
        if func not in _device_constructors() or torch.compiler.is_compiling() or self._is_called_by_the_library():
            return func(*args, **kwargs)
        if kwargs.get("device") is None:
            kwargs = {**kwargs, "device": "cpu"}
        if kwargs.get("dtype") is not None or torch.get_default_dtype() != self.dtype:
            return func(*args, **kwargs)
        if func in _FLOAT_FACTORIES:
            return func(*args, **{**kwargs, "dtype": torch.float32})
        made = func(*args, **kwargs)
        has_dtype = any(hasattr(arg, "dtype") for arg in args)
        if isinstance(made, Tensor) and made.dtype == self.dtype and not has_dtype:
            return func(*args, **{**kwargs, "dtype": torch.float32})
        return made

    def _is_called_by_the_library(self) -> bool:
        frame = sys._getframe(2)
        while frame.f_back is not None and frame.f_code.co_filename.startswith(_TORCH):
            frame = frame.f_back
        return frame.f_code.co_filename.startswith(_LIBRARY)


@pytest.fixture(autouse=True)
def torch_defaults(request: pytest.FixtureRequest) -> Iterator[None]:
    """Set the defaults of `--default-dtype` and `--default-device` in the library's code."""
    name, device = request.config.getoption("default_dtype"), request.config.getoption("default_device")
    if name is None and device is None:
        yield
        return
    dtype = None if name is None else getattr(torch, name)
    if dtype is not None:
        torch.set_default_dtype(dtype)
    if device is not None:
        torch.set_default_device(device)
    try:
        with UsualDefaultsOutsideOfTheLibrary(dtype):
            yield
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)


@pytest.fixture(autouse=True)
def private_dataset_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the cache of `datasets` out of the user's home."""
    folder = tmp_path_factory.getbasetemp() / "datasets"
    monkeypatch.setenv("HF_DATASETS_CACHE", str(folder))
    if "datasets" in sys.modules:
        monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", folder)


@pytest.fixture(scope="session", autouse=INTERPRETED)
def quick_triton_interpreter() -> Iterator[None]:
    """See interpreted.py."""
    from interpreted import quick_interpreter

    with quick_interpreter():
        yield


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Every device that a test must pass on; an unavailable device is skipped with the reason."""
    return torch.device(request.param)


@pytest.fixture
def two_threads() -> Iterator[None]:
    """Two threads for torch and the kernels, whatever OMP_NUM_THREADS says, so that kernels divide their work."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def deterministic() -> Iterator[None]:
    """Gradients are added up in a fixed order, also on a GPU, so that runs can be compared by bits."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.fixture
def tiny_llama() -> Callable[..., torch.nn.Module]:
    """`tiny_llama(seed=0, dtype=torch.float32, **config)`: see tiny_llama.py."""
    pytest.importorskip("transformers", reason="needs transformers: pip install 'sparse-opt[train]'")
    from tiny_llama import make_llama

    return make_llama
