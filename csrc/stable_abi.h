// Ops on torch's stable ABI: one binary for torch 2.10 and newer. Only functions of torch's C interface are called; a
// C++ class of torch never crosses the boundary. https://docs.pytorch.org/docs/stable/notes/libtorch_stable_abi.html
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/c/shim.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <array>
#include <bit>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "tensor_view.h"

// The namespace of the native ops. A build for Hugging Face's `kernels` has one of its own.
#ifndef SPARSE_OPT_NATIVE
#define SPARSE_OPT_NATIVE sparse_opt_native
#endif

namespace sparse_opt {

using Tensor = torch::stable::Tensor;  // owns a result

inline TensorView view_of(AtenTensorHandle tensor) {
  TensorView view;
  bool defined = false;
  if (aoti_torch_is_defined(tensor, &defined) != TORCH_SUCCESS || !defined) return view;
  int64_t *sizes = nullptr, *strides = nullptr;
  int32_t dtype = 0, type = 0, index = -1;
  const bool described = aoti_torch_get_dim(tensor, &view.dim) == TORCH_SUCCESS &&
                         aoti_torch_get_numel(tensor, &view.numel) == TORCH_SUCCESS &&
                         aoti_torch_get_sizes(tensor, &sizes) == TORCH_SUCCESS &&
                         aoti_torch_get_strides(tensor, &strides) == TORCH_SUCCESS &&
                         aoti_torch_get_dtype(tensor, &dtype) == TORCH_SUCCESS &&
                         aoti_torch_get_device_type(tensor, &type) == TORCH_SUCCESS &&
                         aoti_torch_get_device_index(tensor, &index) == TORCH_SUCCESS &&
                         aoti_torch_is_contiguous(tensor, &view.contiguous) == TORCH_SUCCESS;
  view.size_list = sizes;
  view.stride_list = strides;
  // The numbers of both enumerations are those of torch's C++ classes, which are fixed, because files contain them.
  view.dtype = static_cast<ScalarType>(dtype);
  view.device = {static_cast<DeviceType>(type), index};
  view.element_size = static_cast<int64_t>(aoti_torch_dtype_element_size(dtype));
  view.readable = described && aoti_torch_get_data_ptr(tensor, &view.data) == TORCH_SUCCESS;
  return view;
}

inline void check_torch(AOTITorchError error, const char* what) {
  if (error != TORCH_SUCCESS) throw std::runtime_error(std::string("sparse_opt: torch failed to ") + what);
}

// Contiguous and not initialized.
inline Tensor empty(std::initializer_list<int64_t> sizes, ScalarType dtype, Device device, bool pinned = false) {
  std::vector<int64_t> strides(sizes.size());
  int64_t stride = 1;
  for (size_t i = sizes.size(); i-- > 0; stride *= std::data(sizes)[i]) strides[i] = stride;
  AtenTensorHandle made = nullptr;
  check_torch((pinned ? aoti_torch_empty_strided_pinned : aoti_torch_empty_strided)(
                  static_cast<int64_t>(sizes.size()), std::data(sizes), strides.data(), static_cast<int32_t>(dtype),
                  static_cast<int32_t>(device.type), device.index, &made),
              "allocate a tensor");
  return Tensor(made);
}

inline Tensor zeros(std::initializer_list<int64_t> sizes, ScalarType dtype, Device device) {
  Tensor made = empty(sizes, dtype, device);
  torch::stable::zero_(made);
  return made;
}

// In memory of the host that a GPU can access.
inline Tensor host_memory(int64_t n, ScalarType dtype) {
  return empty({n}, dtype, {}, /*pinned=*/true);
}

inline Tensor part(Tensor tensor, int64_t begin, int64_t end) {
  return torch::stable::narrow(tensor, 0, begin, end - begin);
}

// The name, without its overload, and the arguments of an op of torch that returns one tensor.
template <typename... Arguments>
Tensor call_torch(const char* op, const char* overload, const Arguments&... arguments) {
  std::array<StableIValue, sizeof...(Arguments)> stack{torch::stable::detail::from(arguments)...};
  check_torch(torch_call_dispatcher(op, overload, stack.data(), TORCH_ABI_VERSION), op);
  return torch::stable::detail::to<Tensor>(stack[0]);
}

// The kernels' thread pool is torch's. One piece of work is thousands of elements already, so the grain is one.
inline void parallel_for(int64_t count, const std::function<void(int64_t, int64_t)>& body) {
  torch::stable::parallel_for(0, count, 1, body);
}

// An argument of a boxed call, which the callee owns. Taking it never fails, so that all are taken before an error.

template <typename T>
class Argument {  // numbers
 public:
  explicit Argument(StableIValue value) : value_(torch::stable::detail::to<T>(value)) {}
  T get() const { return value_; }

