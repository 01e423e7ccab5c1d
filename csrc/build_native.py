"""How setup.py builds the native libraries from the sources in this folder.

`sparse_opt._kernels` has the ops, on torch's stable ABI and Python's limited API: one binary for torch 2.10 and newer,
and for Python 3.11 and newer. `sparse_opt._autograd`, from autograd/, belongs to one version of both, and is optional.
The package has its source too, which `sparse-opt build` compiles where a wheel is installed.

torch's BuildExtension runs ninja in build/temp.*. It compiles a source again after a change of the source, of a header
that it includes, or of the command. The build also writes sources: those that follow from the optimizers' headers
(step/rules/generate.py). The docstring of setup.py lists the environment variables.
"""

import contextlib
import os
import re
import runpy
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from setuptools import Extension, errors
from setuptools.command.build_py import build_py
from setuptools.modified import newer_group

# Every floating-point operation is rounded on its own, on the host (-ffp-contract=off) and on the GPU (--fmad=false):
# a contraction in one backend and not in another would change the last bit.
# With errno and traps, which nobody reads, the compiler would not vectorise a square root; torch builds without too.
# `sparse-opt build` reads the same file.
CXX_FLAGS = Path(__file__).with_name("cxx_flags.txt").read_text().split()
NVCC_FLAGS = ["-O3", "-std=c++20", "--fmad=false", "-lineinfo", "-Xcompiler=-ffp-contract=off,-fvisibility=hidden"]
SOURCES = sorted(path for path in Path("csrc").rglob("*") if path.suffix in (".cpp", ".cu", ".h", ".cuh"))
GENERATED = Path("build/generated")
INCLUDE = re.compile(r'^\s*#\s*include "(.+)"', re.MULTILINE)
# Of gcc, clang, nvcc, ptxas and ld.
COMPILER_ERROR = re.compile(r"\b(error|fatal)\s*:|cannot find -l|undefined reference")

# Torch's C interface as of this version; functions of later ones are not declared.
STABLE_ABI = ["-DTORCH_TARGET_VERSION=0x020a000000000000", "-DTORCH_STABLE_ONLY"]
MINIMUM_TORCH = (2, 10)
PYTHON_TAG = "cp311"

REQUIRE_NATIVE = os.environ.get("SPARSE_OPT_REQUIRE_NATIVE") == "1"
BUILD_CUDA = os.environ.get("SPARSE_OPT_CUDA") == "1"
NO_AUTOGRAD = os.environ.get("SPARSE_OPT_NO_AUTOGRAD") == "1"
# Ends the names of the ops; see .ci/kernels_hub.py.
BUILD_HASH = os.environ.get("SPARSE_OPT_BUILD_HASH", "")
HINT = "`pip install --verbose` shows all that the compilers print"


def native_extension():
    """The arguments of setup() that build the extension, or the package without it where torch is not installed."""
    if os.environ.get("SPARSE_OPT_NO_NATIVE") == "1":
        return {}
    try:
        import torch
    except ImportError as error:
        if REQUIRE_NATIVE:
            raise
        return without_torch(f"{error}; install torch, then `pip install --no-build-isolation .`")
    if tuple(map(int, re.findall(r"\d+", torch.__version__)[:2])) < MINIMUM_TORCH:
        cause = f"torch {torch.__version__} is older than 2.10, which has the stable ABI"
        return sys.exit(f"sparse-opt: {cause}") if REQUIRE_NATIVE else without_torch(cause)
    return with_torch(torch)


def without_torch(cause):
    class BuildPure(build_py):
        def run(self):
            say(f"building pure Python, without the native backends: {cause}")
            super().run()

    return {"cmdclass": {"build_py": BuildPure}}


