"""Who may import whom. Data flows one way: kernels <- ops <- optimizer and masks <- trainers <- bench."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOTS = {
    "sparse_opt": "sparse_opt",
    "triton_kernels": "sparse_opt.triton_kernels",
    "trainers": "sparse_opt.trainers",
    "bench": "sparse_opt.bench",
}
MAPPED = {name: folder for folder, name in ROOTS.items() if folder != "sparse_opt"}
# folder -> the folders it may import from
MAY_IMPORT = {
    "triton_kernels": set(),
    "sparse_opt": {"triton_kernels"},
    "trainers": {"sparse_opt"},
    "bench": {"sparse_opt", "triton_kernels", "trainers"},
}


class Import(NamedTuple):
    """One import statement, or one literal argument of importlib.import_module."""

    file: str  # relative to the checkout
    line: int
    module: str  # absolute, as installed
    relative: bool
    by_name: bool = False  # importlib.import_module, which takes absolute names alone

    def __str__(self) -> str:
        return f"{self.file}:{self.line} imports {self.module}"


def folder_of(module: str) -> str | None:
    """The folder on disk that an installed module comes from, None for other packages' modules."""
    for name, folder in MAPPED.items():
        if f"{module}.".startswith(f"{name}."):
            return folder
    return "sparse_opt" if module.split(".")[0] == "sparse_opt" else None


def imports_of(path: Path, checkout: Path) -> Iterator[Import]:
    file = path.relative_to(checkout)
    package = ".".join([ROOTS[file.parts[0]], *file.parts[1:-1]])
    for node in ast.walk(ast.parse(path.read_text(), file.as_posix())):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(file.as_posix(), node.lineno, alias.name, False)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package.split(".")[: len(package.split(".")) - node.level + 1]) if node.level else ""
            module = ".".join(filter(None, [base, node.module]))
            # `from sparse_opt import trainers` names a module by its alias
            names = [f"{module}.{alias.name}" for alias in node.names if f"{module}.{alias.name}" in MAPPED]
            for name in names or [module]:
                yield Import(file.as_posix(), node.lineno, name, bool(node.level))
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            argument = node.args[0]
            if isinstance(argument, ast.Constant) and not argument.value.startswith("."):
                yield Import(file.as_posix(), node.lineno, argument.value, False, by_name=True)


@pytest.fixture(scope="module")
def imports(checkout) -> list[Import]:
    return [
        found
        for root in ROOTS
        for path in sorted((checkout / root).rglob("*.py"))
        for found in imports_of(path, checkout)
    ]


def own_folder(found: Import) -> str:
    return found.file.split("/")[0]


def test_the_walk_sees_the_backends_import_of_the_kernels(imports):
    assert any(i.file == "sparse_opt/backends.py" and i.module == "sparse_opt.triton_kernels" for i in imports)


def test_folders_import_downwards_only(imports):
    # The command line stands above everything: it is how trainers and benches are started.
    upwards = [
        str(i)
        for i in imports
        if (target := folder_of(i.module)) not in (None, own_folder(i))
        and target not in MAY_IMPORT[own_folder(i)]
        and not i.file.startswith("sparse_opt/cli/")
    ]
    assert upwards == []


def test_the_library_does_not_import_its_command_line(imports):
    library = [i for i in imports if own_folder(i) == "sparse_opt" and not i.file.startswith("sparse_opt/cli/")]
    assert [str(i) for i in library if f"{i.module}.".startswith("sparse_opt.cli.")] == []


def test_only_the_backend_layer_imports_the_triton_kernels(imports):
    importers = {
        i.file
        for i in imports
        if own_folder(i) in ("sparse_opt", "trainers") and folder_of(i.module) == "triton_kernels"
    }
    assert importers == {"sparse_opt/backends.py"}


def test_imports_are_relative_inside_a_folder_and_absolute_across(imports):
    statements = [i for i in imports if not i.by_name]
    absolute_inside = [str(i) for i in statements if not i.relative and folder_of(i.module) == own_folder(i)]
    relative_across = [str(i) for i in imports if i.relative and folder_of(i.module) != own_folder(i)]
    assert absolute_inside == []
    assert relative_across == []


def test_triton_kernels_import_torch_and_triton_alone(imports):
    allowed = {"torch", "triton", "sparse_opt", *sys.stdlib_module_names}
    strangers = [str(i) for i in imports if own_folder(i) == "triton_kernels" and i.module.split(".")[0] not in allowed]
    assert strangers == []


def test_native_kernels_include_no_torch_header(checkout):
    torch_header = re.compile(r'^\s*#\s*include\s*[<"](torch|ATen|c10|caffe2|pybind11|Python\.h)', re.MULTILINE)
    kernels = [path for path in (checkout / "csrc" / "kernels").rglob("*") if path.is_file()]
    assert kernels
    assert [str(path) for path in kernels if torch_header.search(path.read_text())] == []


def test_tests_and_folders_are_no_packages_of_their_own(checkout):
    assert list((checkout / "tests").rglob("__init__.py")) == []