 private:
  T value_;
};

struct DeleteTensor {
  void operator()(AtenTensorOpaque* tensor) const { aoti_torch_delete_tensor_object(tensor); }
};
struct DeleteList {
  void operator()(StableListOpaque* list) const { torch_delete_list(list); }
};

inline std::vector<StableIValue> take_list(StableIValue value) {
  const std::unique_ptr<StableListOpaque, DeleteList> list(torch::stable::detail::to<StableListHandle>(value));
  size_t size = 0;
  torch_list_size(list.get(), &size);
  std::vector<StableIValue> items(size);
  for (size_t i = 0; i < size; ++i) torch_list_get_item(list.get(), i, &items[i]);
  return items;
}

template <>
class Argument<TensorView> {
 public:
  explicit Argument(StableIValue value)
      : tensor_(torch::stable::detail::to<AtenTensorHandle>(value)), view_(view_of(tensor_.get())) {}
  const TensorView& get() const { return view_; }

 private:
  std::unique_ptr<AtenTensorOpaque, DeleteTensor> tensor_;
  TensorView view_;
};

template <>
class Argument<TensorList> {
 public:
  explicit Argument(StableIValue value) : tensors_(take_list(value)) {
    views_.reserve(tensors_.size());
    for (const StableIValue tensor : tensors_) views_.push_back(view_of(handle(tensor)));
  }
  Argument(Argument&& other) noexcept : tensors_(std::exchange(other.tensors_, {})), views_(std::move(other.views_)) {}
  ~Argument() {
    for (const StableIValue tensor : tensors_) aoti_torch_delete_tensor_object(handle(tensor));
  }
  TensorList get() const { return views_; }

 private:
  static AtenTensorHandle handle(StableIValue value) { return torch::stable::detail::to<AtenTensorHandle>(value); }

  std::vector<StableIValue> tensors_;
  std::vector<TensorView> views_;
};

template <>
class Argument<Ints> {
 public:
  explicit Argument(StableIValue value) {
    for (const StableIValue item : take_list(value)) numbers_.push_back(torch::stable::detail::to<int64_t>(item));
  }
  Ints get() const { return numbers_; }

 private:
  std::vector<int64_t> numbers_;
};

template <typename T>
class Argument<std::optional<T>> {
 public:
  explicit Argument(StableIValue value) {
    const std::unique_ptr<StableIValue> found(torch::stable::detail::to<StableIValue*>(value));
    if (found != nullptr) value_.emplace(*found);
  }
  std::optional<T> get() const {
    if (!value_.has_value()) return std::nullopt;
    if constexpr (std::is_same_v<T, TensorView>) {  // torch also passes undefined tensors for None
      if (value_->get().dtype == ScalarType::Undefined) return std::nullopt;
    }
    return value_->get();
  }

 private:
  std::optional<Argument<T>> value_;
};

// Owns the arguments that take() has converted to views.
class Owners {
 public:
  template <typename T>
  void take(StableIValue value, T& view) {
    auto owner = std::make_shared<const Argument<T>>(value);
    view = owner->get();
    if constexpr (!std::is_arithmetic_v<T>) owners_.push_back(std::move(owner));
  }

 private:
  std::vector<std::shared_ptr<const void>> owners_;
};

// A function of views, numbers and options as a boxed kernel: boxed<&function>.
template <typename Function>
struct Boxed;

template <typename Result, typename... Parameters>
struct Boxed<Result (*)(Parameters...)> {
  template <Result (*function)(Parameters...)>
  static void call(StableIValue* stack, uint64_t count, uint64_t) {
    if (count != sizeof...(Parameters)) throw std::logic_error("sparse_opt: the schema of an op is not its kernel's");
    run<function>(stack, std::index_sequence_for<Parameters...>());
  }

 private:
  template <Result (*function)(Parameters...), size_t... i>
  static void run(StableIValue* stack, std::index_sequence<i...>) {
    // Braces: the arguments are taken in their order.
    const std::tuple<Argument<std::remove_cvref_t<Parameters>>...> arguments{
        Argument<std::remove_cvref_t<Parameters>>(stack[i])...};
    if constexpr (std::is_void_v<Result>) {
      function(std::get<i>(arguments).get()...);
    } else {
      put(stack, function(std::get<i>(arguments).get()...));
    }
  }
  static void put(StableIValue* stack, const auto& result) { stack[0] = torch::stable::detail::from(result); }
  template <typename... Results>
  static void put(StableIValue* stack, const std::tuple<Results...>& results) {
    std::apply([&](const auto&... result) { ((*stack++ = torch::stable::detail::from(result)), ...); }, results);
  }
};

template <auto function>
constexpr void (*boxed)(StableIValue*, uint64_t, uint64_t) = &Boxed<decltype(function)>::template call<function>;

}  // namespace sparse_opt
