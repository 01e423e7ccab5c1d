// Views of torch's C++ tensors, which this library, compiled against one version of torch, may use directly.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

#include "tensor_view.h"

namespace sparse_opt {

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

inline Ints view_of(at::IntArrayRef numbers) {
  return {numbers.data(), numbers.size()};
}

}  // namespace sparse_opt
