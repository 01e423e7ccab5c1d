"""`sparse-opt build`: compile `sparse_opt._autograd`, whose source a wheel has, for the installed torch and Python."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from pathlib import Path

from ..errors import BuildError
from ..options import CommandParser

# Of gcc, clang and ld.
_COMPILER_ERROR = re.compile(r"\b(error|fatal)\s*:|cannot find -l|undefined reference")
_EPILOG = """The library collects gradients natively. It belongs to one version of torch and Python, so a wheel has only
its source. It is kept in $XDG_CACHE_HOME/sparse-opt/autograd (default: ~/.cache), under the versions of sparse-opt,
torch and Python: run this again after an update. A C++20 compiler (CXX) and ninja are needed.

examples:
  sparse-opt build
"""


def run(argv: Sequence[str]) -> int:
    """Compile the library into the cache, unless it can be loaded already.

    Raises:
        BuildError: something that the compilation needs is missing, or it failed.
    """
    args = _parser().parse_words(argv)

    import torch

    from .. import backends

    if backends.is_checkout():
        raise BuildError(
            f"sparse_opt is imported from the checkout {Path(__file__).parents[2]}: {backends.BUILD_CHECKOUT}"
        )
    kernels, cause = backends.native_module()
    if kernels is None:
        raise BuildError(f"sparse_opt._autograd needs the library of the ops, which is absent: {cause}")
    if not args.force and (module := backends.autograd_module()[0]) is not None:
        print(f"sparse_opt._autograd is already built: {module.__file__}")
        return 0
    if missing := _missing():
        raise BuildError(f"sparse-opt build needs {' and '.join(missing)}")
    path = backends.compiled_autograd()
    print(f"compiling sparse_opt._autograd for torch {torch.__version__}, about a minute", flush=True)
    _compile(backends.AUTOGRAD_SOURCE, path)
    print(f"built {path}")
    return 0


def _parser() -> CommandParser:
    parser = CommandParser(
        prog="sparse-opt build",
        description="Compile sparse_opt._autograd, the native collection of gradients, for the installed torch.",
        epilog=_EPILOG,
    )
    parser.add_argument("--force", action="store_true", help="compile it again, although it is already built")
    return parser


def _missing() -> list[str]:
    """What the compilation needs and does not find, each with how to get it."""
    # pip installs ninja next to the environment's Python, which is on PATH only in an activated environment.
    os.environ["PATH"] = os.pathsep.join([os.environ.get("PATH", os.defpath), str(Path(sys.executable).parent)])
    missing = []
    compiler = os.environ.get("CXX", "c++")  # as torch
    if shutil.which(shlex.split(compiler)[0]) is None:
        missing.append(f"a C++20 compiler, found no {compiler!r} (apt install g++, or name one in CXX)")
    if shutil.which("ninja") is None:
        missing.append("ninja (pip install ninja)")
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        missing.append(f"Python's headers, found no {sysconfig.get_path('include')}/Python.h (apt install python3-dev)")
    return missing


def _compile(source: Path, path: Path) -> None:
    """Compile and import the library, then move it to `path`."""
    import torch
    from torch.utils import cpp_extension

    version = shlex.quote(f'-DSPARSE_OPT_TORCH_VERSION="{torch.__version__}"')
    path.parent.mkdir(parents=True, exist_ok=True)
    # In a folder of its own: processes that build at the same time do not disturb each other.
    with tempfile.TemporaryDirectory(prefix=".building-", dir=path.parent) as folder:
        try:
            cpp_extension.load(
                "_autograd",
                [str(file) for file in sorted(source.rglob("*.cpp"))],
                extra_cflags=[*(source / "cxx_flags.txt").read_text().split(), version],
                extra_include_paths=[str(source)],
                build_directory=folder,
                with_cuda=False,
            )
        except (RuntimeError, ImportError, subprocess.CalledProcessError) as error:
            log = path.with_name("build.log")
            log.write_text(str(error), encoding="utf-8")
            lines = str(error).splitlines()
            cause = next(filter(_COMPILER_ERROR.search, lines), lines[-1]).strip()
            raise BuildError(f"sparse_opt._autograd was not built: {cause} (all output: {log})") from error
        os.replace(Path(folder, "_autograd.so"), path)
