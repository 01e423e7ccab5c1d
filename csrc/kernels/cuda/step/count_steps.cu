// One launch of one block in a step: a few bytes for each tensor.
#include "../common/segment_table.cuh"
#include "../kernels.h"

namespace sparse_opt::cuda {
namespace {

__global__ void count_steps_kernel(float* steps, int64_t count, const float* found_inf) {
  if (found_inf != nullptr && *found_inf != 0.0f) return;
  for (int64_t i = threadIdx.x; i < count; i += blockDim.x) steps[i] += 1.0f;
}

}  // namespace

void count_steps(float* steps, int64_t count, const float* found_inf, cudaStream_t stream) {
  if (count == 0) return;
  count_steps_kernel<<<1, kThreads, 0, stream>>>(steps, count, found_inf);
  check_launch("count_steps");
}

}  // namespace sparse_opt::cuda
