// Error messages without streams: some toolchains link an extension with its own copy of libstdc++, whose streams crash
// when they use the locale facets of torch's copy.
#pragma once

#include <concepts>
#include <stdexcept>
#include <string>

#include "tensor_view.h"

#ifndef TORCH_STABLE_ONLY
#include <c10/util/Exception.h>
#endif

namespace sparse_opt {

inline std::string as_text(const char* text) {
  return text;
}
inline std::string as_text(const std::string& text) {
  return text;
}
inline std::string as_text(std::integral auto number) {
  return std::to_string(number);
}
inline std::string as_text(ScalarType dtype) {
  return torch::headeronly::toString(dtype);
}
inline std::string as_text(Device device) {
  const std::string type = device.type == DeviceType::CPU    ? "cpu"
                           : device.type == DeviceType::CUDA ? "cuda"
                                                             : "device type " + as_text(static_cast<int>(device.type));
  return device.index < 0 ? type : type + ":" + std::to_string(device.index);
}
inline std::string as_text(Ints numbers) {
  std::string text = "[";
  for (size_t i = 0; i < numbers.size(); ++i) text += (i > 0 ? ", " : "") + std::to_string(numbers[i]);
  return text + "]";
}

// Raises ValueError(the parts, one after the other) unless the condition holds. The parts are evaluated only then.
#define SPARSE_OPT_CHECK(condition, ...)          \
  do {                                            \
    if (!(condition)) [[unlikely]]                \
      sparse_opt::raise_value_error(__VA_ARGS__); \
  } while (false)

// Python gets a ValueError for std::invalid_argument from the bindings of ops, but not through a backward pass; the
// library that autograd calls throws torch's own class.
template <typename... Parts>
[[noreturn]] void raise_value_error(const Parts&... parts) {
  std::string text;
  (text.append(as_text(parts)), ...);
#ifdef TORCH_STABLE_ONLY
  throw std::invalid_argument(text);
#else
  TORCH_CHECK_VALUE(false, text);
#endif
}

}  // namespace sparse_opt
