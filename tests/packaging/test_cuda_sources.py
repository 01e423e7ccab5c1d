"""The CUDA sources, and the C++ of builds with CUDA, compile for the supported GPUs on a machine without one."""

import os
import re
import subprocess
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import pytest
from torch.utils.cpp_extension import COMMON_NVCC_FLAGS, include_paths

from .conftest import BUILD, CHECKOUT, GENERATED, RULES, generate

CSRC = CHECKOUT / "csrc"
SOURCES = [*sorted(CSRC.rglob("*.cu")), *generate(RULES, GENERATED)]
OLDEST, WITH_WGMMA, NEWEST = "80", "90a", "100"
# Nothing here runs the code, and most of the time goes into optimizing it for each GPU. Where it is not, an instruction
# that the GPU lacks, too much shared memory, an unresolved function and every warning are errors all the same.
UNOPTIMIZED = "--Ofast-compile=max"
# The host compiler checks its code and does not assemble the file, with all device code in it, which takes longer than
# all else.
HOST_SYNTAX = ("-c", "-Xcompiler=-fsyntax-only")
# The source of products. ptxas reports whether they overlap only where it is optimized as in a build. A copy of it is,
# whose two tables, arguments of the kernels, have one length: products do not depend on it, and half as many kernels
# are compiled.
PRODUCTS = "tile_weight_grad.cu"
LARGE_TABLE = re.compile(r"(constexpr int kLargeTileTable = )\d+;")


def with_headers(source: Path) -> set[Path]:
    """The file and the project's files that it includes, directly or not."""
    found, unread = {source}, [source]
    while unread:
        file = unread.pop()
        names = re.findall(r'#include "([^"]+)"', file.read_text())
        folders = {name: file.parent if (file.parent / name).exists() else CSRC for name in names}
        included = {(folder / name).resolve() for name, folder in folders.items()}
        unread += included - found
        found |= included
    return found


def differs_by_gpu(source: Path) -> bool:
    """Whether the preprocessor selects code by GPU, and not only code for any GPU by `#ifdef __CUDA_ARCH__`."""
    texts = [file.read_text().replace("#ifdef __CUDA_ARCH__\n", "") for file in with_headers(source)]
    return any("__CUDA_ARCH" in text for text in texts)


# What compiles for the oldest GPU compiles for all later ones, except where the source selects code by GPU.
DIFFER_BY_GPU = [source for source in SOURCES if differs_by_gpu(source)]


def test_there_are_sources_to_compile():
    products = [source.name for source in SOURCES if "tile_product.cuh" in source.read_text()]
    assert products == [PRODUCTS]
    assert [source.name for source in DIFFER_BY_GPU] == [PRODUCTS]


def compile_for(archs: Sequence[str], source: Path, folder: Path, *flags: str) -> str:
    """Compile, and return what the compilers print."""
    flags = (
        *flags,
        *COMMON_NVCC_FLAGS,
        *BUILD["NVCC_FLAGS"],
        "--threads=0",
        "-Werror=all-warnings",
        f"-I{CSRC}",
        *(f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in archs),
    )
    command = ["nvcc", str(source), "-o", str(folder / "compiled"), *flags]
    compiled = subprocess.run(command, capture_output=True, text=True)
    assert compiled.returncode == 0, compiled.stderr
    return compiled.stdout + compiled.stderr


@pytest.mark.nvcc
@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.name)
def test_compiles(source: Path, tmp_path: Path):
    compile_for([OLDEST], source, tmp_path, *HOST_SYNTAX, UNOPTIMIZED)


@pytest.mark.nvcc
@pytest.mark.parametrize("source", DIFFER_BY_GPU, ids=lambda path: path.name)
def test_device_code_compiles_for_other_gpus(source: Path, tmp_path: Path):
    compile_for([WITH_WGMMA, NEWEST], source, tmp_path, "-fatbin", UNOPTIMIZED)


@pytest.mark.nvcc
def test_products_overlap(tmp_path: Path):
    (source,) = (source for source in SOURCES if source.name == PRODUCTS)
    copy = tmp_path / PRODUCTS
    text, n_tables = LARGE_TABLE.subn(r"\1kSmallTileTable;", source.read_text())
    assert n_tables > 0
    copy.write_text(text)
    notes = compile_for([WITH_WGMMA], copy, tmp_path, "-fatbin", f"-I{source.parent}")
    assert "wgmma" not in notes  # ptxas makes a note, no warning, where it serializes them


CPP_SOURCES = sorted(
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


def test_the_cpp_sources_are_found():
    assert {"ops_cuda.cpp", "delta_ops_cuda.cpp", "module.cpp"} <= {path.name for path in CPP_SOURCES}


@pytest.mark.nvcc
@pytest.mark.parametrize("source", CPP_SOURCES, ids=lambda path: path.name)
def test_cpp_of_a_build_with_cuda_compiles(source: Path, cuda_headers):
    checked = check(source, cuda_headers)
    assert checked.returncode == 0, checked.stderr
