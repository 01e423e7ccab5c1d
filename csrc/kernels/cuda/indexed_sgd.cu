// Bytes per active element: index 4, fp32 momentum 4 read and 4 written, compact gradient 2 or 4; parameter and dense
// gradient by 64-byte granules, as in indexed_adamw.cu.
#include "kernels.h"
#include "step.cuh"

namespace sparse_opt::cuda {
namespace {

template <typename Param, typename Moment, typename Index, bool Stochastic, int Capacity>
__global__ void __launch_bounds__(kThreads) indexed_sgd_kernel(const __grid_constant__ SegmentTable<Capacity> table,
                                                               const __grid_constant__ SgdArguments args) {
  if (args.found_inf != nullptr && *args.found_inf != 0.0f) return;
  const BlockRange range = block_range(table, kSlots);
  const int64_t step = static_cast<int64_t>(args.steps[table.segment_offset + range.segment]);
  const SgdScalars scalars = sgd_scalars(args, *args.lr, step);
  void* dense = table.dense[range.segment];
  Slots<Param, Index> slots;
  Moment momentum_buffer[kUnroll] = {};
  float g[kUnroll];
  slots.load_positions(args.segments.indices, range);
  if (scalars.has_momentum) slots.load_state(args.momentum_buffer, momentum_buffer);
  slots.load_params(dense, args.master);
  slots.load_gradients(args, table.companions[range.segment], g);

#pragma unroll
  for (int j = 0; j < kUnroll; ++j) {
    if (!slots.active[j]) continue;
    float p = slots.param_value(j, args.master), b = to_float(momentum_buffer[j]);
    sgd_element(scalars, g[j], p, b);
    RandomWords random = {};
    if (Stochastic) random = random_words(args.seed, slots.slot(j), static_cast<uint32_t>(step));
    if (scalars.has_momentum) {
      slots.template store_state<Stochastic, Moment>(j, b, random.exp_avg, args.momentum_buffer);
    }
    slots.template store_param<Stochastic>(j, p, random.param, dense, args.master);
  }
}

template <typename Param, typename Moment, typename Index, bool Stochastic>
void launch(const SgdArguments& args, cudaStream_t stream) {
  for_each_table(args.segments, args.dense_grads, kSlots,
                 [&]<int Capacity>(const SegmentTable<Capacity>& table, unsigned blocks) {
                   if (blocks == 0) return;
                   indexed_sgd_kernel<Param, Moment, Index, Stochastic><<<blocks, kThreads, 0, stream>>>(table, args);
                   check_launch("indexed_sgd_");
                 });
}

}  // namespace

void indexed_sgd(const SgdArguments& args, cudaStream_t stream) {
  dispatch_dtype(args.param_dtype, [&]<typename Param>() {
    dispatch_index(args.segments.wide_indices, [&]<typename Index>() {
      if (args.moment_dtype == DType::kBFloat16) {
        args.stochastic_rounding ? launch<Param, bfloat16, Index, true>(args, stream)
                                 : launch<Param, bfloat16, Index, false>(args, stream);
      } else {
        args.stochastic_rounding ? launch<Param, float, Index, true>(args, stream)
                                 : launch<Param, float, Index, false>(args, stream);
      }
    });
  });
}

}  // namespace sparse_opt::cuda
