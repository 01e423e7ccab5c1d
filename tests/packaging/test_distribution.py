"""What is built from a checkout: wheel, source distribution, editable install; and the symbols of its library."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from sparse_opt import backends

MAPPED = ("triton_kernels", "trainers", "bench")
NO_NATIVE = {"SPARSE_OPT_NO_NATIVE": "1", "SPARSE_OPT_REQUIRE_NATIVE": None}
BUILD = ("-m", "pip", "wheel", "--verbose", "--no-build-isolation", "--no-deps", "--no-index", ".", "--wheel-dir")


def modules(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*.py") if "results" not in path.parts}


@pytest.fixture(scope="module")
def wheel(clean_copy, python, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    built = python(*BUILD, out, cwd=clean_copy, **NO_NATIVE)
    assert built.returncode == 0, built.stdout + built.stderr
    (wheel,) = out.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def wheel_files(wheel) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def test_the_only_top_level_name_is_sparse_opt(wheel_files):
    top_level = {name.split("/")[0] for name in wheel_files}
    assert {name for name in top_level if not name.endswith(".dist-info")} == {"sparse_opt"}


def test_nothing_of_it_runs_before_it_is_imported(wheel, wheel_files):
    """No .pth file, which Python runs when it starts; of entry points for other packages, vLLM's plugin only."""
    assert [name for name in wheel_files if name.endswith((".pth", "sitecustomize.py", "usercustomize.py"))] == []
    (name,) = (name for name in wheel_files if name.endswith(".dist-info/entry_points.txt"))
    with zipfile.ZipFile(wheel) as archive:
        lines = archive.read(name).decode().split("\n")
    assert [line for line in lines if line] == [
        "[console_scripts]",
        "sparse-opt = sparse_opt.cli.main:main",
        "[vllm.general_plugins]",
        "sparse_opt = sparse_opt.integrations.vllm.plugin:register",
    ]


@pytest.mark.parametrize("folder", ["sparse_opt", *MAPPED])
def test_wheel_holds_every_module(wheel_files, checkout, folder):
    prefix = "sparse_opt" if folder == "sparse_opt" else f"sparse_opt/{folder}"
    assert {f"{prefix}/{module}" for module in modules(checkout / folder)} | {"sparse_opt/py.typed"} <= wheel_files


def test_wheel_holds_no_sources_tests_or_results(wheel_files):
    native_or_results = (".cpp", ".cu", ".cuh", ".h", ".json")
    strangers = [name for name in wheel_files if name.endswith(native_or_results) or "tests" in name.split("/")]
    assert strangers == []


def test_source_distribution_holds_what_a_build_needs(clean_copy, python, tmp_path, checkout):
    build = f"import setuptools.build_meta as backend; backend.build_sdist({str(tmp_path)!r})"
    built = python("-c", build, cwd=clean_copy, **NO_NATIVE)
    assert built.returncode == 0, built.stdout + built.stderr
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        held = {name.split("/", 1)[1] for name in tar.getnames() if "/" in name}
    native = {
        path.relative_to(checkout).as_posix() for path in (checkout / "csrc").rglob("*.*") if path.suffix != ".pyc"
    }
    assert (
        native | {"setup.py", "pyproject.toml", "LICENSE", "Makefile", ".ci/step.py", "triton_kernels/__init__.py"}
        <= held
    )


def test_editable_install_keeps_the_import_map(clean_copy, python, tmp_path):
    install = ("-m", "pip", "install", "--no-build-isolation", "--no-deps", "--no-index", "--ignore-installed")
    installed = python(*install, "--prefix", tmp_path, "--editable", ".", cwd=clean_copy, **NO_NATIVE)
    assert installed.returncode == 0, installed.stdout + installed.stderr
    (packages,) = tmp_path.rglob("site-packages")
    # -S keeps this environment's own packages out, a sparse-opt among them.
    look = (
        f"import importlib.util, site; site.addsitedir({str(packages)!r})\n"
        f"for name in {MAPPED!r}: print(importlib.util.find_spec('sparse_opt.' + name).origin)\n"
    )
    found = python("-S", "-c", look, cwd=tmp_path, PYTHONPATH=None)
    assert found.returncode == 0, found.stderr
    assert found.stdout.split() == [str(clean_copy / folder / "__init__.py") for folder in MAPPED]


