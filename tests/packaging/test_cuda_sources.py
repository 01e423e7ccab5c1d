"""The CUDA sources compile for the GPUs that matter, on a machine that need not have one."""

from __future__ import annotations

import ast
import shutil
import subprocess
from pathlib import Path

import pytest
from torch.utils.cpp_extension import COMMON_NVCC_FLAGS

CHECKOUT = Path(__file__).resolve().parents[2]
SOURCES = sorted((CHECKOUT / "csrc").rglob("*.cu"))
ARCHS = ("80", "90", "100")

needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc, of CUDA 12.8 or newer, on PATH")


def setup_constant(name: str) -> list[str]:
    """A literal of setup.py: the sources are compiled here with the flags they are built with."""
    for node in ast.parse((CHECKOUT / "setup.py").read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
            return ast.literal_eval(node.value)
    raise AssertionError(f"setup.py assigns no {name}")


def test_there_are_sources_to_compile():
    assert SOURCES


@needs_nvcc
@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.name)
def test_compiles(source: Path, tmp_path: Path):
    code = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in ARCHS]
    flags = [
        *COMMON_NVCC_FLAGS,
        *setup_constant("NVCC_FLAGS"),
        "--threads=0",
        "-Werror=all-warnings",
        f"-I{CHECKOUT / 'csrc'}",
    ]
    object_file = tmp_path / "kernels.o"
    compiled = subprocess.run(
        ["nvcc", "-c", str(source), "-o", str(object_file), *flags, *code], capture_output=True, text=True
    )
    assert compiled.returncode == 0, compiled.stderr
    assert object_file.stat().st_size > 0
