"""`import sparse_opt`: cheap, complete, and independent of the extension; one older than its sources is not loaded."""

import os
import shutil
from pathlib import Path

import pytest


def test_import_loads_neither_torch_nor_transformers(python, tmp_path):
    look = (
        "import sys, sparse_opt; print([m for m in ('torch', 'numpy', 'transformers', 'triton') if m in sys.modules])"
    )
    imported = python("-c", look, cwd=tmp_path)
    assert imported.stdout.strip() == "[]", imported.stderr


def test_the_optimizers_load_few_modules_and_no_training_libraries(forked_python, tmp_path):
    imported = forked_python("-c", "import sys, sparse_opt; sparse_opt.SparseAdamW; print(*sys.modules)", cwd=tmp_path)
    names = [name.split(".")[0] for name in imported.stdout.split()]
    assert 1 < names.count("sparse_opt") <= 55, imported.stdout + imported.stderr
    assert not {"transformers", "datasets", "tokenizers"} & set(names)


def test_names_resolve_without_the_extension(forked_python, tmp_path):
    look = (
        "import sys; sys.modules['sparse_opt._kernels'] = None\n"
        "import sparse_opt\n"
        "for name in sparse_opt.__all__: getattr(sparse_opt, name)\n"
    )
    imported = forked_python("-c", look, cwd=tmp_path)
    assert imported.returncode == 0, imported.stderr


REPORT = "from sparse_opt import backends, ops; print(backends.native_module()[1], backends.available('cpu'))"


@pytest.fixture
def checkout_copy(clean_copy, tmp_path) -> Path:
    """A copy whose extension, a Python module here, ends the process as one that reads other arguments may."""
    for folder in ("sparse_opt", "csrc"):
        shutil.copytree(clean_copy / folder, tmp_path / folder)
    (tmp_path / "sparse_opt/_kernels.py").write_text("import os\nos._exit(134)\n")
    for path in tmp_path.rglob("*"):
        os.utime(path, (1000, 1000))
    return tmp_path


def test_an_extension_older_than_a_source_is_not_loaded(checkout_copy, forked_python):
    source = checkout_copy / "csrc/common/arguments.h"
    os.utime(source, (1001, 1001))
    run = forked_python("-c", REPORT, cwd=checkout_copy)
    outdated = f"the extension was built before the last change of {source}: run `make build`"
    assert (run.returncode, run.stdout) == (0, f"{outdated} ('reference',)\n"), run.stderr


def test_other_extensions_are_loaded(checkout_copy, forked_python):
    """Up to date in a checkout; and in an installed wheel, where a folder csrc belongs to another package."""
    assert forked_python("-c", REPORT, cwd=checkout_copy).returncode == 134
    os.utime(checkout_copy / "csrc/module.cpp", (1001, 1001))
    (checkout_copy / "csrc/build_native.py").unlink()
    assert forked_python("-c", REPORT, cwd=checkout_copy).returncode == 134
