// What kernels need to know of a tensor. Both libraries fill it from their own kind of tensor, so that the checks and
// calls are written once: stable_abi.h from torch's C interface, autograd/native_calls.h from an at::Tensor.
#pragma once

#include <torch/headeronly/core/DeviceType.h>
#include <torch/headeronly/core/ScalarType.h>

#include <cstdint>
#include <optional>
#include <span>

namespace sparse_opt {

using torch::headeronly::DeviceType;
using torch::headeronly::ScalarType;
using Ints = std::span<const int64_t>;

struct Device {
  DeviceType type = DeviceType::CPU;
  int index = -1;

  bool operator==(const Device&) const = default;
};

// Valid as long as the tensor exists and is not resized. All members of a default one are null.
struct TensorView {
  void* data = nullptr;
  const int64_t* size_list = nullptr;
  const int64_t* stride_list = nullptr;
  int64_t dim = 0, numel = 0, element_size = 0;
  Device device;
  ScalarType dtype = ScalarType::Undefined;
  bool contiguous = false;
  bool readable = false;  // it has memory, and `data` points to it

  Ints sizes() const { return {size_list, static_cast<size_t>(dim)}; }
  Ints strides() const { return {stride_list, static_cast<size_t>(dim)}; }
  int64_t size(int64_t i) const { return size_list[i < 0 ? i + dim : i]; }
  int64_t nbytes() const { return numel * element_size; }

  template <typename T>
  T* as() const {
    return static_cast<T*>(data);
  }
};

using OptionalTensor = std::optional<TensorView>;
using TensorList = std::span<const TensorView>;

}  // namespace sparse_opt
