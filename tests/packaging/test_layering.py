"""Imports between modules go down the list of layers only, without a cycle; and tensors name their device and dtype."""

import ast
import re
import sys
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch.utils._device import _device_constructors

ROOTS = {
    "sparse_opt": "sparse_opt",
    "triton_kernels": "sparse_opt.triton_kernels",
    "trainers": "sparse_opt.trainers",
    "bench": "sparse_opt.bench",
}
MAPPED = {name: folder for folder, name in ROOTS.items() if folder != "sparse_opt"}
# The packages and modules directly under sparse_opt, lowest layer first. A layer may import the layers before it;
# members of one layer may import each other, as long as no cycle arises.
LAYERS = (
    (
        "__init__",
        "errors",
        "quantised_layers",
        "tensors",
        "files",
        "tables",
        "progress",
        "file_lock",
        "tensor_file",
        "pt_file",
        "cuda_archs",
        "options",
        "triton_kernels",
        "_kernels",
        "_autograd",
    ),
    ("ops", "backends"),
    ("masks",),
    ("optim", "delta"),
    ("distributed", "weight_sync"),
    ("mask_finding", "analysis"),
    ("integrations",),
    ("trainers",),
    ("cli", "bench", "__main__"),  # the command line starts benchmarks by name, and benchmarks use its parser
)
LAYER_OF = {member: i for i, layer in enumerate(LAYERS) for member in layer}


class Import(NamedTuple):
    """One import statement, or one literal argument of importlib.import_module."""

    file: str  # relative to the checkout
    line: int
    importer: str  # absolute, as installed
    module: str  # likewise; a module wherever the statement names one, not its package
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


def member_of(module: str) -> str:
    """The package or module directly under sparse_opt that a module of the project belongs to."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def module_name(file: Path) -> str:
    """Absolute name of the module in a file, which is relative to the checkout."""
    parts = [ROOTS[file.parts[0]], *file.with_suffix("").parts[1:]]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(path: Path, checkout: Path, modules: Mapping[str, Path]) -> Iterator[Import]:
    file = path.relative_to(checkout)
    importer = module_name(file)
    package = importer if file.name == "__init__.py" else importer.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text(), file.as_posix())):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(file.as_posix(), node.lineno, importer, alias.name, False)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package.split(".")[: len(package.split(".")) - node.level + 1]) if node.level else ""
            source = ".".join(filter(None, [base, node.module]))
            # `from .masks import files` imports a module, `from .masks import MaskSet` a name of the package
            names = (f"{source}.{alias.name}" for alias in node.names)
            for module in dict.fromkeys(name if name in modules else source for name in names):
                yield Import(file.as_posix(), node.lineno, importer, module, bool(node.level))
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            argument = node.args[0]
            if isinstance(argument, ast.Constant) and not argument.value.startswith("."):
                yield Import(file.as_posix(), node.lineno, importer, argument.value, False, by_name=True)


@pytest.fixture(scope="module")
def modules(checkout) -> dict[str, Path]:
    """Module name -> file, of all Python files that are installed."""
    files = [path for root in ROOTS for path in sorted((checkout / root).rglob("*.py"))]
    return {module_name(path.relative_to(checkout)): path for path in files}


@pytest.fixture(scope="module")
def imports(checkout, modules) -> list[Import]:
    return [found for path in modules.values() for found in imports_of(path, checkout, modules)]


def own_folder(found: Import) -> str:
    return found.file.split("/")[0]


def test_the_walk_sees_the_backends_import_of_the_kernels(imports):
    assert any(i.file == "sparse_opt/backends.py" and i.module == "sparse_opt.triton_kernels" for i in imports)


def test_every_package_has_a_layer(modules):
    assert {member_of(module) for module in modules} | {"_kernels", "_autograd"} == set(LAYER_OF)


def test_imports_go_down(imports):
    upwards = [
        str(i)
        for i in imports
        if folder_of(i.module) is not None
        # The root loads its public names when they are first used.
        and member_of(i.importer) != "__init__"
        and LAYER_OF[member_of(i.module)] > LAYER_OF[member_of(i.importer)]
    ]
    assert upwards == []


def test_no_module_imports_itself_in_a_circle(imports, modules):
    # Imports inside functions and under TYPE_CHECKING count: they, too, tie modules to each other.
    graph = {module: set() for module in modules}
    for found in imports:
        if found.module in modules and found.module != found.importer and member_of(found.importer) != "__init__":
            graph[found.importer].add(found.module)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"import cycle: {' -> '.join(reversed(error.args[1]))}")


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
    folders = ("common", "delta", "gather", "step", "swap", "tiles")
    kernels = [path for folder in folders for path in (checkout / "csrc" / folder).rglob("*") if path.is_file()]
    assert kernels
    assert [str(path) for path in kernels if torch_header.search(path.read_text())] == []


def test_tests_and_folders_are_no_packages_of_their_own(checkout):
    assert list((checkout / "tests").rglob("__init__.py")) == []


ROOT = Path(__file__).parents[2]
FOLDERS = ("sparse_opt", "triton_kernels", "trainers")
# torch's default device does not apply to `Generator`; tensors drawn from it must be on its device.
FACTORIES = {name for name in dir(torch) if any(getattr(torch, name) is f for f in _device_constructors())}
FACTORIES.add("Generator")
# Of integers, or of the dtype of what they are given.
WITHOUT_DTYPE = {"arange", "Generator", "randint", "randperm", "tril_indices", "triu_indices"}


def calls(tree: ast.AST) -> Iterator[tuple[ast.Call, str]]:
    """Calls of `torch.<name>`, and the name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            owner = node.func.value
            if isinstance(owner, ast.Name) and owner.id == "torch":
                yield node, node.func.attr


def unnamed(source: str) -> list[str]:
    """The calls in a module that leave their device or dtype to torch's defaults."""
    found = []
    for call, name in calls(ast.parse(source)):
        if name not in FACTORIES:
            continue
        given = {keyword.arg for keyword in call.keywords}
        lacks = {"device"} if name in WITHOUT_DTYPE else {"device", "dtype"}
        if missing := sorted(lacks - given):
            found.append(f"{call.lineno}: torch.{name} without {' and '.join(missing)}")
    return found


@pytest.mark.parametrize("folder", FOLDERS)
def test_devices_and_dtypes_are_named(folder: str) -> None:
    paths = sorted((ROOT / folder).rglob("*.py"))
    assert paths
    found = [f"{path.relative_to(ROOT)}:{line}" for path in paths for line in unnamed(path.read_text())]
    assert not found, "\n".join(found)
