#pragma once

#include <cstdint>

namespace sparse_opt::cpu {

// Calls call(Word{}) with the unsigned type of this size.
template <typename Call>
decltype(auto) with_word(int element_size, Call call) {
  switch (element_size) {
    case 1:
      return call(uint8_t{});
    case 2:
      return call(uint16_t{});
    case 4:
      return call(uint32_t{});
    default:
      return call(uint64_t{});
  }
}

}  // namespace sparse_opt::cpu
