"""Build the package: the import map, and the native extension where torch and a compiler are found.

Metadata and tool settings stand in pyproject.toml. The environment decides the rest:

SPARSE_OPT_NO_NATIVE=1        leave the extension out
SPARSE_OPT_REQUIRE_NATIVE=1   let the build fail when the extension cannot be built, instead of going on without it
TORCH_CUDA_ARCH_LIST, CUDA_HOME, MAX_JOBS, CXX   as everywhere in torch's builds
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import setuptools
from setuptools import errors, find_packages, setup
from setuptools.command.build_py import build_py

# --no-build-isolation takes what is installed; an older setuptools cannot read pyproject.toml, nor say why.
if int(setuptools.__version__.split(".")[0]) < 77:
    sys.exit(
        f"sparse-opt: the build needs setuptools 77 or newer, found {setuptools.__version__}: pip install -U setuptools"
    )

# The folders stand side by side on disk and are imported under one root. `sparse_opt` is named although it maps to
# itself: without it an editable install loses the other three.
PACKAGE_DIR = {
    "sparse_opt": "sparse_opt",
    "sparse_opt.triton_kernels": "triton_kernels",
    "sparse_opt.trainers": "trainers",
    "sparse_opt.bench": "bench",
}

# Every floating-point operation is rounded on its own, on the host (-ffp-contract=off) and on the GPU (--fmad=false):
# a contraction in one backend and not in another would change the last bit.
# With errno and traps, which nobody reads, the compiler would not vectorise a square root; torch builds without too.
CXX_FLAGS = ["-O3", "-g0", "-std=c++20", "-ffp-contract=off", "-fvisibility=hidden"]
CXX_FLAGS += ["-fno-math-errno", "-fno-trapping-math"]
NVCC_FLAGS = ["-O3", "-std=c++20", "--fmad=false", "-lineinfo", "-Xcompiler=-ffp-contract=off,-fvisibility=hidden"]
# at::parallel_for is inlined from torch's headers and runs on one thread where OpenMP is off.
OPENMP = [] if sys.platform == "darwin" else ["-fopenmp"]
# The field's usual GPUs: A100, RTX 30, RTX 40, H100/H200, B200, RTX 50; the newest also as PTX, for what comes later.
# 9.0a is 9.0 and what no other GPU has, wgmma (csrc/kernels/cuda/warpgroup.cuh): its code runs on H100 and H200 alone.
CUDA_ARCHS = ("8.0", "8.6", "8.9", "9.0a", "10.0", "12.0")

REQUIRE_NATIVE = os.environ.get("SPARSE_OPT_REQUIRE_NATIVE") == "1"


def say(message):
    print(f"sparse-opt: {message}", file=sys.stderr, flush=True)


def nvcc(cuda_home, option):
    return subprocess.check_output([os.path.join(cuda_home, "bin", "nvcc"), option], text=True)


def set_cuda_home():
    """Name the toolkit that nvcc says it is in: the nvcc on PATH may be a wrapper that stands elsewhere."""
    compiler = shutil.which("nvcc")
    if compiler and not (os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")):
        commands = subprocess.run([compiler, "--dryrun", "any.cu"], stderr=subprocess.PIPE, text=True).stderr
        if top := re.search(r"^#\$ TOP=(.+)$", commands, re.MULTILINE):
            os.environ["CUDA_HOME"] = os.path.realpath(top[1])


def why_no_cuda(torch, cuda_home):
    """Empty when the CUDA kernels can be built, else the reason in one line."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} has no CUDA"
    if cuda_home is None or not os.path.exists(os.path.join(cuda_home, "bin", "nvcc")):
        return f"no nvcc was found (on PATH, in CUDA_HOME or in {cuda_home or '/usr/local/cuda'})"
    release = re.search(r"release (\d+)\.\d+", nvcc(cuda_home, "--version"))
    if release is None or release[1] != torch.version.cuda.split(".")[0]:
        found = release[0] if release else "of unknown release"
        return f"nvcc {found} in {cuda_home} does not belong to torch's CUDA {torch.version.cuda}"
    return ""


