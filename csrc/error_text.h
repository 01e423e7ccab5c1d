// Error messages without streams: some toolchains link an extension with its own copy of libstdc++, whose streams crash
// when they use the locale facets of torch's copy.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <concepts>
#include <string>

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
inline std::string as_text(at::ScalarType dtype) {
  return c10::toString(dtype);
}
inline std::string as_text(at::Device device) {
  return device.str();
}
inline std::string as_text(at::IntArrayRef numbers) {
  std::string text = "[";
  for (size_t i = 0; i < numbers.size(); ++i) text += (i > 0 ? ", " : "") + std::to_string(numbers[i]);
  return text + "]";
}

// Raises ValueError(the parts, one after the other) unless the condition holds. The parts are evaluated only then.
#define SPARSE_OPT_CHECK(condition, ...)                                        \
  do {                                                                          \
    if (C10_UNLIKELY(!(condition))) sparse_opt::raise_value_error(__VA_ARGS__); \
  } while (false)

template <typename... Parts>
[[noreturn]] void raise_value_error(const Parts&... parts) {
  std::string text;
  (text.append(as_text(parts)), ...);
  TORCH_CHECK_VALUE(false, text);
}

}  // namespace sparse_opt