def with_torch(torch):
    if not (os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")) and (toolkit := toolkit_on_path()):
        os.environ["CUDA_HOME"] = toolkit  # torch reads it as the next line imports it
    from torch.utils import cpp_extension

    if BUILD_CUDA:
        claim_cuda(torch, cpp_extension)
    cuda_home, BuildExtension = cpp_extension.CUDA_HOME, cpp_extension.BuildExtension
    missing = why_no_cuda(torch, cuda_home)
    archs, notes = ("", ()) if missing else cuda_archs(torch, cuda_home)
    if not missing and not archs:
        missing = f"TORCH_CUDA_ARCH_LIST={os.environ.get('TORCH_CUDA_ARCH_LIST', '')}: {'; '.join(notes)}"
        if REQUIRE_NATIVE:
            sys.exit(f"sparse-opt: the CUDA kernels cannot be built: {missing}")

    class BuildPython(build_py):
        """Also copies the source of `sparse_opt._autograd` into the package."""

        def run(self):
            super().run()
            if self.editable_mode:
                return  # `make build` compiles it in the checkout
            generate_rule_sources()
            folder = Path(self.build_lib, "sparse_opt", "_autograd_source")
            shutil.rmtree(folder, ignore_errors=True)  # an older build's
            for name, path in autograd_source().items():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, folder / name)

    class BuildNative(BuildExtension):
        """torch's build, which an absent or failing compiler does not stop unless the extension is required."""

        def finalize_options(self):
            super().finalize_options()
            if self.editable_mode:  # setuptools names a temporary folder here, in which no object exists
                self.build_temp = f"build/temp.{self.plat_name}-{sys.implementation.cache_tag}"

        def build_extensions(self):
            if missing:
                say(f"building the extension with its CPU kernels alone: {missing}")
            else:
                say("; ".join([f"building the CUDA kernels for {archs}", *notes]))
            kernels, *autograd = self.extensions
            rule_sources = generate_rule_sources()
            if not missing:
                kernels.sources += rule_sources
            failure = self.why_failed(kernels)
            if failure and not missing and not REQUIRE_NATIVE:
                say(f"THE CUDA KERNELS WERE NOT BUILT, the extension is built without them: {failure} ({HINT})")
                without_cuda = kernels_extension(torch, f"their build failed: {failure}", archs, notes)
                vars(kernels).update(vars(without_cuda))
                failure = self.why_failed(kernels)
            if failure:
                message = "THE EXTENSION WAS NOT BUILT, the package has no native backends"
                self.leave_out(self.extensions, message, failure)
                return
            for extension in autograd:
                if failure := self.why_failed(extension):
                    message = "_autograd WAS NOT BUILT, gradients are collected in Python"
                    self.leave_out([extension], message, failure)

        def leave_out(self, extensions, message, failure):
            if REQUIRE_NATIVE:
                sys.exit(f"sparse-opt: the extension was not built: {failure} ({HINT})")
            say(f"{message}: {failure} ({HINT})")
            for extension in extensions:
                extension.optional = True  # there is nothing to copy
                Path(self.get_ext_fullpath(extension.name)).unlink(missing_ok=True)  # an older build's

        def why_failed(self, extension):
            """Compile and link; empty on success, else the compilers' first error or the message of the exception."""
            all_of_them, build_temp = self.extensions, self.build_temp
            self.extensions, self.build_temp = [extension], os.path.join(build_temp, extension.name)
            # torch forces the linker to run. It has to where an object is newer, or was linked and has no source now,
            # or where any source is newer, compiled or not: backends.py loads no extension older than a source.
            objects = {Path(self.build_temp, source).with_suffix(".o") for source in extension.sources}
            removed = set(Path(self.build_temp).rglob("*.o")) - objects
            for path in removed:
                path.unlink()
            outdated = newer_group(map(str, SOURCES), self.get_ext_fullpath(extension.name))
            self.compiler.force = bool(removed or outdated)
            with tempfile.NamedTemporaryFile("r", errors="replace") as log:
                try:
                    with copy_output(log.name):
                        super().build_extensions()
                except (RuntimeError, OSError, errors.CCompilerError, errors.BaseError) as error:
                    return next(filter(COMPILER_ERROR.search, log), str(error)).strip()
                finally:
                    self.extensions, self.build_temp = all_of_them, build_temp
            return ""

    extensions = [kernels_extension(torch, missing, archs, notes)]
    if not NO_AUTOGRAD:
        extensions.append(autograd_extension(torch))
    tag = {"bdist_wheel": {"py_limited_api": PYTHON_TAG}} if NO_AUTOGRAD else {}
    commands = {"build_py": BuildPython, "build_ext": BuildNative}
    return {"ext_modules": extensions, "cmdclass": commands, "options": tag}


def generate_rule_sources():
    """Write the list of rules that the sources include, and return the paths of the rules' CUDA sources."""
    generate = runpy.run_path("csrc/step/rules/generate.py")["generate"]
    try:
        return [str(path) for path in generate(Path("csrc/step/rules"), GENERATED)]
    except ValueError as error:
        sys.exit(f"sparse-opt: {error}")


def include_dirs():
    return [os.path.abspath("csrc"), os.path.abspath(GENERATED.parent)]


def is_of_autograd(path):
    return path.parts[1] == "autograd"


def autograd_source():
    """What `sparse_opt._autograd` is compiled from: name below the one folder of includes -> file here."""
    roots = [Path("csrc"), GENERATED.parent]
    files = [Path("csrc/cxx_flags.txt"), *filter(is_of_autograd, SOURCES)]
    for path in files:  # which grows by the headers that each file includes
        for name in INCLUDE.findall(path.read_text(encoding="utf-8")):
            header = next(folder / name for folder in (path.parent, *roots) if (folder / name).exists())
            if header not in files:
                files.append(header)
    return {path.relative_to(next(root for root in roots if root in path.parents)).as_posix(): path for path in files}


