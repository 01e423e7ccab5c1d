"""The library that a wheel has fits every torch from 2.10 and every Python from 3.11, by the symbols that it needs."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys

import pytest

from sparse_opt import backends

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux") or not shutil.which("nm"), reason="needs nm")


@pytest.fixture(scope="module")
def library() -> str:
    module, cause = backends.native_module()
    if module is None:
        pytest.skip("needs the extension: " + cause)
    assert module.__file__ is not None
    return module.__file__


def symbols(library: str, which: str) -> list[str]:
    listed = subprocess.run(["nm", "--dynamic", which, library], capture_output=True, text=True, check=True).stdout
    return [line.split()[-1].split("@")[0] for line in listed.splitlines()]


def test_the_file_name_is_that_of_the_limited_api(library):
    assert library.endswith("/_kernels.abi3.so")


def test_abi_of_torch_is_its_c_interface(library):
    needed = symbols(library, "--undefined-only")
    assert [name for name in needed if re.match(r"_Z\w*(2at|3c10|5torch)", name)] == []
    assert {"torch_library_impl", "aoti_torch_get_numel"} <= set(needed)


def test_abi_of_python_is_the_limited_api(library):
    """Names that Python's documentation lists as part of the stable ABI; any other has to be looked up there."""
    stable = {
        *(
            "PyArg_ParseTuple",
            "PyBool_FromLong",
            "PyCapsule_New",
            "PyDict_New",
            "PyDict_SetItemString",
            "PyErr_SetString",
        ),
        *("PyEval_RestoreThread", "PyEval_SaveThread", "PyExc_RuntimeError", "PyList_Append", "PyList_New"),
        *("PyLong_FromSize_t", "PyModule_Create2", "PyUnicode_FromString", "_Py_Dealloc", "_Py_NoneStruct"),
        *("Py_DecRef", "Py_IncRef"),
    }
    assert {name for name in symbols(library, "--undefined-only") if name.startswith(("Py", "_Py"))} <= stable
