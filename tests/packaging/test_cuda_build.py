"""Builds with CUDA by fake compilers: how they are called, and what happens if they fail."""

import re
import sys
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import NamedTuple

import pytest

from sparse_opt.ops.step_ops import STEP_OPS

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="the compilers are shell scripts")

# torch without CUDA builds CUDA code if these variables claim that it has CUDA and name the toolkit.
DRIVER = """
import runpy, sys, torch
torch.version.cuda = "13.0"
from torch.utils import cpp_extension
cpp_extension.CUDA_HOME = sys.argv.pop(1)
sys.argv[0] = "setup.py"
runpy.run_path("setup.py", run_name="__main__")
"""
OUTPUT = 'out=; last=; for word in "$@"; do [ "$last" = -o ] && out=$word; last=$word; done'
NVCC = f"""#!/bin/sh
case "$*" in
  *--version*) echo "Cuda compilation tools, release 13.0, V13.0.88" ;;
  *--list-gpu-arch*) echo compute_75 compute_80 compute_90 compute_100 compute_120 ;;
  *) echo "$@" >> LOG; {OUTPUT}; FAIL : > "$out" ;;
esac
"""
CXX = f"""#!/bin/sh
{OUTPUT}
[ -z "$out" ] && exec c++ "$@"
echo "$@" >> LOG; : > "$out"
"""
ERROR = 'csrc/step/kernel.cu(7): error: identifier "a" is undefined'


class Build(NamedTuple):
    ended: CompletedProcess[str]
    calls: str  # of the compilers, one a line
    extensions: list[Path]

    @property
    def said(self) -> list[str]:
        return [line for line in self.ended.stderr.splitlines() if line.startswith("sparse-opt: ")]


@pytest.fixture
def build(clean_copy, forked_python, tmp_path) -> Callable[..., Build]:
    def run(fail: bool = False, **variables: str | None) -> Build:
        log = tmp_path / "calls"
        log.touch()
        failure = f"echo '{ERROR}' >&2; echo 'and another error: later' >&2; exit 2;" if fail else ""
        scripts = {"cuda/bin/nvcc": NVCC.replace("FAIL", failure), "c++": CXX}
        for name, text in scripts.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text.replace("LOG", str(log)))
            path.chmod(0o755)
        compilers = {"CC": str(tmp_path / "c++"), "CXX": str(tmp_path / "c++"), "LDSHARED": None, "PYTORCH_NVCC": None}
        others = {"SPARSE_OPT_NO_NATIVE": None, "SPARSE_OPT_REQUIRE_NATIVE": None, "TORCH_CUDA_ARCH_LIST": None}
        command = ("-c", DRIVER, tmp_path / "cuda", "--quiet", "build", "--build-base", tmp_path / "build")
        ended = forked_python(*command, cwd=clean_copy, **{**compilers, **others, **variables})
        return Build(ended, log.read_text(), list(tmp_path.rglob("_kernels*.so")))

    return run


def test_the_kernels_are_compiled_for_what_they_support_of_the_request(build):
    built = build(TORCH_CUDA_ARCH_LIST="7.0 7.5 8.0 9.0+PTX")
    assert built.ended.returncode == 0, built.ended.stderr
    assert built.said == [
        "sparse-opt: building the CUDA kernels for 8.0;9.0a;9.0+PTX; 7.0, 7.5 left out: the CUDA kernels need 8.0 or "
        "newer; 9.0 is built as 9.0a, which has wgmma"
    ]
    codes = set(re.findall(r"-gencode=arch=\w+,code=(\w+)", built.calls))
    assert codes == {"sm_80", "sm_90a", "sm_90", "compute_90"}
    assert 'SPARSE_OPT_CUDA_ARCH_LIST="8.0;9.0a;9.0+PTX"' in built.calls
    (link,) = [line for line in built.calls.splitlines() if "-shared" in line and "ops_cuda.o" in line]
    assert {f"{name}_" for name in re.findall(r"generated/(\w+)\.o", link)} == set(STEP_OPS)
    assert 'SPARSE_OPT_CUDA_ARCH_NOTES="7.0, 7.5 left out' in built.calls
    assert len(built.extensions) > 0


def test_a_list_without_a_gpu_of_the_kernels_builds_those_for_the_cpu(build):
    built = build(TORCH_CUDA_ARCH_LIST="7.0;7.5")
    assert built.ended.returncode == 0, built.ended.stderr
    cause = "TORCH_CUDA_ARCH_LIST=7.0;7.5: 7.0, 7.5 left out: the CUDA kernels need 8.0 or newer"
    assert built.said == [f"sparse-opt: building the extension with its CPU kernels alone: {cause}"]
    assert f'SPARSE_OPT_CUDA_MISSING="{cause}"' in built.calls
    assert ".cu" not in built.calls
    assert len(built.extensions) > 0

    required = build(TORCH_CUDA_ARCH_LIST="7.0;7.5", SPARSE_OPT_REQUIRE_NATIVE="1")
    assert required.ended.returncode != 0
    assert required.said == [f"sparse-opt: the CUDA kernels cannot be built: {cause}"]


@pytest.mark.parametrize(
    ("arch_list", "message"),
    [
        ("8.0;sm_90", "TORCH_CUDA_ARCH_LIST has 'sm_90', expected entries such as 8.0"),
        ("native", "TORCH_CUDA_ARCH_LIST is native, and torch finds no GPU"),
    ],
)
def test_a_list_that_cannot_be_read_ends_the_build(build, arch_list, message):
    built = build(TORCH_CUDA_ARCH_LIST=arch_list, CUDA_VISIBLE_DEVICES="")
    assert built.ended.returncode != 0
    (line,) = built.said
    assert line.startswith(f"sparse-opt: {message}")


def test_kernels_that_do_not_compile_leave_an_extension_that_says_why(build):
    built = build(fail=True)
    assert built.ended.returncode == 0, built.ended.stderr
    said = [line for line in built.said if "NOT BUILT" in line]
    assert said == [
        f"sparse-opt: THE CUDA KERNELS WERE NOT BUILT, the extension is built without them: {ERROR} "
        "(`pip install --verbose` shows all that the compilers print)"
    ]
    assert "and another error: later" in built.ended.stdout  # the compilers' output is still printed
    recorded = ERROR.replace('"', "'")  # as a C string
    assert f'SPARSE_OPT_CUDA_MISSING="their build failed: {recorded}"' in built.calls
    link, autograd = [line for line in built.calls.splitlines() if "-shared" in line]
    assert "ops_cpu.o" in link and "tile_weight_grad_cpu.o" in link
    assert "_cuda.o" not in link and "tile_weight_grad.o" not in link and "generated" not in link
    assert "bound_params.o" in autograd
    assert len(built.extensions) > 0


def test_kernels_that_do_not_compile_end_a_build_that_requires_them(build):
    built = build(fail=True, SPARSE_OPT_REQUIRE_NATIVE="1")
    assert built.ended.returncode != 0
    assert built.said[-1].startswith(f"sparse-opt: the extension was not built: {ERROR} (")
    assert built.extensions == []
