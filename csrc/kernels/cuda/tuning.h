// Launch sizes that depend on the GPU and change no bit of any result. sparse_opt/tuning describes them and has tables
// of GPUs; these values are used where none was set.
#pragma once

#include <array>
#include <atomic>

namespace sparse_opt::cuda {

// Atomic, because another thread may launch while a table is set.
struct Tuning {
  std::atomic<int> encode_blocks{2};
  std::atomic<int> scattered_swap_bytes{0};
};

inline Tuning& tuning_of(int device) {
  static std::array<Tuning, 64> tunings;
  return tunings[static_cast<size_t>(device) % tunings.size()];
}

}  // namespace sparse_opt::cuda
