"""An extension that is older than its sources is not loaded: it might read other arguments than its schemas have."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

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
