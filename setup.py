"""Build the package: the import map here, the native extension in csrc/build_native.py.

Metadata and tool settings are in pyproject.toml. The environment decides the rest:

SPARSE_OPT_NO_NATIVE=1        leave the extension out
SPARSE_OPT_NO_AUTOGRAD=1      leave out sparse_opt._autograd: a wheel without it fits every supported torch and Python
SPARSE_OPT_BUILD_HASH=...     end the namespace of the native ops with it, as a build for `kernels` needs
SPARSE_OPT_CUDA=1             build the CUDA kernels although the installed torch has no CUDA, or another one
SPARSE_OPT_REQUIRE_NATIVE=1   fail where a compiler fails or TORCH_CUDA_ARCH_LIST names no GPU of the CUDA kernels; else
                              the package is built without them, or without the extension, and says so
TORCH_CUDA_ARCH_LIST, CUDA_HOME, MAX_JOBS, CXX   as everywhere in torch's builds (see sparse_opt/cuda_archs.py)
"""

import sys
from pathlib import Path

import setuptools
from setuptools import find_packages, setup

# --no-build-isolation uses the installed setuptools, and an old one fails on pyproject.toml with an obscure error.
if int(setuptools.__version__.split(".")[0]) < 77:
    sys.exit(
        f"sparse-opt: the build needs setuptools 77 or newer, found {setuptools.__version__}: pip install -U setuptools"
    )

sys.path.insert(0, str(Path(__file__).parent / "csrc"))
from build_native import native_extension

# The folders are next to each other on disk and are imported under one root. `sparse_opt` is named although it maps to
# itself: without it an editable install loses the other three.
PACKAGE_DIR = {
    "sparse_opt": "sparse_opt",
    "sparse_opt.triton_kernels": "triton_kernels",
    "sparse_opt.trainers": "trainers",
    "sparse_opt.bench": "bench",
}

setup(
    package_dir=PACKAGE_DIR,
    packages=[
        name
        for root, folder in PACKAGE_DIR.items()
        for name in (root, *(f"{root}.{package}" for package in find_packages(folder)))
    ],
    **native_extension(),
)
