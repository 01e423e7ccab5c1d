"""`sparse-opt build` compiles sparse_opt._autograd from the source in a wheel, and only that library is loaded."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from sparse_opt import backends

COMMAND = "import sys; from sparse_opt.cli.main import main; sys.exit(main(sys.argv[1:]))"
LOAD = "from sparse_opt import backends; print(*backends.autograd_module())"
PATH = "from sparse_opt import backends; print(backends.compiled_autograd())"
# A step, which warns if the library does not collect its gradients.
STEP = """
import torch
from sparse_opt import MaskSet, SparseAdamW
model = torch.nn.Linear(8, 8)
optimizer = SparseAdamW(model, MaskSet.random(model, density=0.5, seed=0))
model(torch.ones(2, 8)).sum().backward()
optimizer.step()
"""
# torch asks for its version first.
FAILING_COMPILER = """#!/bin/sh
case "$*" in *-dumpversion*) echo 12.2.0; exit;; esac
echo "bound_params.cpp:7:2: error: the one of this test"
exit 1
"""
Run = Callable[..., "tuple[int, str, str]"]


@pytest.fixture(scope="module")
def wheel_files(clean_copy, forked_python, tmp_path_factory) -> Path:
    """The Python files and the source that a wheel has, and the library of the ops of this environment."""
    kernels, cause = backends.native_module()
    if kernels is None:
        pytest.skip("needs the extension: " + cause)
    folder = tmp_path_factory.mktemp("wheel_files")
    built = forked_python(
        *("setup.py", "--quiet", "build_py", "--build-lib", folder), cwd=clean_copy, SPARSE_OPT_NO_NATIVE=None
    )
    assert built.returncode == 0, built.stderr
    shutil.copy(kernels.__file__, folder / "sparse_opt")
    return folder


@pytest.fixture
def wheel(wheel_files, forked_python, tmp_path) -> Run:
    """`wheel(code, *arguments)` -> exit code, stdout and stderr of a process that imports a copy of these files."""
    shutil.copytree(wheel_files, tmp_path / "wheel")

    def run(code: str, *arguments: str, **variables: str) -> tuple[int, str, str]:
        done = forked_python(
            *("-c", code, *arguments), cwd=tmp_path / "wheel", XDG_CACHE_HOME=str(tmp_path / "cache"), **variables
        )
        return done.returncode, done.stdout, done.stderr

    return run


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler")
def test_it_is_compiled_once_and_collects_gradients(wheel, tmp_path):
    code, out, err = wheel(COMMAND, "build")
    assert code == 0, err
    (library,) = (path for path in (tmp_path / "cache").rglob("*") if path.is_file())
    assert out.endswith(f"built {library}\n")
    assert wheel(COMMAND, "build") == (0, f"sparse_opt._autograd is already built: {library}\n", "")
    assert wheel(STEP) == (0, "", "")
    assert f"native  ({library})\n" in wheel(COMMAND, "doctor")[1]


def test_doctor_and_the_warning_name_the_command(wheel):
    cause = "the extension sparse_opt._autograd was not built (`sparse-opt build` compiles it, in about a minute)"
    (line,) = (line for line in wheel(COMMAND, "doctor")[1].splitlines() if line.startswith("autograd"))
    assert cause in line
    code, _, err = wheel(STEP)
    assert code == 0 and cause in err


def test_only_a_library_of_this_source_is_loaded(wheel, tmp_path):
    library = Path(wheel(PATH)[1].strip())
    library.parent.mkdir(parents=True)
    library.write_bytes(b"not a library")
    code, out, _ = wheel(LOAD)
    assert code == 0 and out.startswith(f"None {library}: ")
    assert "`sparse-opt build --force` compiles it again" in out
    with (tmp_path / "wheel/sparse_opt/_autograd_source/cxx_flags.txt").open("a") as flags:
        flags.write("-O2")
    assert "was not built (`sparse-opt build` compiles it" in wheel(LOAD)[1]


@pytest.mark.parametrize("value", ["cache", ""])
def test_a_relative_cache_folder_is_ignored(monkeypatch, tmp_path, value):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", value)
    assert tmp_path / ".cache/sparse-opt/autograd" in backends.compiled_autograd().parents


@pytest.mark.skipif(shutil.which("ninja") is None, reason="needs ninja")
def test_the_first_error_of_the_compiler_and_the_log_are_named(wheel, tmp_path):
    compiler = tmp_path / "g++"
    compiler.write_text(FAILING_COMPILER)
    compiler.chmod(0o755)
    code, _, err = wheel(COMMAND, "build", CXX=str(compiler))
    assert code == 1
    (log,) = (tmp_path / "cache/sparse-opt/autograd").rglob("*.log")
    error = f"bound_params.cpp:7:2: error: the one of this test (all output: {log})"
    assert err.splitlines()[-1] == f"sparse-opt: error: sparse_opt._autograd was not built: {error}"
    assert "the one of this test" in log.read_text()


def test_what_is_missing_is_named_with_how_to_install_it(wheel):
    compiler = "a C++20 compiler, found no 'no-such-compiler' (apt install g++, or name one in CXX)"
    code, out, err = wheel(COMMAND, "build", CXX="no-such-compiler")
    assert (code, out) == (1, "")
    assert err.startswith(f"sparse-opt: error: sparse-opt build needs {compiler}")


def test_a_checkout_has_its_own_build(clean_copy, forked_python):
    refused = forked_python("-c", COMMAND, "build", cwd=clean_copy)
    assert (refused.returncode, refused.stdout) == (1, "")
    assert f"the checkout {clean_copy}: run `make build`" in refused.stderr