def test_no_torch_builds_pure_python_and_says_so_in_one_line(clean_copy, python, tmp_path):
    hidden = tmp_path / "hidden" / "torch"
    hidden.mkdir(parents=True)
    (hidden / "__init__.py").write_text("raise ImportError('torch is hidden from this build')\n")
    variables = {"PYTHONPATH": str(hidden.parent), "SPARSE_OPT_NO_NATIVE": None}
    command = ("setup.py", "--quiet", "build", "--build-base", tmp_path)

    built = python(*command, cwd=clean_copy, SPARSE_OPT_REQUIRE_NATIVE=None, **variables)
    assert built.returncode == 0, built.stderr
    (line,) = [line for line in built.stderr.splitlines() if line.startswith("sparse-opt:")]
    assert "torch is hidden from this build" in line
    assert "pip install --no-build-isolation ." in line

    refused = python(*command, cwd=clean_copy, SPARSE_OPT_REQUIRE_NATIVE="1", **variables)
    assert refused.returncode != 0


def test_no_compiler_stops_the_build_only_where_the_extension_is_required(clean_copy, forked_python, tmp_path):
    missing = os.fspath(tmp_path / "no-such-compiler")
    variables = {"CC": missing, "CXX": missing, "SPARSE_OPT_NO_NATIVE": None}
    command = ("setup.py", "--quiet", "build", "--build-base", tmp_path)

    built = forked_python(*command, cwd=clean_copy, SPARSE_OPT_REQUIRE_NATIVE=None, **variables)
    assert built.returncode == 0, built.stderr
    assert "THE EXTENSION WAS NOT BUILT" in built.stderr
    assert not list(tmp_path.rglob("_kernels*"))

    refused = forked_python(*command, cwd=clean_copy, SPARSE_OPT_REQUIRE_NATIVE="1", **variables)
    assert refused.returncode != 0


@pytest.fixture(scope="module")
def library() -> str:
    if not sys.platform.startswith("linux") or not shutil.which("nm"):
        pytest.skip("needs nm")
    module, cause = backends.native_module()
    if module is None:
        pytest.skip("needs the extension: " + cause)
    assert module.__file__ is not None
    return module.__file__


def symbols(library: str, which: str) -> list[str]:
    listed = subprocess.run(["nm", "--dynamic", which, library], capture_output=True, text=True, check=True).stdout
    return [line.split()[-1].split("@")[0] for line in listed.splitlines()]


def test_the_file_name_is_that_of_the_limited_api(library):
    assert library.endswith("/_kernels.abi3.so")


def test_abi_of_torch_is_its_c_interface(library):
    needed = symbols(library, "--undefined-only")
    assert [name for name in needed if re.match(r"_Z\w*(2at|3c10|5torch)", name)] == []
    assert {"torch_library_impl", "aoti_torch_get_numel"} <= set(needed)


def test_abi_of_python_is_the_limited_api(library):
    """Names that Python's documentation lists as part of the stable ABI; any other has to be looked up there."""
    stable = {
        *(
            "PyArg_ParseTuple",
            "PyBool_FromLong",
            "PyCapsule_New",
            "PyDict_New",
            "PyDict_SetItemString",
            "PyErr_SetString",
        ),
        *("PyEval_RestoreThread", "PyEval_SaveThread", "PyExc_RuntimeError", "PyList_Append", "PyList_New"),
        *("PyLong_FromSize_t", "PyModule_Create2", "PyUnicode_FromString", "_Py_Dealloc", "_Py_NoneStruct"),
        *("Py_DecRef", "Py_IncRef"),
    }
    assert {name for name in symbols(library, "--undefined-only") if name.startswith(("Py", "_Py"))} <= stable
