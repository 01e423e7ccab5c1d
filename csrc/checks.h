// Checks that keep kernels within their memory. sparse_opt/ops/checks.py checks more, with longer messages; these also
// run when torch.ops.sparse_opt_native is called directly. Each takes nanoseconds.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

#include "error_text.h"
#include "kernels/arguments.h"

namespace sparse_opt {

using OptionalTensor = std::optional<at::Tensor>;

inline DType dtype_of(const char* name, const at::Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case at::kFloat:
      return DType::kFloat32;
    case at::kBFloat16:
      return DType::kBFloat16;
    case at::kHalf:
      return DType::kFloat16;
    default:
      SPARSE_OPT_CHECK(false, name, " is ", tensor.scalar_type(), ", expected bfloat16, float16 or float32");
  }
}

// [length], contiguous, on `device`.
inline void check_flat(const char* name, const at::Tensor& tensor, int64_t length, at::Device device) {
  SPARSE_OPT_CHECK(tensor.device() == device, name, " is on ", tensor.device(), ", expected ", device);
  SPARSE_OPT_CHECK(tensor.numel() == length, name, " has ", tensor.numel(), " elements, expected ", length);
  SPARSE_OPT_CHECK(tensor.is_contiguous(), name, " has strides ", tensor.strides(), ", expected contiguous");
}

inline void check_dtype(const char* name, const at::Tensor& tensor, at::ScalarType dtype) {
  SPARSE_OPT_CHECK(tensor.scalar_type() == dtype, name, " is ", tensor.scalar_type(), ", expected ", dtype);
}

inline float* float_data(const char* name, const at::Tensor& tensor, int64_t length, at::Device device) {
  check_flat(name, tensor, length, device);
  check_dtype(name, tensor, at::kFloat);
  return static_cast<float*>(tensor.data_ptr());
}

inline float* optional_float_data(const char* name, const OptionalTensor& tensor, int64_t length, at::Device device) {
  return tensor.has_value() ? float_data(name, *tensor, length, device) : nullptr;
}

// Lists of tensors are at::TensorList, or lists in a boxed call's arguments, which are used without copying them.
using BoxedList = at::ArrayRef<c10::IValue>;

inline const at::Tensor& tensor_of(const at::Tensor& tensor) {
  return tensor;
}
inline const at::Tensor& tensor_of(const c10::IValue& value) {
  return value.toTensor();
}

// The data pointers of a list whose tensors share `device` and a dtype.
template <typename List>
std::vector<void*> list_data(const char* name, const List& tensors, at::Device device) {
  std::vector<void*> pointers;
  pointers.reserve(tensors.size());
  for (size_t i = 0; i < tensors.size(); ++i) {
    const at::Tensor& t = tensor_of(tensors[i]);
    SPARSE_OPT_CHECK(t.device() == device, name, "[", i, "] is on ", t.device(), ", expected ", device);
    const at::ScalarType dtype = tensor_of(tensors[0]).scalar_type();
    SPARSE_OPT_CHECK(t.scalar_type() == dtype, name, "[", i, "] is ", t.scalar_type(), ", but ", name, "[0] is ",
                     dtype);
    SPARSE_OPT_CHECK(t.is_contiguous(), name, "[", i, "] has strides ", t.strides(), ", expected contiguous");
    pointers.push_back(t.data_ptr());
  }
  return pointers;
}

template <typename List>
void check_same_sizes(const char* name, const List& tensors, const char* like_name, const List& like) {
  SPARSE_OPT_CHECK(tensors.size() == like.size(), name, " holds ", tensors.size(), " tensors, ", like_name, " holds ",
                   like.size());
  for (size_t i = 0; i < tensors.size(); ++i) {
    const int64_t numel = tensor_of(tensors[i]).numel(), expected = tensor_of(like[i]).numel();
    SPARSE_OPT_CHECK(numel == expected, name, "[", i, "] has ", numel, " elements, ", like_name, "[", i, "] has ",
                     expected);
  }
}

