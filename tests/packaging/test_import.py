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


def test_optimizers_do_not_need_the_training_libraries(forked_python, tmp_path):
    training = ("transformers", "datasets", "tokenizers")
    look = f"import sys, sparse_opt; sparse_opt.SparseAdamW; print([m for m in {training!r} if m in sys.modules])"
    imported = forked_python("-c", look, cwd=tmp_path)
    assert imported.stdout.strip() == "[]", imported.stderr


def test_the_optimizers_load_few_modules(forked_python, tmp_path):
    look = "import sys, sparse_opt.optim; print(*[m for m in sys.modules if m.split('.')[0] == 'sparse_opt'])"
    imported = forked_python("-c", look, cwd=tmp_path)
    assert 1 < len(imported.stdout.split()) <= 55, imported.stdout + imported.stderr


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
