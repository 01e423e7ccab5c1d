"""Make a folder that Hugging Face's package `kernels` loads: the library of the ops and a package around it.

    kernels_hub.py hash               print the hash of what the folder is made from
    kernels_hub.py write LIBRARY OUT  write OUT/build/VARIANT from a library that was built with SPARSE_OPT_BUILD_HASH
    kernels_hub.py label LIBRARY      print what the library was built for: cpu, or cu130 for CUDA 13.0; also for wheels

The package is the folder kernels_hub, and the modules of `sparse_opt` that define the ops. The
hash ends the names of the ops and of the package, so that several builds, and sparse_opt itself, can be loaded in one
process. Package and layout: https://huggingface.co/docs/kernels/kernel-requirements
"""

import argparse
import hashlib
import importlib.util
import json
import platform
import shutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "kernels_hub"
MODULES = (
    "errors.py",
    *(
        f"ops/{name}.py"
        for name in ("__init__", "bound", "checks", "narrow", "registry", "schemas", "step_ops", "tiles")
    ),
)
VERSION = 1  # of the interface: users of `kernels` name it
MINIMUM_KERNELS = "0.17.2"  # the only version that was tested


def build_hash() -> str:
    """Return a hash of the native sources, of how they are built, and of the Python files."""
    native = [
        path for path in (ROOT / "csrc").rglob("*") if path.suffix in (".cpp", ".cu", ".h", ".cuh", ".py", ".txt")
    ]
    files = [*native, *PACKAGE.glob("*.py"), *(ROOT / "sparse_opt" / name for name in MODULES)]
    digest = hashlib.sha256()
    for path in sorted(files):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(ROOT).as_posix()} {len(content)}\n".encode() + content)
    return digest.hexdigest()[:10]


def load(library: Path) -> ModuleType:
    """Import the library, which needs torch."""
    import torch  # noqa: F401  # loads the libraries that the extension is linked with

    spec = importlib.util.spec_from_file_location("_kernels", library)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def backend_of(info: dict[str, Any]) -> str:
    return "cuda" if info["cuda"] else "cpu"


def label_of(info: dict[str, Any]) -> str:
    """`cpu`, or `cu130` for CUDA 13.0: torch's name of a build."""
    return "cu" + info["cuda_version"].replace(".", "") if info["cuda"] else "cpu"


def write(library: Path, info: dict[str, Any], out: Path, *, hash: str, public: str, native: str) -> Path:
    """Write the folder of one variant and return it.

    Args:
        library: `_kernels.abi3.so`, and `info` what its `build_info()` returns.
        hash: ends the name under which `kernels` imports the package.
        public, native: the namespaces of the ops; `native` as the library was built.
    """
    if f"{native}\0".encode() not in library.read_bytes():
        raise ValueError(f"{library} was not built for the namespace {native}")
    backend = backend_of(info)
    folder = out / "build" / f"torch-stable-abi210-{label_of(info)}-{platform.machine()}-{platform.system().lower()}"
    shutil.rmtree(folder, ignore_errors=True)
    for module in MODULES:
        (folder / module).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / "sparse_opt" / module, folder / module)
    for path in PACKAGE.glob("*.py"):
        shutil.copy(path, folder)
    shutil.copy(library, folder)
    namespaces = f'"""The namespaces of the ops in torch."""\n\nPUBLIC = "{public}"\nNATIVE = "{native}"\n'
    (folder / "ops/namespace.py").write_text(namespaces)
    metadata = {
        "id": f"_sparse_opt_{backend}_{hash}",
        "name": "sparse-opt",
        "version": VERSION,
        "kernels-minver": MINIMUM_KERNELS,
        "license": "Apache-2.0",
        "python-depends": [],
        "backend": {"type": backend, **({"archs": info["arch_list"].split(";")} if info["cuda"] else {})},
    }
    (folder / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n")
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("hash")
    writing = commands.add_parser("write")
    writing.add_argument("library", type=Path)
    writing.add_argument("out", type=Path)
    commands.add_parser("label").add_argument("library", type=Path)
    arguments = parser.parse_args()
    hash = build_hash()
    if arguments.command == "hash":
        print(hash)
        return
    info = load(arguments.library).build_info()
    if arguments.command == "label":
        print(label_of(info))
        return
    names = {
        name: f"{prefix}_{backend_of(info)}_{hash}"
        for name, prefix in (("public", "sparse_opt"), ("native", "sparse_opt_native"))
    }
    try:
        print(write(arguments.library, info, arguments.out, hash=hash, **names))
    except ValueError as error:
        sys.exit(f"sparse-opt: {error}")


if __name__ == "__main__":
    main()
