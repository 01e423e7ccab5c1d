"""A build compiles what has changed since the last one, shown with setup.py, three small sources and two rules."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from .conftest import Python

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="the compiler is a shell script")

FILES = (
    "setup.py",
    "pyproject.toml",
    "README.md",
    "LICENSE",
    "csrc/build_native.py",
    "csrc/cxx_flags.txt",
    "csrc/step/rules/generate.py",
)
SOURCES = {
    "csrc/shape.h": "int shape();",
    "csrc/kernels/first.cpp": '#include "shape.h"\nint first() { return shape(); }',
    "csrc/kernels/second.cpp": '#include "shape.h"\nint second() { return shape(); }',
    "csrc/module.cpp": "int shape() { return 2; }",
}
# What the sources of two rules include, and a source that includes the list of rules.
RULES = {
    "sparse_opt/cuda_archs.py": "def select(requested, supported): return '8.0', ()",
    "csrc/step/rules/rule.h": """\
#pragma once
struct StepArguments {};
using cudaStream_t = void*;
struct RuleDefaults {};""",
    "csrc/step/step.cuh": """\
#pragma once
#include "step/rules/rule.h"
namespace sparse_opt::cuda {
template <typename Rule>
void step(const StepArguments&, const typename Rule::Options&, typename Rule::TensorScalars*, cudaStream_t) {}
}""",
    "csrc/module.cpp": """\
#include "generated/rules.h"
int shape() { return 2; }
#define SPARSE_OPT_NAME(Rule) sparse_opt::Rule::kOp,
const char* ops[] = {SPARSE_OPT_FOR_EACH_RULE(SPARSE_OPT_NAME)};""",
}
RULE = """\
#pragma once
#include "rule.h"
namespace sparse_opt {{
struct {struct} : RuleDefaults {{
  static constexpr const char* kOp = "{op}";
  struct Options {{}};
  struct TensorScalars {{}};
}};
}}"""
# Calls the C++ compiler without the options that only nvcc has, which are last.
NVCC = """\
#!{python}
import os, sys
if "--version" in sys.argv:
    print("Cuda compilation tools, release 13.0, V13.0.88")
elif "--list-gpu-arch" in sys.argv:
    print("compute_80")
else:
    options = sys.argv[1 : sys.argv.index("-o") + 2]
    os.execl("{compiler}", "{compiler}", "-std=c++20", "-fPIC", "-x", "c++", *options)
"""
INPLACE = ("setup.py", "--quiet", "build_ext", "--inplace")
# What `pip install --no-build-isolation --editable` calls.
EDITABLE = ("-c", "import sys; from setuptools import build_meta; build_meta.build_editable(sys.argv[1])")


class Project:
    compiler = shutil.which(os.environ.get("CXX", "c++"))

    def __init__(self, folder: Path, python: Python) -> None:
        self.folder, self.python = folder, python
        self.variables: dict[str, str] = {}

    def objects(self) -> dict[str, int]:
        return {path.name: path.stat().st_mtime_ns for path in self.folder.glob("build/temp*/**/*.o")}

    @property
    def extension(self) -> Path:
        (path,) = self.folder.glob("sparse_opt/_kernels*.so")
        return path

    def build(self, *command: str | Path, compiler: Path | str | None = compiler) -> set[str]:
        """Build, and return the names of the objects that this compiled."""
        before = self.objects()
        built = self.run(*command, compiler=compiler)
        assert built.returncode == 0, built.stdout + built.stderr
        return {name for name, time in self.objects().items() if before.get(name) != time}

    def run(self, *command: str | Path, compiler: Path | str | None = compiler) -> subprocess.CompletedProcess[str]:
        ninja = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        variables = {
            "SPARSE_OPT_REQUIRE_NATIVE": "1",
            "SPARSE_OPT_NO_AUTOGRAD": "1",
            "SPARSE_OPT_NO_NATIVE": None,
            "CC": None,
            "PATH": ninja,
        }
        return self.python(*(command or INPLACE), cwd=self.folder, CXX=str(compiler), **variables, **self.variables)

    def write(self, source: str, text: str) -> None:
        (self.folder / source).parent.mkdir(parents=True, exist_ok=True)
        (self.folder / source).write_text(f"{text}\n")

    def edit(self, source: str) -> None:
        with open(self.folder / source, "a") as file:
            file.write("\n// edited\n")


@pytest.fixture
def project(clean_copy, forked_python, tmp_path) -> Project:
    for file in FILES:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(clean_copy / file, tmp_path / file)
    for package in ("sparse_opt", "triton_kernels", "trainers", "bench"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text('__version__ = "1"\n')
    project = Project(tmp_path, forked_python)
    for name, text in SOURCES.items():
        project.write(name, text)
    return project


@pytest.fixture
def project_with_rules(project) -> Project:
    """Two rules, and an nvcc."""
    nvcc = NVCC.format(python=sys.executable, compiler=project.compiler)
    for name, text in {**RULES, "cuda/bin/nvcc": nvcc, "cuda/lib64/libcudart_static.a": "!<arch>"}.items():
        project.write(name, text)
    (project.folder / "cuda/bin/nvcc").chmod(0o755)
    for struct in ("AdamW", "Lion"):
        write_rule(project, struct)
    project.variables = {"SPARSE_OPT_CUDA": "1", "CUDA_HOME": str(project.folder / "cuda")}
    return project


def write_rule(project: Project, struct: str, op: str = "") -> None:
    name = struct.lower()
    project.write(f"csrc/step/rules/{name}.h", RULE.format(struct=struct, op=op or f"indexed_{name}_"))


def test_a_build_compiles_the_objects_that_depend_on_a_change(project):
    assert project.build() == {"module.o", "first.o", "second.o"}
    project.edit("csrc/kernels/first.cpp")
    assert project.build() == {"first.o"}
    project.edit("csrc/shape.h")
    assert project.build() == {"first.o", "second.o"}
    linked = project.extension.stat().st_mtime_ns
    assert project.build() == set()
    assert project.extension.stat().st_mtime_ns == linked
    # An editable install, too, compiles what has changed.
    project.edit("csrc/kernels/first.cpp")
    (project.folder / "wheel").mkdir()
    assert project.build(*EDITABLE, project.folder / "wheel") == {"first.o"}
    # The extension has no code of a deleted source.
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


def test_a_build_compiles_the_kernels_of_the_rules_that_have_changed(project_with_rules):
    project = project_with_rules
    rules = {"indexed_adamw.o", "indexed_lion.o"}
    assert project.build() == {"module.o", "first.o", "second.o", *rules}
    assert project.build() == set()
    project.edit("csrc/step/rules/lion.h")
    assert project.build() == {"module.o", "indexed_lion.o"}
    project.edit("csrc/step/rules/rule.h")
    assert project.build() == {"module.o", *rules}


def test_a_header_with_other_names_ends_the_build(project):
    write_rule(project, "Lion", op="indexed_lyon_")
    built = project.run()
    assert built.returncode != 0
    message = 'csrc/step/rules/lion.h: expected kOp = "indexed_lion_"; found indexed_lyon_'
    assert f"sparse-opt: {message}\n" in built.stderr
    project.write("csrc/step/rules/lion.h", RULE.format(struct="Lyon", op="indexed_lion_"))
    message = "expected one struct derived from RuleDefaults and named lion, in any capitalization; found Lyon"
    assert message in project.run().stderr
