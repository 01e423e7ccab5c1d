#pragma once

#include <cuda_runtime.h>

namespace sparse_opt::cuda {

// The sum of the counts of the lanes before this one, and of all. Called by all threads of a warp.
__device__ __forceinline__ int warp_sum_before(int count, int& total) {
  int sum = count;
  for (int offset = 1; offset < 32; offset *= 2) {
    const int below = __shfl_up_sync(0xffffffffu, sum, offset);
    if (static_cast<int>(threadIdx.x % 32) >= offset) sum += below;
  }
  total = __shfl_sync(0xffffffffu, sum, 31);
  return sum - count;
}

}  // namespace sparse_opt::cuda
