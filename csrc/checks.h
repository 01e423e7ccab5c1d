// Checks that keep kernels within their memory. sparse_opt/ops/checks.py checks more, with longer messages; these also
// run when torch.ops.sparse_opt_native is called directly. Each takes nanoseconds.
#pragma once

#include <optional>
#include <vector>

#include "common/arguments.h"
#include "error_text.h"

namespace sparse_opt {

inline DType dtype_of(const char* name, const TensorView& tensor) {
  switch (tensor.dtype) {
    case ScalarType::Float:
      return DType::kFloat32;
    case ScalarType::BFloat16:
      return DType::kBFloat16;
    case ScalarType::Half:
      return DType::kFloat16;
    default:
      SPARSE_OPT_CHECK(false, name, " is ", tensor.dtype, ", expected bfloat16, float16 or float32");
  }
}

inline void check_readable(const char* name, const TensorView& tensor) {
  SPARSE_OPT_CHECK(tensor.readable, name, " has no memory that a kernel could use");
}

// [length], contiguous, on `device`.
inline void check_flat(const char* name, const TensorView& tensor, int64_t length, Device device) {
  SPARSE_OPT_CHECK(tensor.device == device, name, " is on ", tensor.device, ", expected ", device);
  SPARSE_OPT_CHECK(tensor.numel == length, name, " has ", tensor.numel, " elements, expected ", length);
  SPARSE_OPT_CHECK(tensor.contiguous, name, " has strides ", tensor.strides(), ", expected contiguous");
  check_readable(name, tensor);
}

inline void check_dtype(const char* name, const TensorView& tensor, ScalarType dtype) {
  SPARSE_OPT_CHECK(tensor.dtype == dtype, name, " is ", tensor.dtype, ", expected ", dtype);
}

inline float* float_data(const char* name, const TensorView& tensor, int64_t length, Device device) {
  check_flat(name, tensor, length, device);
  check_dtype(name, tensor, ScalarType::Float);
  return static_cast<float*>(tensor.data);
}

inline float* optional_float_data(const char* name, const OptionalTensor& tensor, int64_t length, Device device) {
  return tensor.has_value() ? float_data(name, *tensor, length, device) : nullptr;
}

// The data pointers of a list whose tensors share `device` and a dtype.
inline std::vector<void*> list_data(const char* name, TensorList tensors, Device device) {
  std::vector<void*> pointers;
  pointers.reserve(tensors.size());
  for (size_t i = 0; i < tensors.size(); ++i) {
    const TensorView& t = tensors[i];
    SPARSE_OPT_CHECK(t.device == device, name, "[", i, "] is on ", t.device, ", expected ", device);
    const ScalarType dtype = tensors[0].dtype;
    SPARSE_OPT_CHECK(t.dtype == dtype, name, "[", i, "] is ", t.dtype, ", but ", name, "[0] is ", dtype);
    SPARSE_OPT_CHECK(t.contiguous, name, "[", i, "] has strides ", t.strides(), ", expected contiguous");
    SPARSE_OPT_CHECK(t.readable, name, "[", i, "] has no memory that a kernel could use");
    pointers.push_back(t.data);
  }
  return pointers;
}

inline void check_same_sizes(const char* name, TensorList tensors, const char* like_name, TensorList like) {
  SPARSE_OPT_CHECK(tensors.size() == like.size(), name, " holds ", tensors.size(), " tensors, ", like_name, " holds ",
                   like.size());
  for (size_t i = 0; i < tensors.size(); ++i) {
    const int64_t numel = tensors[i].numel, expected = like[i].numel;
    SPARSE_OPT_CHECK(numel == expected, name, "[", i, "] has ", numel, " elements, ", like_name, "[", i, "] has ",
                     expected);
  }
}

inline int movable_size(const char* name, const TensorView& tensor) {
  const auto size = static_cast<int>(tensor.element_size);
  SPARSE_OPT_CHECK(size == 1 || size == 2 || size == 4 || size == 8, name, " is ", tensor.dtype, " of ", size,
                   " bytes, expected elements of 1, 2, 4 or 8 bytes");
  return size;
}

constexpr int64_t kLongestRun = int64_t{1} << 30;

// The number of slots that indices cover, run_length for each index.
inline int64_t checked_slots(const TensorView& indices, int64_t run_length) {
  SPARSE_OPT_CHECK(run_length >= 1 && run_length <= kLongestRun && (run_length & (run_length - 1)) == 0,
                   "run_length is ", run_length, ", expected a power of two from 1 to ", kLongestRun);
  return indices.numel * run_length;
}

inline IndexType checked_index_type(const TensorView& indices, const OptionalTensor& index_bases, int64_t run_length) {
  if (index_bases.has_value()) {
    check_dtype("indices", indices, ScalarType::UInt16);
    SPARSE_OPT_CHECK(run_length == 1, "run_length is ", run_length, ", expected 1 with index_bases");
    return IndexType::kOffset16;
  }
  SPARSE_OPT_CHECK(indices.dtype == ScalarType::Int || indices.dtype == ScalarType::Long, "indices is ", indices.dtype,
                   ", expected int32 or int64");
  return indices.dtype == ScalarType::Long ? IndexType::kInt64 : IndexType::kInt32;
}

// `pointers` are those of the dense tensors, and must outlive the result. index_bases cover `of` segments; if it is not
// given, one for each dense tensor.
inline Segments checked_segments(const char* name, TensorList dense, const std::vector<void*>& pointers,
                                 const TensorView& indices, Ints starts, Ints ends, int64_t run_length = 1,
                                 const OptionalTensor& index_bases = std::nullopt,
                                 std::optional<int64_t> of = std::nullopt) {
  const int64_t nnz = checked_slots(indices, run_length);
  const auto count = static_cast<int64_t>(dense.size());
  Segments segments;
  segments.index_type = checked_index_type(indices, index_bases, run_length);
  if (index_bases.has_value()) {
    check_flat("index_bases", *index_bases, nnz / kIndexFrame + of.value_or(count), indices.device);
    check_dtype("index_bases", *index_bases, ScalarType::Int);
    segments.index_bases = static_cast<const int32_t*>(index_bases->data);
  }
  check_flat("indices", indices, indices.numel, indices.device);
  SPARSE_OPT_CHECK(starts.size() == dense.size() && ends.size() == dense.size(), "starts holds ", starts.size(),
                   " and ends ", ends.size(), " numbers, ", name, " holds ", dense.size(), " tensors");
  for (size_t i = 0; i < dense.size(); ++i) {
    SPARSE_OPT_CHECK(0 <= starts[i] && starts[i] <= ends[i] && ends[i] <= nnz, "segment ", i, " is [", starts[i], ", ",
                     ends[i], "), expected within [0, ", nnz, ")");
    SPARSE_OPT_CHECK((starts[i] | ends[i]) % run_length == 0, "segment ", i, " is [", starts[i], ", ", ends[i],
                     "), expected multiples of run_length ", run_length);
    const int64_t numel = dense[i].numel;
    SPARSE_OPT_CHECK(ends[i] - starts[i] <= numel, "segment ", i, " has ", ends[i] - starts[i], " slots, but ", name,
                     "[", i, "] has ", numel, " elements");
    segments.numel += numel;
  }
  segments.count = count;
  segments.dense = pointers.data();
  segments.starts = starts.data();
  segments.ends = ends.data();
  segments.indices = indices.data;
  segments.run_length = static_cast<int>(run_length);
  return segments;
}

}  // namespace sparse_opt
