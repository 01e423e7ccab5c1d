// The extension module: what was built, and with what. Importing it registers torch.ops.sparse_opt_native.
#include <pybind11/pybind11.h>

#include <string>

#ifdef SPARSE_OPT_WITH_CUDA
#include <cuda_runtime_api.h>
#endif

namespace py = pybind11;

namespace {

py::dict build_info() {
  py::dict info;
#ifdef SPARSE_OPT_WITH_CUDA
  info["cuda"] = true;
  info["cuda_version"] = std::to_string(CUDART_VERSION / 1000) + "." + std::to_string(CUDART_VERSION % 1000 / 10);
#else
  info["cuda"] = false;
  info["cuda_version"] = "";
#endif
  info["cuda_missing"] = SPARSE_OPT_CUDA_MISSING;
  info["arch_list"] = SPARSE_OPT_CUDA_ARCH_LIST;
  info["torch"] = SPARSE_OPT_TORCH_VERSION;
#if defined(__clang__)
  info["compiler"] = "clang " __clang_version__;
#elif defined(__GNUC__)
  info["compiler"] = "gcc " __VERSION__;
#else
  info["compiler"] = "unknown";
#endif
#ifdef _OPENMP
  info["openmp"] = true;
#else
  info["openmp"] = false;
#endif
  return info;
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("build_info", &build_info, "How the extension was built: a dict of strings and bools.");
}
