// Calls of the functions of _kernels without torch's boxing: this library is compiled against one version of torch, and
// reads its C++ tensors directly.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <ATen/record_function.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>

#include <optional>
#include <vector>

#include "kernel_table.h"
#include "tensor_view.h"

namespace sparse_opt {

// The functions of the loaded _kernels; set when the module is imported.
inline const KernelTable* kernels = nullptr;

inline const KernelTable::OfDevice& kernels_for(Device device) {
  return device.type == DeviceType::CUDA ? kernels->cuda : kernels->cpu;
}

inline TensorView view_of(const at::Tensor& tensor) {
  TensorView view;
  if (!tensor.defined()) return view;
  view.size_list = tensor.sizes().data();
  view.stride_list = tensor.layout() == at::kStrided ? tensor.strides().data() : nullptr;
  view.dim = tensor.dim();
  view.numel = tensor.numel();
  view.element_size = static_cast<int64_t>(tensor.element_size());
  view.device = {tensor.device().type(), tensor.device().index()};
  view.dtype = tensor.scalar_type();
  view.contiguous = tensor.layout() == at::kStrided && tensor.is_contiguous();
  view.readable = tensor.layout() == at::kStrided && tensor.has_storage();
  if (view.readable) view.data = tensor.data_ptr();
  return view;
}

inline OptionalTensor view_of(const std::optional<at::Tensor>& tensor) {
  return tensor.has_value() && tensor->defined() ? OptionalTensor(view_of(*tensor)) : std::nullopt;
}

inline std::vector<TensorView> views_of(at::TensorList tensors) {
  std::vector<TensorView> views;
  views.reserve(tensors.size());
  for (const at::Tensor& tensor : tensors) views.push_back(view_of(tensor));
  return views;
}

// Run `direct()`, which does what the op `name` does with `arguments`. If a dispatch mode is active on this thread,
// call the op instead, so that the mode sees it. Profilers see both.
template <typename Direct, typename... Arguments>
void call_native(const char* name, const Direct& direct, const Arguments&... arguments) {
  if (c10::impl::dispatch_mode_enabled()) {
    torch::jit::Stack stack;
    torch::jit::push(stack, arguments...);
    c10::Dispatcher::singleton().findSchemaOrThrow(name, "").callBoxed(stack);
    return;
  }
  RECORD_FUNCTION(name, c10::ArrayRef<const c10::IValue>());
  direct();
}

}  // namespace sparse_opt
