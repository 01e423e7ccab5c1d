// Bytes per active element: index 4, fp32 moments 8 read and 8 written, compact gradient 2 or 4. Memory is fetched by
// 64-byte granules, so the parameter costs 64 read and 64 written, and a dense gradient 64 read, for each granule that
// the mask touches: 1 - (1 - d)^32 of them in bf16 at density d. The floor is the sum over the copy rate.
#include "kernels.h"
#include "step.cuh"

namespace sparse_opt::cuda {
namespace {

template <typename Param, typename Moment, typename Index, bool Stochastic, int Capacity>
__global__ void __launch_bounds__(kThreads) indexed_adamw_kernel(const __grid_constant__ SegmentTable<Capacity> table,
                                                                 const __grid_constant__ AdamWArguments args) {
  if (args.found_inf != nullptr && *args.found_inf != 0.0f) return;
  const BlockRange range = block_range(table, kSlots);
  void* dense = table.dense[range.segment];
  Slots<Param, Index> slots;
  Moment exp_avg[kUnroll], exp_avg_sq[kUnroll];
  float g[kUnroll];
  slots.load_positions(args.segments.indices, range);
  slots.load_state(args.exp_avg, exp_avg);
  slots.load_state(args.exp_avg_sq, exp_avg_sq);
  slots.load_params(dense, args.master);

  // While those are on their way.
  const int64_t step = static_cast<int64_t>(args.steps[table.segment_offset + range.segment]);
  __shared__ AdamWScalars scalars;
  if (threadIdx.x == 0) scalars = adamw_scalars(args, *args.lr, step);
  slots.load_gradients(args, table.companions[range.segment], g);
  __syncthreads();

#pragma unroll
  for (int j = 0; j < kUnroll; ++j) {
    if (!slots.active[j]) continue;
    float p = slots.param_value(j, args.master), m = to_float(exp_avg[j]), v = to_float(exp_avg_sq[j]);
    adamw_element(scalars, g[j], p, m, v);
    RandomWords random = {};
    if (Stochastic) random = random_words(args.seed, slots.slot(j), static_cast<uint32_t>(step));
    slots.template store_state<Stochastic, Moment>(j, m, random.exp_avg, args.exp_avg);
    slots.template store_state<Stochastic, Moment>(j, v, random.exp_avg_sq, args.exp_avg_sq);
    slots.template store_param<Stochastic>(j, p, random.param, dense, args.master);
  }
}

template <typename Param, typename Moment, typename Index, bool Stochastic>
void launch(const AdamWArguments& args, cudaStream_t stream) {
  for_each_table(args.segments, args.dense_grads, kSlots,
                 [&]<int Capacity>(const SegmentTable<Capacity>& table, unsigned blocks) {
                   if (blocks == 0) return;
                   indexed_adamw_kernel<Param, Moment, Index, Stochastic><<<blocks, kThreads, 0, stream>>>(table, args);
                   check_launch("indexed_adamw_");
                 });
}

}  // namespace

void indexed_adamw(const AdamWArguments& args, cudaStream_t stream) {
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
