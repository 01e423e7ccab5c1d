"""The C++ of builds with CUDA, against the headers of a torch without it and those of nvcc's toolkit."""

from __future__ import annotations

import os
import subprocess
import sysconfig
from pathlib import Path

import pytest
from torch.utils.cpp_extension import include_paths

from .conftest import BUILD, CHECKOUT, GENERATED, RULES, generate

pytestmark = pytest.mark.nvcc

CSRC = CHECKOUT / "csrc"
SOURCES = sorted(
    path for path in CSRC.rglob("*.cpp") if path.stem.endswith("_cuda") or "SPARSE_OPT_WITH_CUDA" in path.read_text()
)


@pytest.fixture(scope="module")
def cuda_headers() -> list[Path]:
    """The include folders of a build with CUDA beyond csrc, torch's and Python's."""
    toolkit = BUILD["toolkit_on_path"]()
    if not toolkit:
        pytest.skip("needs the headers of a CUDA toolkit: nvcc on PATH")
    generate(RULES, GENERATED)
    return [GENERATED.parent, Path(toolkit, "include")]


def check(source: Path, headers: list[Path]) -> subprocess.CompletedProcess[str]:
    information = ("TORCH_VERSION", "CUDA_MISSING", "CUDA_ARCH_LIST", "CUDA_ARCH_NOTES")
    macros = [
        "SPARSE_OPT_WITH_CUDA",
        "TORCH_EXTENSION_NAME=_kernels",
        *(f'SPARSE_OPT_{name}=""' for name in information),
    ]
    folders = [*include_paths(), sysconfig.get_path("include"), *headers]
    flags = [*(f"-D{macro}" for macro in macros), f"-I{CSRC}", *(f"-isystem{folder}" for folder in folders)]
    command = [
        os.environ.get("CXX", "c++"),
        "-fsyntax-only",
        *BUILD["CXX_FLAGS"],
        *BUILD["STABLE_ABI"],
        "-Wall",
        "-Werror",
        *flags,
        str(source),
    ]
    return subprocess.run(command, capture_output=True, text=True)


def test_the_sources_are_found():
    assert {"ops_cuda.cpp", "patch_ops_cuda.cpp", "module.cpp"} <= {path.name for path in SOURCES}


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.name)
def test_compiles(source: Path, cuda_headers):
    checked = check(source, cuda_headers)
    assert checked.returncode == 0, checked.stderr
