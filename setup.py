"""Build the package: the import map, and the native extension where torch and a compiler are found.

Metadata and tool settings are in pyproject.toml. The environment decides the rest:

SPARSE_OPT_NO_NATIVE=1        leave the extension out
SPARSE_OPT_REQUIRE_NATIVE=1   fail where a compiler fails or TORCH_CUDA_ARCH_LIST names no GPU of the CUDA kernels; else
                              the package is built without them, or without the extension, and says so
TORCH_CUDA_ARCH_LIST, CUDA_HOME, MAX_JOBS, CXX   as everywhere in torch's builds (see sparse_opt/cuda_archs.py)
"""

import os
import re
import runpy
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import setuptools
from setuptools import errors, find_packages, setup
from setuptools.command.build_py import build_py

# --no-build-isolation takes what is installed; an older setuptools cannot read pyproject.toml, nor say why.
if int(setuptools.__version__.split(".")[0]) < 77:
    sys.exit(
        f"sparse-opt: the build needs setuptools 77 or newer, found {setuptools.__version__}: pip install -U setuptools"
    )

# The folders are next to each other on disk and are imported under one root. `sparse_opt` is named although it maps to
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
# Of gcc, clang, nvcc, ptxas and ld.
COMPILER_ERROR = re.compile(r"\b(error|fatal)\s*:|cannot find -l|undefined reference")

REQUIRE_NATIVE = os.environ.get("SPARSE_OPT_REQUIRE_NATIVE") == "1"
HINT = "`pip install --verbose` shows all that the compilers print"


def say(message):
    print(f"sparse-opt: {message}", file=sys.stderr, flush=True)


def nvcc(cuda_home, option):
    return subprocess.check_output([os.path.join(cuda_home, "bin", "nvcc"), option], text=True)


def set_cuda_home():
    """Name the toolkit that nvcc says it is in: the nvcc on PATH may be a wrapper in another folder."""
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


def cuda_archs(torch, cuda_home):
    """What TORCH_CUDA_ARCH_LIST becomes, and lines that say how it differs from the request."""
    requested = os.environ.get("TORCH_CUDA_ARCH_LIST", "")
    if requested == "native":
        visible = [torch.cuda.get_device_capability(index) for index in range(torch.cuda.device_count())]
        requested = ";".join(f"{major}.{minor}" for major, minor in visible)
        if not visible:
            sys.exit("sparse-opt: TORCH_CUDA_ARCH_LIST is native, and torch finds no GPU")
    select = runpy.run_path("sparse_opt/cuda_archs.py")["select"]
    try:
        return select(requested, nvcc(cuda_home, "--list-gpu-arch").split())
    except ValueError as error:
        sys.exit(f"sparse-opt: {error}")


def native_extension(torch, missing, archs, notes):
    """The extension; with its CPU kernels alone where `missing` is why there are no CUDA kernels."""
    from torch.utils import cpp_extension

    sources = [path for path in Path("csrc").rglob("*.cpp") if not path.stem.endswith("_cuda")]
    make = cpp_extension.CppExtension
    if not missing:
        sources += [*Path("csrc").rglob("*_cuda.cpp"), *Path("csrc").rglob("*.cu")]
        make = cpp_extension.CUDAExtension
        os.environ["TORCH_CUDA_ARCH_LIST"] = archs
    build_info = {
        "TORCH_VERSION": torch.__version__,
        "CUDA_MISSING": re.sub(r"[^\w ,;:.+()/=-]", "'", missing),  # a compiler's words, in a shell and in C++
        "CUDA_ARCH_LIST": "" if missing else archs,
        "CUDA_ARCH_NOTES": "; ".join(notes),
    }
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


def why_failed(build):
    """Run `build`: empty if it succeeds, else the first error that a compiler printed, or what was raised instead."""
    failure = ""
    with tempfile.NamedTemporaryFile("r", errors="replace") as log:
        sys.stdout.flush()
        sys.stderr.flush()
        streams = [(stream, os.dup(stream)) for stream in (1, 2)]
        with subprocess.Popen(["tee", log.name], stdin=subprocess.PIPE) as tee:
            for stream, _ in streams:
                os.dup2(tee.stdin.fileno(), stream)
            try:
                build()
            except (RuntimeError, OSError, errors.CCompilerError, errors.BaseError) as error:
                failure = str(error)
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                for stream, original in streams:
                    os.dup2(original, stream)
                    os.close(original)
        return failure and next(filter(COMPILER_ERROR.search, log), failure).strip()


def with_extension(torch):
    """The part of setup()'s arguments that builds the extension."""
    set_cuda_home()  # torch reads it as the next line imports it
    from torch.utils.cpp_extension import CUDA_HOME, BuildExtension

    missing = why_no_cuda(torch, CUDA_HOME)
    archs, notes = ("", ()) if missing else cuda_archs(torch, CUDA_HOME)
    if not missing and not archs:
        missing = f"TORCH_CUDA_ARCH_LIST={os.environ.get('TORCH_CUDA_ARCH_LIST', '')}: {'; '.join(notes)}"
        if REQUIRE_NATIVE:
            sys.exit(f"sparse-opt: the CUDA kernels cannot be built: {missing}")

    class BuildNative(BuildExtension):
        """torch's build, which an absent or failing compiler does not stop unless the extension is required."""

        def build_extensions(self):
            if missing:
                say(f"building the extension with its CPU kernels alone: {missing}")
            else:
                say("; ".join([f"building the CUDA kernels for {archs}", *notes]))
            failure = why_failed(super().build_extensions)
            if failure and not missing and not REQUIRE_NATIVE:
                say(f"THE CUDA KERNELS WERE NOT BUILT, the extension is built without them: {failure} ({HINT})")
                without_cuda = native_extension(torch, f"their build failed: {failure}", archs, notes)
                vars(self.extensions[0]).update(vars(without_cuda))
                failure = why_failed(super().build_extensions)
            if failure and REQUIRE_NATIVE:
                sys.exit(f"sparse-opt: the extension was not built: {failure} ({HINT})")
            if failure:
                say(f"THE EXTENSION WAS NOT BUILT, the package has no native backends: {failure} ({HINT})")
                for extension in self.extensions:
                    extension.optional = True  # there is nothing to copy
                    Path(self.get_ext_fullpath(extension.name)).unlink(missing_ok=True)  # an older build's

    extension = native_extension(torch, missing, archs, notes)
    return {"ext_modules": [extension], "cmdclass": {"build_ext": BuildNative}}


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
