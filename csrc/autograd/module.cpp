// The extension module _autograd: parameters converted to C++ objects once, native gradient collection and tile layers.
// It is compiled against one version of torch, and is optional: sparse_opt has Python code for the same.
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

#include "backward_notifier.h"
#include "bound_params.h"
#include "gradient_buffer.h"
#include "gradient_hook.h"
#include "native_calls.h"
#include "tile_linear.h"

namespace py = pybind11;
using namespace py::literals;

namespace {

// Releases the interpreter's lock around functions that run a kernel, or that may wait for a device or a mutex.
using Unlocked = py::call_guard<py::gil_scoped_release>;

using sparse_opt::BackwardNotifier;
using sparse_opt::BoundParams;
using sparse_opt::GradientBuffer;
using sparse_opt::TileRoute;

std::shared_ptr<GradientBuffer> gradient_buffer(const std::shared_ptr<BoundParams>& bound, at::Tensor values,
                                                at::Tensor sum_sq, std::optional<at::Tensor> tiles,
                                                std::vector<int64_t> tile_starts, std::vector<int64_t> tile_ends,
                                                int64_t tile_size) {
  std::optional<sparse_opt::Tiles> active;
  if (tiles.has_value()) active = {std::move(*tiles), std::move(tile_starts), std::move(tile_ends), tile_size};
  return std::make_shared<GradientBuffer>(bound, std::move(values), std::move(sum_sq), std::move(active));
}

// A Python function for threads that may not hold the interpreter's lock. Its exceptions keep their Python type.
template <typename Result, typename... Arguments>
std::function<Result(Arguments...)> without_lock(py::function function) {
  const auto release = [](py::function* held) {
    const py::gil_scoped_acquire lock;
    delete held;
  };
  const std::shared_ptr<py::function> held(new py::function(std::move(function)), release);
  return [held](Arguments... arguments) {
    const py::gil_scoped_acquire lock;
    try {
      return (*held)(arguments...).template cast<Result>();
    } catch (py::error_already_set& raised) {
      raised.restore();
      python_error error;
      error.persist();
      throw error;
    }
  };
}

std::shared_ptr<BackwardNotifier> backward_notifier(const std::vector<at::Tensor>& params,
                                                    std::vector<int64_t> group_of, py::function ready,
                                                    py::function ended) {
  auto notifier = std::make_shared<BackwardNotifier>(std::move(group_of), without_lock<void, int64_t>(std::move(ready)),
                                                     without_lock<void>(std::move(ended)));
  notifier->attach(params);
  return notifier;
}

// `arguments` are those of the schema of the native op `name`, except the ones that BoundParams::step sets.
void step(BoundParams& bound, const std::string& name, const py::kwargs& arguments) {
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

// It reads the objects of torch's C++ classes, whose layout differs between versions.
void check_torch() {
  const auto installed = py::str(py::module_::import("torch").attr("__version__")).cast<std::string>();
  if (installed != SPARSE_OPT_TORCH_VERSION) {
    throw py::import_error("sparse_opt._autograd was compiled against torch " SPARSE_OPT_TORCH_VERSION
                           ", and the installed torch is " +
                           installed);
  }
}

// The table of _kernels, which is imported first.
void load_kernels() {
  const py::object capsule = py::module_::import("sparse_opt._kernels").attr("kernel_table")();
  const auto* table =
      static_cast<const sparse_opt::KernelTable*>(PyCapsule_GetPointer(capsule.ptr(), sparse_opt::kKernelTableCapsule));
  if (table == nullptr) throw py::error_already_set();
  if (table->version != sparse_opt::KernelTable::kVersion ||
      table->sizes != sparse_opt::KernelTable::argument_sizes()) {
    throw py::import_error("sparse_opt._autograd was built from other sources than sparse_opt._kernels");
  }
  sparse_opt::kernels = table;
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  check_torch();
  load_kernels();

  py::class_<BoundParams, std::shared_ptr<BoundParams>>(
      m, "BoundParams", "Parameters and their segments, converted once; see backends.bind.")
      .def(py::init<std::vector<at::Tensor>, at::Tensor, std::vector<int64_t>, std::vector<int64_t>, int64_t,
                    std::optional<at::Tensor>>(),
           "params"_a, "indices"_a, "starts"_a, "ends"_a, "run_length"_a = 1, "index_bases"_a = std::nullopt)
      .def("gradient_buffer", &gradient_buffer, "values"_a, "sum_sq"_a, "tiles"_a = std::nullopt,
           "tile_starts"_a = std::vector<int64_t>{}, "tile_ends"_a = std::vector<int64_t>{}, "tile_size"_a = 0,
           Unlocked())
      .def("has_grads", &BoundParams::has_grads)
      .def("take_grads", &BoundParams::take_grads, Unlocked())
      .def("release_grads", &BoundParams::release_grads, Unlocked())
      .def("swap", &BoundParams::swap, "compact"_a, Unlocked())
      .def("replace", &BoundParams::replace, "before"_a, "after"_a, Unlocked())
      .def("gather", &BoundParams::gather, "out"_a, "dense"_a, "scale"_a, "accumulate"_a, "sum_sq"_a, "found_inf"_a,
           "only"_a = std::nullopt, Unlocked())
      .def("step", &step, "op"_a);

  py::class_<GradientBuffer, std::shared_ptr<GradientBuffer>>(m, "GradientBuffer", "See gradient_buffer.h.")
      .def("add_dense_", &GradientBuffer::add_dense_, "i"_a, "grad"_a, Unlocked())
      .def("add_tiles_", &GradientBuffer::add_tiles_, "which"_a, "lefts"_a, "rights"_a, "token_offsets"_a, Unlocked())
      .def("add_values_", &GradientBuffer::add_values_, "i"_a, "values"_a, Unlocked())
      .def("set_found_inf", &GradientBuffer::set_found_inf, "found_inf"_a, Unlocked())
      .def("set_direct", &GradientBuffer::set_direct, "direct"_a, Unlocked())
      .def(
          "register_hook",
          [](const std::shared_ptr<GradientBuffer>& buffer, size_t i, const py::dict& functions) {
            sparse_opt::GradientHook::install(buffer, i, functions.ptr());
          },
          "i"_a, "functions"_a)
      .def(
          "route",
          [](const std::shared_ptr<GradientBuffer>& buffer, size_t i, bool transposed, py::function fallback,
             py::function is_hooked) {
            return c10::make_intrusive<TileRoute>(
                buffer, i, transposed, without_lock<bool, const at::Tensor&, const at::Tensor&>(std::move(fallback)),
                without_lock<bool>(std::move(is_hooked)));
          },
          "i"_a, "transposed"_a, "fallback"_a, "is_hooked"_a)
      .def("finish", &GradientBuffer::finish, Unlocked())
      .def("sum_squares_", &GradientBuffer::sum_squares_, Unlocked())
      .def("clip", &GradientBuffer::clip, "max_norm"_a, Unlocked())
      .def("drop", &GradientBuffer::drop, Unlocked())
      .def("received", &GradientBuffer::received, Unlocked())
      .def("received_tiles", &GradientBuffer::received_tiles, "i"_a, Unlocked())
      .def("set_queue_limits", &GradientBuffer::set_queue_limits, "tiles"_a = std::nullopt,
           "tile_bytes"_a = std::nullopt, "gradient_bytes"_a = std::nullopt, Unlocked());

  py::class_<BackwardNotifier, std::shared_ptr<BackwardNotifier>>(m, "BackwardNotifier", "See backward_notifier.h.")
      .def(py::init(&backward_notifier), "params"_a, "group_of"_a, "ready"_a, "ended"_a)
      .def("remove", &BackwardNotifier::remove, Unlocked());

  py::class_<TileRoute, c10::intrusive_ptr<TileRoute>>(m, "TileRoute", "See tile_linear.h.")
      .def("linear", &sparse_opt::tile_linear, "input"_a, "weight"_a, "bias"_a, Unlocked())
      .def("gradient_use", &TileRoute::gradient_use);
}
