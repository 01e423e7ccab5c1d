// The extension module _kernels, in Python's limited API: how it was built, and the table for _autograd. Importing it
// registers torch.ops.sparse_opt_native.
#include <Python.h>

#include <string>

#include "kernel_table.h"
#include "ops.h"

#ifdef SPARSE_OPT_WITH_CUDA
#include <cuda_runtime_api.h>
#endif

// The name of the module is the last part of its import path, as torch.utils.cpp_extension defines it.
#define SPARSE_OPT_CONCATENATE(a, b) a##b
#define SPARSE_OPT_INIT(name) SPARSE_OPT_CONCATENATE(PyInit_, name)
#define SPARSE_OPT_TEXT_OF(name) #name
#define SPARSE_OPT_TEXT(name) SPARSE_OPT_TEXT_OF(name)

namespace {

using namespace sparse_opt;

KernelTable make_table() {
  KernelTable table;
  table.cpu = cpu_table();
#ifdef SPARSE_OPT_WITH_CUDA
  add_cuda(table);
#endif
  return table;
}

KernelTable table = make_table();

bool set_item(PyObject* dict, const char* key, PyObject* value) {
  const bool set = value != nullptr && PyDict_SetItemString(dict, key, value) == 0;
  Py_XDECREF(value);
  return set;
}

PyObject* build_info(PyObject*, PyObject*) {
#ifdef SPARSE_OPT_WITH_CUDA
  const bool cuda = true;
  const std::string cuda_version =
      std::to_string(CUDART_VERSION / 1000) + "." + std::to_string(CUDART_VERSION % 1000 / 10);
#else
  const bool cuda = false;
  const std::string cuda_version;
#endif
#if defined(__clang__)
  const char* compiler = "clang " __clang_version__;
#elif defined(__GNUC__)
  const char* compiler = "gcc " __VERSION__;
#else
  const char* compiler = "unknown";
#endif
  PyObject* info = PyDict_New();
  if (info == nullptr) return nullptr;
  const bool complete = set_item(info, "cuda", PyBool_FromLong(cuda)) &&
                        set_item(info, "cuda_version", PyUnicode_FromString(cuda_version.c_str())) &&
                        set_item(info, "cuda_missing", PyUnicode_FromString(SPARSE_OPT_CUDA_MISSING)) &&
                        set_item(info, "arch_list", PyUnicode_FromString(SPARSE_OPT_CUDA_ARCH_LIST)) &&
                        set_item(info, "arch_notes", PyUnicode_FromString(SPARSE_OPT_CUDA_ARCH_NOTES)) &&
                        set_item(info, "torch", PyUnicode_FromString(SPARSE_OPT_TORCH_VERSION)) &&
                        set_item(info, "compiler", PyUnicode_FromString(compiler));
  if (complete) return info;
  Py_DECREF(info);
  return nullptr;
}

template <typename Rule>
bool add_arguments(PyObject* ops) {
  PyObject* names = PyList_New(0);
  StepInputs<Rule> inputs;
  inputs.for_each([&](const char* name, auto&) {
    PyObject* text = names == nullptr ? nullptr : PyUnicode_FromString(name);
    if (text == nullptr || PyList_Append(names, text) != 0) Py_CLEAR(names);
    Py_XDECREF(text);
  });
  return set_item(ops, Rule::kOp, names);
}

// The names of the arguments of each step op in the order in which the kernels read them.
PyObject* step_arguments(PyObject*, PyObject*) {
  PyObject* ops = PyDict_New();
  if (ops == nullptr) return nullptr;
  bool complete = true;
#define SPARSE_OPT_ADD(Rule) complete = complete && add_arguments<Rule>(ops);
  SPARSE_OPT_FOR_EACH_RULE(SPARSE_OPT_ADD)
#undef SPARSE_OPT_ADD
  if (complete) return ops;
  Py_DECREF(ops);
  return nullptr;
}

PyObject* kernel_table(PyObject*, PyObject*) {
  return PyCapsule_New(&table, kKernelTableCapsule, nullptr);
}

PyMethodDef methods[] = {
    {"build_info", build_info, METH_NOARGS, "How the library was built: a dict of strings and bools."},
    {"step_arguments", step_arguments, METH_NOARGS, "The names of each step op's arguments, in the kernels' order."},
    {"kernel_table", kernel_table, METH_NOARGS, "A capsule for _autograd; see csrc/kernel_table.h."},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef module = {
    PyModuleDef_HEAD_INIT,
    SPARSE_OPT_TEXT(TORCH_EXTENSION_NAME),
    nullptr,
    -1,
    methods,
    nullptr,
    nullptr,
    nullptr,
    nullptr,
};

}  // namespace

PyMODINIT_FUNC SPARSE_OPT_INIT(TORCH_EXTENSION_NAME)() {
  return PyModule_Create(&module);
}
