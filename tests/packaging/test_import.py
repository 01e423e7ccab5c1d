"""`import sparse_opt`: cheap, complete, and independent of the extension."""

from __future__ import annotations

import importlib
import tomllib


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


def test_console_script_names_a_function(checkout):
    project = tomllib.loads((checkout / "pyproject.toml").read_text())["project"]
    module, _, function = project["scripts"]["sparse-opt"].partition(":")
    assert callable(getattr(importlib.import_module(module), function))
