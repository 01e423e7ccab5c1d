// The launchers of masked_grad_gather_, and the sums of its partial sums of squares.
#pragma once

#include "common/arguments.h"

namespace sparse_opt {

// The slots of one partial sum of squares in a GPU's gather. Blocks begin at multiples of 32 slots.
constexpr int64_t kGatherBlock = 1024;

inline int64_t gather_blocks(int64_t start, int64_t end) {
  return end > start ? (end - (start & ~int64_t{31}) + kGatherBlock - 1) / kGatherBlock : 0;
}

// The global norm of gradients and the factor that clips them to max_norm, at most 1, as in torch's clip_grad_norm_.
// All on the device.
struct ClipArguments {
  float max_norm = 0.0f;
  float* norm = nullptr;         // [1]
  float* coefficient = nullptr;  // [1]
  uint32_t* finished = nullptr;  // [1], 0 before and after a call
};

struct GatherArguments {
  Segments segments;
  DType dense_dtype = DType::kFloat32;
  DType out_dtype = DType::kFloat32;
  void* out = nullptr;           // [nnz]
  const float* scale = nullptr;  // [1], may be null
  bool accumulate = false;
  float* sum_sq = nullptr;     // [count], may be null
  float* found_inf = nullptr;  // [1], may be null
};

namespace cpu {

void masked_grad_gather(const GatherArguments& args, ParallelFor parallel_for);

}  // namespace cpu

namespace cuda {

// Two lists in host memory, [args.segments.count]; both may be null. partial_sums[i]: fp32 [gather_blocks] on
// the device, the sums of squares of the blocks of segment i. numbers[i]: the number of segment i in index_bases; null
// is 0, 1, 2... args.sum_sq is not written: sum_partials adds up the partial sums of all segments, in one array, to
// sum_sq, fp32 [segments.count], and computes the norm of all of them if clip.finished is not null. The segments may
// have been gathered in several calls.
void masked_grad_gather(const GatherArguments& args, const void* const* partial_sums, const int64_t* numbers,
                        cudaStream_t stream);
void sum_partials(const Segments& segments, const float* partial_sums, float* sum_sq, const ClipArguments& clip,
                  cudaStream_t stream);

}  // namespace cuda

}  // namespace sparse_opt
