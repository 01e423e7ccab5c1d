"""The CUDA sources compile for the supported GPUs, on a machine without one."""

from __future__ import annotations

import runpy
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
from torch.utils.cpp_extension import COMMON_NVCC_FLAGS

CHECKOUT = Path(__file__).resolve().parents[2]
SOURCES = sorted((CHECKOUT / "csrc").rglob("*.cu"))
BUILD = runpy.run_path(str(CHECKOUT / "csrc/build_native.py"))
BUILT_FOR = "90a"
ALSO_FOR = ("80", "100")
# Nothing here runs the code, and most of the time goes into optimizing it for each GPU. Where it is not, an instruction
# that the GPU lacks, too much shared memory, an unresolved function and every warning are errors all the same.
UNOPTIMIZED = "--Ofast-compile=max"
# Compiled exactly as in a build, because only then ptxas reports whether products overlap.
OPTIMIZED_SOURCES = ("tile_weight_grad.cu",)

needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc, of CUDA 12.8 or newer, on PATH")


def test_there_are_sources_to_compile():
    assert set(OPTIMIZED_SOURCES) < {source.name for source in SOURCES}
    products = [source.name for source in SOURCES if "tile_product.cuh" in source.read_text()]
    assert products == list(OPTIMIZED_SOURCES)


def compile_for(archs: Sequence[str], source: Path, output: Path, *flags: str) -> None:
    flags = (
        *flags,
        *COMMON_NVCC_FLAGS,
        *BUILD["NVCC_FLAGS"],
        "--threads=0",
        "-Werror=all-warnings",
        f"-I{CHECKOUT / 'csrc'}",
        *(f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in archs),
    )
    compiled = subprocess.run(["nvcc", str(source), "-o", str(output), *flags], capture_output=True, text=True)
    assert compiled.returncode == 0, compiled.stderr
    assert "wgmma" not in compiled.stdout + compiled.stderr  # ptxas makes a note, no warning, where it serializes them
    assert output.stat().st_size > 0


@needs_nvcc
@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.name)
def test_compiles(source: Path, tmp_path: Path):
    flags = () if source.name in OPTIMIZED_SOURCES else (UNOPTIMIZED,)
    compile_for([BUILT_FOR], source, tmp_path / "kernels.o", "-c", *flags)


@needs_nvcc
@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.name)
def test_device_code_compiles_for_other_gpus(source: Path, tmp_path: Path):
    compile_for(ALSO_FOR, source, tmp_path / "kernels.fatbin", "-fatbin", UNOPTIMIZED)


@needs_nvcc
@pytest.mark.parametrize(
    ("statement", "error"),
    [
        ('asm volatile("redux.sync.max.NaN.f32 %0, %0, 0xffffffff;" : "+f"(x[0]));', "not supported on .target"),
        ("__shared__ float tile[20000]; tile[threadIdx.x] = x[1]; x[0] = tile[threadIdx.x ^ 1];", "too much shared"),
        ("x[0] = missing(x[0]);", "missing"),
        ("int unused = 3;", "never referenced"),
    ],
    ids=["instruction", "shared-memory", "unresolved", "warning"],
)
def test_unoptimized_code_is_checked_as_strictly(statement: str, error: str, tmp_path: Path):
    source = tmp_path / "kernel.cu"
    source.write_text(f"__device__ float missing(float);\n__global__ void kernel(float* x) {{ {statement} }}\n")
    with pytest.raises(AssertionError, match=error):
        compile_for(ALSO_FOR, source, tmp_path / "kernels.fatbin", "-fatbin", UNOPTIMIZED)
