"""A build compiles what has changed since the last one, shown with setup.py and three small sources."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest

from .conftest import Python

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="the compiler is a shell script")

SOURCES = {
    "csrc/shape.h": "int shape();",
    "csrc/kernels/first.cpp": '#include "shape.h"\nint first() { return shape(); }',
    "csrc/kernels/second.cpp": '#include "shape.h"\nint second() { return shape(); }',
    "csrc/module.cpp": "int shape() { return 2; }",
}
INPLACE = ("setup.py", "--quiet", "build_ext", "--inplace")
EDITABLE = (
    "-m",
    "pip",
    "install",
    "--no-build-isolation",
    "--no-deps",
    "--no-index",
    "--ignore-installed",
    "--editable",
)


class Project:
    compiler = shutil.which(os.environ.get("CXX", "c++"))

    def __init__(self, folder: Path, python: Python) -> None:
        self.folder, self.python = folder, python

    def objects(self) -> dict[str, int]:
        return {path.name: path.stat().st_mtime_ns for path in self.folder.glob("build/temp*/**/*.o")}

    @property
    def extension(self) -> Path:
        (path,) = self.folder.glob("sparse_opt/_kernels*.so")
        return path

    def build(self, *command: str | Path, compiler: Path | str | None = compiler) -> set[str]:
        """Build, and return the names of the objects that this compiled."""
        before = self.objects()
        ninja = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        variables = {
            "SPARSE_OPT_REQUIRE_NATIVE": "1",
            "SPARSE_OPT_NO_AUTOGRAD": "1",
            "SPARSE_OPT_NO_NATIVE": None,
            "CC": None,
            "PATH": ninja,
        }
        built = self.python(*(command or INPLACE), cwd=self.folder, CXX=str(compiler), **variables)
        assert built.returncode == 0, built.stdout + built.stderr
        return {name for name, time in self.objects().items() if before.get(name) != time}

    def edit(self, source: str) -> None:
        with open(self.folder / source, "a") as file:
            file.write("\n// edited\n")


@pytest.fixture
def project(clean_copy, python, tmp_path) -> Project:
    for file in ("setup.py", "pyproject.toml", "README.md", "LICENSE", "csrc/build_native.py"):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        shutil.copy(clean_copy / file, tmp_path / file)
    for package in ("sparse_opt", "triton_kernels", "trainers", "bench"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text('__version__ = "1"\n')
    for name, text in SOURCES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n")
    return Project(tmp_path, python)


def test_a_build_compiles_the_objects_that_depend_on_a_change(project):
    assert project.build() == {"module.o", "first.o", "second.o"}
    project.edit("csrc/kernels/first.cpp")
    assert project.build() == {"first.o"}
    project.edit("csrc/shape.h")
    assert project.build() == {"first.o", "second.o"}
    linked = project.extension.stat().st_mtime_ns
    assert project.build() == set()
    assert project.extension.stat().st_mtime_ns == linked


def test_the_extension_is_newer_than_sources_that_the_build_leaves_out(project):
    project.build()
    kernel = project.folder / "csrc/kernels/first.cu"
    kernel.touch()
    assert project.build() == set()
    assert project.extension.stat().st_mtime_ns >= kernel.stat().st_mtime_ns


def test_an_editable_install_compiles_what_has_changed(project):
    project.build()
    project.edit("csrc/kernels/first.cpp")
    assert project.build(*EDITABLE, ".", "--prefix", project.folder / "prefix") == {"first.o"}


def test_the_extension_has_no_code_of_a_deleted_source(project):
    project.build()
    assert b"second" in project.extension.read_bytes()
    (project.folder / "csrc/kernels/second.cpp").unlink()
    assert project.build() == set()
    assert b"second" not in project.extension.read_bytes()


def test_a_source_edited_during_a_build_is_compiled_by_the_next(project, tmp_path):
    edit = f'echo "int late() {{ return 3; }}" >> {project.folder}/csrc/kernels/first.cpp'
    compiler = tmp_path / "c++"
    compiler.write_text(f'#!/bin/sh\n{project.compiler} "$@"\ncase "$*" in *first.cpp*) {edit} ;; esac\n')
    compiler.chmod(0o755)
    project.build(compiler=compiler)
    assert b"late" not in project.extension.read_bytes()
    compiler.write_text(f'#!/bin/sh\nexec {project.compiler} "$@"\n')
    assert project.build(compiler=compiler) == {"first.o"}
    assert b"late" in project.extension.read_bytes()