def cuda_arch_list(cuda_home):
    """TORCH_CUDA_ARCH_LIST, else those of CUDA_ARCHS that this nvcc knows, the newest as PTX too."""
    known = nvcc(cuda_home, "--list-gpu-arch").split()
    archs = [arch for arch in CUDA_ARCHS if f"compute_{arch.rstrip('a').replace('.', '')}" in known]  # lists no 90a
    newest = [arch for arch in archs if not arch.endswith("a")][-1]  # the PTX of 9.0a is for 9.0 alone
    usual = ";".join(arch + "+PTX" * (arch == newest) for arch in archs)
    os.environ["TORCH_CUDA_ARCH_LIST"] = os.environ.get("TORCH_CUDA_ARCH_LIST") or usual
    return os.environ["TORCH_CUDA_ARCH_LIST"]


def native_extension(torch, cuda_home, missing):
    from torch.utils import cpp_extension

    sources = [path for path in Path("csrc").rglob("*.cpp") if not path.stem.endswith("_cuda")]
    make, arch_list = cpp_extension.CppExtension, ""
    if not missing:
        sources += [*Path("csrc").glob("*_cuda.cpp"), *Path("csrc").rglob("*.cu")]
        make, arch_list = cpp_extension.CUDAExtension, cuda_arch_list(cuda_home)
    build_info = {"TORCH_VERSION": torch.__version__, "CUDA_MISSING": missing, "CUDA_ARCH_LIST": arch_list}
    macros = [(f"SPARSE_OPT_{name}", f'"{value}"') for name, value in build_info.items()]
    return make(
        "sparse_opt._C",
        sorted(map(str, sources)),
        include_dirs=[os.path.abspath("csrc")],
        define_macros=macros if missing else [*macros, ("SPARSE_OPT_WITH_CUDA", None)],
        extra_compile_args={"cxx": CXX_FLAGS + OPENMP, "nvcc": NVCC_FLAGS},
        extra_link_args=OPENMP,
        depends=sorted(str(path) for path in Path("csrc").rglob("*.*") if path.suffix in (".h", ".cuh")),
    )


def with_extension(torch):
    """The part of setup()'s arguments that builds the extension."""
    set_cuda_home()  # torch reads it as the next line imports it
    from torch.utils.cpp_extension import CUDA_HOME, BuildExtension

    missing = why_no_cuda(torch, CUDA_HOME)

    class BuildNative(BuildExtension):
        """torch's build, which an absent or failing compiler does not stop unless the extension is required."""

        def build_extensions(self):
            if missing:
                say(f"building the extension with its CPU kernels alone: {missing}")
            try:
                super().build_extensions()
            except (RuntimeError, OSError, errors.CCompilerError, errors.BaseError) as error:
                if REQUIRE_NATIVE:
                    raise
                say(f"THE EXTENSION WAS NOT BUILT, the package goes without its native backends: {error}")
                for extension in self.extensions:
                    extension.optional = True  # there is nothing to copy
                    Path(self.get_ext_fullpath(extension.name)).unlink(missing_ok=True)  # an older build's

    return {"ext_modules": [native_extension(torch, CUDA_HOME, missing)], "cmdclass": {"build_ext": BuildNative}}


def without_torch(cause):
    """The part of setup()'s arguments that builds pure Python, and says why once the build begins."""

    class BuildPure(build_py):
        def run(self):
            say(f"building pure Python, without the native backends: {cause}")
            super().run()

    return {"cmdclass": {"build_py": BuildPure}}


def native():
    if os.environ.get("SPARSE_OPT_NO_NATIVE") == "1":
        return {}
    try:
        import torch
    except ImportError as error:
        if REQUIRE_NATIVE:
            raise
        return without_torch(f"{error}; install torch, then `pip install --no-build-isolation .`")
    return with_extension(torch)


setup(
    package_dir=PACKAGE_DIR,
    packages=[
        name
        for root, folder in PACKAGE_DIR.items()
        for name in (root, *(f"{root}.{package}" for package in find_packages(folder)))
    ],
    **native(),
)
