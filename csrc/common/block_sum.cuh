#pragma once

#include <cuda_runtime.h>

namespace sparse_opt::cuda {

// Returns the sum over a block of so many threads in thread 0. Every thread must call it; between two calls there must
// be a barrier.
template <int Threads, typename T>
__device__ __forceinline__ T block_sum_in_first_thread(T value) {
  __shared__ T warp_sums[Threads / 32];
  for (int offset = 16; offset > 0; offset /= 2) value += __shfl_down_sync(0xffffffffu, value, offset);
  if (threadIdx.x % 32 == 0) warp_sums[threadIdx.x / 32] = value;
  __syncthreads();
  T sum = 0;
  if (threadIdx.x == 0) {
    for (int warp = 0; warp < Threads / 32; ++warp) sum += warp_sums[warp];
  }
  return sum;
}

}  // namespace sparse_opt::cuda
