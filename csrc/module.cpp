// The extension module: what was built and with what, and the lists that a step hands over whole. Importing it
// registers torch.ops.sparse_opt_native.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/jit/python/pybind_utils.h>
#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#ifdef SPARSE_OPT_WITH_CUDA
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <cuda_runtime_api.h>
#endif

#include "optim/bound_params.h"
#include "optim/gradient_hook.h"
#include "optim/tile_linear.h"

namespace py = pybind11;
using namespace py::literals;

namespace {

// For what runs a kernel, may wait for a device, or may wait on a mutex.
using Unlocked = py::call_guard<py::gil_scoped_release>;

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
  info["arch_notes"] = SPARSE_OPT_CUDA_ARCH_NOTES;
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

#ifdef SPARSE_OPT_WITH_CUDA
// Bytes; see l2_fetch.py.
int64_t l2_fetch_granularity(c10::DeviceIndex device) {
  const c10::cuda::CUDAGuard guard(device);
  size_t bytes = 0;
  C10_CUDA_CHECK(cudaDeviceGetLimit(&bytes, cudaLimitMaxL2FetchGranularity));
  return static_cast<int64_t>(bytes);
}

void set_l2_fetch_granularity(c10::DeviceIndex device, int64_t bytes) {
  const c10::cuda::CUDAGuard guard(device);
  C10_CUDA_CHECK(cudaDeviceSetLimit(cudaLimitMaxL2FetchGranularity, static_cast<size_t>(bytes)));
}
#endif

// Neither making nor destroying one holds the interpreter's lock: both may wait, for a device or on a mutex.
std::shared_ptr<sparse_opt::BoundParams> bind(std::vector<at::Tensor> params, at::Tensor indices,
                                              std::vector<int64_t> starts, std::vector<int64_t> ends,
                                              int64_t run_length, std::optional<at::Tensor> index_bases) {
  const auto destroy = [](sparse_opt::BoundParams* bound) {
    std::optional<py::gil_scoped_release> no_lock;  // a backward pass may have the last reference, without the lock
    if (PyGILState_Check() == 1) no_lock.emplace();
    delete bound;
  };
  const py::gil_scoped_release no_lock;
  return {new sparse_opt::BoundParams(std::move(params), std::move(indices), std::move(starts), std::move(ends),
                                      run_length, std::move(index_bases)),
          destroy};
}

// A Python function for a thread that may not hold the interpreter's lock; its errors as autograd carries Python's.
sparse_opt::BoundParams::TakeTiles without_lock(py::function function) {
  const auto release = [](py::function* held) {
    const py::gil_scoped_acquire lock;
    delete held;
  };
  const std::shared_ptr<py::function> held(new py::function(std::move(function)), release);
  return [held](size_t i, const at::Tensor& left, const at::Tensor& right) {
    const py::gil_scoped_acquire lock;
    try {
      return (*held)(i, left, right).cast<bool>();
    } catch (py::error_already_set& raised) {
      raised.restore();
      python_error error;
      error.persist();
      throw error;
    }
  };
}

// `arguments` are those of the schema of the native op `name`, except the ones that BoundParams::step sets.
void step(sparse_opt::BoundParams& bound, const std::string& name, const py::kwargs& arguments) {
  const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(("sparse_opt_native::" + name).c_str(), "");
  const c10::FunctionSchema& schema = op.schema();
  torch::jit::Stack stack;
  for (const c10::Argument& argument : schema.arguments()) {
    stack.push_back(argument.default_value().value_or(c10::IValue()));
  }
  for (const auto& [key, value] : arguments) {
    const auto keyword = key.cast<std::string>();
    const std::optional<int> i = schema.argumentIndexWithName(keyword);
    if (!i.has_value()) throw py::type_error(name + " has no argument " + keyword);
    stack[*i] = torch::jit::toIValue(value, schema.arguments()[*i].type());
  }
  const py::gil_scoped_release no_lock;
  bound.step(op, std::move(stack));
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("build_info", &build_info, "How the extension was built: a dict of strings and bools.");
#ifdef SPARSE_OPT_WITH_CUDA
  m.def("l2_fetch_granularity", &l2_fetch_granularity, "device"_a, Unlocked());
  m.def("set_l2_fetch_granularity", &set_l2_fetch_granularity, "device"_a, "bytes"_a, Unlocked());
#endif

  using sparse_opt::BoundParams;
  using sparse_opt::TileRoute;
  py::class_<BoundParams, std::shared_ptr<BoundParams>>(
      m, "BoundParams", "Parameters and their segments, converted once; see backends.bind.")
      .def(py::init(&bind), "params"_a, "indices"_a, "starts"_a, "ends"_a, "run_length"_a = 1,
           "index_bases"_a = std::nullopt)
      .def("has_grads", &BoundParams::has_grads)
      .def("take_grads", &BoundParams::take_grads, Unlocked())
      .def("gather_", &BoundParams::gather_, "i"_a, "grad"_a, "out"_a, "sum_sq"_a, "found_inf"_a, Unlocked())
      .def("set_tiles", &BoundParams::set_tiles, "tiles"_a, "starts"_a, "ends"_a, "tile_size"_a, Unlocked())
      .def("set_waiting", &BoundParams::set_waiting, "tiles"_a, "bytes"_a, Unlocked())
      .def("set_waiting_grads", &BoundParams::set_waiting_grads, "bytes"_a, Unlocked())
      .def("tile_grad_", &BoundParams::tile_grad_, "i"_a, "left"_a, "right"_a, "out"_a, "sum_sq"_a, "found_inf"_a,
           Unlocked())
      .def("add_values_", &BoundParams::add_values_, "i"_a, "values"_a, "out"_a, "sum_sq"_a, "found_inf"_a, Unlocked())
      .def(
          "take_tiles_with",
          [](BoundParams& bound, py::function take) { bound.take_tiles_with(without_lock(std::move(take))); }, "take"_a)
      .def("came_by_tiles", &BoundParams::came_by_tiles, "i"_a, Unlocked())
      .def("flush", &BoundParams::flush, Unlocked())
      .def("drop", &BoundParams::drop, Unlocked())
      .def(
          "route",
          [](const std::shared_ptr<BoundParams>& bound, size_t i, bool transposed) {
            return c10::make_intrusive<TileRoute>(bound, i, transposed);
          },
          "i"_a, "transposed"_a)
      .def("receive_into", &BoundParams::receive_into, "out"_a, "sum_sq"_a, Unlocked())
      .def("set_receiving", &BoundParams::set_receiving, "receiving"_a, Unlocked())
      .def_property("received", py::cpp_function(&BoundParams::received, Unlocked()),
                    py::cpp_function(&BoundParams::set_received, Unlocked()))
      .def(
          "hook",
          [](const std::shared_ptr<BoundParams>& bound, size_t i, const py::dict& functions) {
            sparse_opt::GradientHook::install(bound, i, functions.ptr());
          },
          "i"_a, "functions"_a)
      .def("sum_squares_", &BoundParams::sum_squares_, "sum_sq"_a, Unlocked())
      .def("step", &step, "op"_a);

  py::class_<TileRoute, c10::intrusive_ptr<TileRoute>>(m, "TileRoute", "See tile_linear.h.")
      .def("linear", &sparse_opt::tile_linear, "input"_a, "weight"_a, "bias"_a, Unlocked())
      .def("wanted", &TileRoute::wanted);
}
