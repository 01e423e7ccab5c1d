// Bytes per active element: index 2 or 4 (of a run, shared), out written (and read, to accumulate); and 64 read for
// each 64-byte line of the dense tensors that the mask touches. The sums of squares cost no further pass.
#include <atomic>
#include <cmath>
#include <limits>

#include "common/blocks.h"
#include "common/multiversion.h"
#include "gather.h"

namespace sparse_opt::cpu {
namespace {

SPARSE_OPT_MULTIVERSION
void combine(const float* scale, const float* __restrict held, int64_t n, float* __restrict g) {
  if (scale != nullptr) {
    for (int64_t k = 0; k < n; ++k) g[k] = g[k] * *scale;
  }
  if (held != nullptr) {
    for (int64_t k = 0; k < n; ++k) g[k] = held[k] + g[k];
  }
}

// fp64 sums of fp32 squares in a fixed order.
SPARSE_OPT_MULTIVERSION
double sum_of_squares(const float* __restrict values, int64_t n) {
  constexpr int64_t kLanes = 16;
  double lanes[kLanes] = {};
  int64_t k = 0;
  for (; k + kLanes <= n; k += kLanes) {
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      const float square = values[k + lane] * values[k + lane];
      lanes[lane] += static_cast<double>(square);
    }
  }
  double sum = 0.0;
  for (double lane : lanes) sum += lane;
  for (; k < n; ++k) {
    const float square = values[k] * values[k];
    sum += static_cast<double>(square);
  }
  return sum;
}

SPARSE_OPT_MULTIVERSION
bool any_not_finite(const float* __restrict values, int64_t n) {
  uint32_t found = 0;
  for (int64_t k = 0; k < n; ++k) found |= (float_bits(values[k]) & 0x7f800000u) == 0x7f800000u ? 1u : 0u;
  return found != 0;
}

}  // namespace

void masked_grad_gather(const GatherArguments& args, ParallelFor parallel_for) {
  const Work work(args.segments);
  const int64_t out_size = element_size(args.out_dtype);
  std::vector<double> chunk_sums(args.sum_sq != nullptr ? work.chunks.size() : 0);
  std::atomic<bool> not_finite = false;
  work.run(parallel_for, [&](int64_t first, int64_t last) {
    alignas(64) float g[kBlock], held[kBlock];
    for (int64_t c = first; c < last; ++c) {
      double sum = 0.0;
      const void* dense = args.segments.dense[work.chunks[c].segment];
      const auto ahead = [&](const BlockIndices& block) { prefetch(args.dense_dtype, dense, block); };
      for_each_block(args.segments, work.chunks[c], 1, ahead, [&](const BlockIndices& block) {
        void* out = at(args.out, block.begin, out_size);
        gather_as_float(args.dense_dtype, dense, block, g);
        if (args.accumulate) convert_to_float(args.out_dtype, out, block.size, held);
        combine(args.scale, args.accumulate ? held : nullptr, block.size, g);
        convert_from_float(args.out_dtype, g, block.size, out);
        if (args.sum_sq == nullptr && args.found_inf == nullptr) return;
        if (args.out_dtype != DType::kFloat32) convert_to_float(args.out_dtype, out, block.size, g);  // as stored
        if (args.sum_sq != nullptr) sum += sum_of_squares(g, block.size);
        if (args.found_inf != nullptr && any_not_finite(g, block.size)) {
          not_finite.store(true, std::memory_order_relaxed);
        }
      });
      if (args.sum_sq != nullptr) chunk_sums[c] = sum;
    }
  });
  if (args.sum_sq != nullptr) {
    size_t c = 0;
    for (int64_t i = 0; i < args.segments.count; ++i) {
      double sum = 0.0;
      for (; c < work.chunks.size() && work.chunks[c].segment == i; ++c) sum += chunk_sums[c];
      args.sum_sq[i] = static_cast<float>(sum);
    }
  }
  if (not_finite) *args.found_inf = std::numeric_limits<float>::infinity();
}

}  // namespace sparse_opt::cpu