inline int movable_size(const char* name, const at::Tensor& tensor) {
  const auto size = static_cast<int>(tensor.element_size());
  SPARSE_OPT_CHECK(size == 1 || size == 2 || size == 4 || size == 8, name, " is ", tensor.scalar_type(), " of ", size,
                   " bytes, expected elements of 1, 2, 4 or 8 bytes");
  return size;
}

constexpr int64_t kLongestRun = int64_t{1} << 30;

// The number of slots that indices cover, run_length for each index.
inline int64_t checked_slots(const at::Tensor& indices, int64_t run_length) {
  SPARSE_OPT_CHECK(run_length >= 1 && run_length <= kLongestRun && (run_length & (run_length - 1)) == 0,
                   "run_length is ", run_length, ", expected a power of two from 1 to ", kLongestRun);
  return indices.numel() * run_length;
}

inline IndexType checked_index_type(const at::Tensor& indices, const OptionalTensor& index_bases, int64_t run_length) {
  if (index_bases.has_value()) {
    check_dtype("indices", indices, at::kUInt16);
    SPARSE_OPT_CHECK(run_length == 1, "run_length is ", run_length, ", expected 1 with index_bases");
    return IndexType::kOffset16;
  }
  SPARSE_OPT_CHECK(indices.scalar_type() == at::kInt || indices.scalar_type() == at::kLong, "indices is ",
                   indices.scalar_type(), ", expected int32 or int64");
  return indices.scalar_type() == at::kLong ? IndexType::kInt64 : IndexType::kInt32;
}

// `pointers` are those of the dense tensors, and must outlive the result. index_bases cover `of` segments; if it is not
// given, one for each dense tensor.
template <typename List>
Segments checked_segments(const char* name, const List& dense, const std::vector<void*>& pointers,
                          const at::Tensor& indices, at::IntArrayRef starts, at::IntArrayRef ends,
                          int64_t run_length = 1, const OptionalTensor& index_bases = std::nullopt,
                          std::optional<int64_t> of = std::nullopt) {
  const int64_t nnz = checked_slots(indices, run_length);
  const auto count = static_cast<int64_t>(dense.size());
  Segments segments;
  segments.index_type = checked_index_type(indices, index_bases, run_length);
  if (index_bases.has_value()) {
    check_flat("index_bases", *index_bases, nnz / kIndexFrame + of.value_or(count), indices.device());
    check_dtype("index_bases", *index_bases, at::kInt);
    segments.index_bases = static_cast<const int32_t*>(index_bases->data_ptr());
  }
  check_flat("indices", indices, indices.numel(), indices.device());
  SPARSE_OPT_CHECK(starts.size() == dense.size() && ends.size() == dense.size(), "starts holds ", starts.size(),
                   " and ends ", ends.size(), " numbers, ", name, " holds ", dense.size(), " tensors");
  for (size_t i = 0; i < dense.size(); ++i) {
    SPARSE_OPT_CHECK(0 <= starts[i] && starts[i] <= ends[i] && ends[i] <= nnz, "segment ", i, " is [", starts[i], ", ",
                     ends[i], "), expected within [0, ", nnz, ")");
    SPARSE_OPT_CHECK((starts[i] | ends[i]) % run_length == 0, "segment ", i, " is [", starts[i], ", ", ends[i],
                     "), expected multiples of run_length ", run_length);
    const int64_t numel = tensor_of(dense[i]).numel();
    SPARSE_OPT_CHECK(ends[i] - starts[i] <= numel, "segment ", i, " has ", ends[i] - starts[i], " slots, but ", name,
                     "[", i, "] has ", numel, " elements");
    segments.numel += numel;
  }
  segments.count = count;
  segments.dense = pointers.data();
  segments.starts = starts.data();
  segments.ends = ends.data();
  segments.indices = indices.data_ptr();
  segments.run_length = static_cast<int>(run_length);
  return segments;
}

}  // namespace sparse_opt