def kernels_extension(torch, missing, archs, notes):
    """The library of the ops; with its CPU kernels alone where `missing` is why there are no CUDA kernels."""
    from torch.utils import cpp_extension

    sources = [path for path in SOURCES if path.suffix in (".cpp", ".cu") and not is_of_autograd(path)]
    macros, libraries, library_dirs = [], [], []
    if missing:
        sources = [path for path in sources if path.suffix == ".cpp" and not path.stem.endswith("_cuda")]
    else:
        macros = [("SPARSE_OPT_WITH_CUDA", None)]
        # CUDA's runtime is linked statically, so that the library loads next to a torch of another CUDA, or of none.
        libraries = ["cudart_static", "rt", "dl", "pthread"]
        library_dirs = [os.path.join(cpp_extension.CUDA_HOME, "lib64")]
        os.environ["TORCH_CUDA_ARCH_LIST"] = archs
    build_info = {
        "TORCH_VERSION": torch.__version__,
        "CUDA_MISSING": re.sub(r"[^\w ,;:.+()/=-]", "'", missing),  # a compiler's words, in a shell and in C++
        "CUDA_ARCH_LIST": "" if missing else archs,
        "CUDA_ARCH_NOTES": "; ".join(notes),
    }
    macros += [(f"SPARSE_OPT_{name}", f'"{value}"') for name, value in build_info.items()]
    if BUILD_HASH:
        macros.append(("SPARSE_OPT_NATIVE", f"sparse_opt_native_{'cpu' if missing else 'cuda'}_{BUILD_HASH}"))
    return Extension(
        "sparse_opt._kernels",
        [str(path) for path in sources],
        language="c++",
        include_dirs=[*include_dirs(), *cpp_extension.include_paths("cpu" if missing else "cuda")],
        define_macros=macros,
        library_dirs=[*cpp_extension.library_paths(), *library_dirs],
        libraries=["torch_cpu", *libraries],
        extra_compile_args={"cxx": CXX_FLAGS + STABLE_ABI, "nvcc": NVCC_FLAGS + STABLE_ABI},
        py_limited_api=True,
        # Read only where ninja is missing; then every source is compiled again.
        depends=[str(path) for path in SOURCES if path.suffix in (".h", ".cuh")],
    )


def autograd_extension(torch):
    from torch.utils import cpp_extension

    return cpp_extension.CppExtension(
        "sparse_opt._autograd",
        [str(path) for path in SOURCES if path.suffix == ".cpp" and is_of_autograd(path)],
        include_dirs=include_dirs(),
        define_macros=[("SPARSE_OPT_TORCH_VERSION", f'"{torch.__version__}"')],
        extra_compile_args={"cxx": CXX_FLAGS},
        depends=[str(path) for path in SOURCES if path.suffix == ".h"],
    )


def claim_cuda(torch, cpp_extension):
    """Make a torch without CUDA compile CUDA code, which needs nothing of torch's CUDA: SPARSE_OPT_CUDA=1."""
    toolkit = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if not toolkit:
        sys.exit("sparse-opt: SPARSE_OPT_CUDA=1 needs nvcc, on PATH or in CUDA_HOME")
    cpp_extension.CUDA_HOME = toolkit
    torch.version.cuda = re.search(r"release (\d+\.\d+)", nvcc(toolkit, "--version"))[1]


def toolkit_on_path():
    """The toolkit's folder, as nvcc prints it: the nvcc on PATH may be a wrapper elsewhere. Empty without nvcc."""
    if not shutil.which("nvcc"):
        return ""
    commands = subprocess.run(["nvcc", "--dryrun", "any.cu"], stderr=subprocess.PIPE, text=True).stderr
    top = re.search(r"^#\$ TOP=(.+)$", commands, re.MULTILINE)
    return os.path.realpath(top[1]) if top else ""


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


def nvcc(cuda_home, option):
    return subprocess.check_output([os.path.join(cuda_home, "bin", "nvcc"), option], text=True)


@contextlib.contextmanager
def copy_output(path):
    """Copy what this process and the compilers print to the file `path` as well."""
    streams = [(stream, os.dup(stream)) for stream in (1, 2)]
    sys.stdout.flush()
    sys.stderr.flush()
    with subprocess.Popen(["tee", path], stdin=subprocess.PIPE) as tee:
        for stream, _ in streams:
            os.dup2(tee.stdin.fileno(), stream)
        try:
            yield
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            for stream, original in streams:
                os.dup2(original, stream)
                os.close(original)


def say(message):
    print(f"sparse-opt: {message}", file=sys.stderr, flush=True)
