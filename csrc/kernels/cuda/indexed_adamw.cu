// Bytes per active element: index 2 or 4, or 4 a run, fp32 moments 8 read and 8 written, compact gradient 2 or 4.
// Memory is fetched by 64-byte granules, so the parameter costs 64 read and, where bits change, 64 written, and a dense
// gradient 64 read, for each granule that the mask touches: 1 - (1 - d)^32 of them in bf16 at density d. The floor is
// the sum over the copy rate.
#include "kernels.h"
#include "step.cuh"

namespace sparse_opt::cuda {
namespace {

template <typename Layout, typename Param, typename Moment, bool Stochastic, int Capacity>
__global__ void __launch_bounds__(kThreads, Layout::kBlocks)
    indexed_adamw_kernel(const __grid_constant__ SegmentTable<Capacity> table,
                         const __grid_constant__ AdamWArguments args) {
  if (args.found_inf != nullptr && *args.found_inf != 0.0f) return;
  const BlockRange block = block_range(table, kSlots * Layout::kTurns);
  void* dense = table.dense[block.segment];
  const int64_t step = static_cast<int64_t>(args.steps[table.segment_offset + block.segment]);
  __shared__ AdamWScalars scalars;
#pragma unroll 1
  for (int turn = 0; turn < Layout::kTurns; ++turn) {
    const BlockRange range = turn_of(block, turn);
    if (range.begin >= range.end) break;
    StepSlots<Layout, Param> slots;
    Moment exp_avg[kUnroll] = {}, exp_avg_sq[kUnroll] = {};
    float g[kUnroll], p[kUnroll], m[kUnroll], v[kUnroll];
    slots.find(args.segments, range);
    slots.load_compact(static_cast<const Moment*>(args.exp_avg), exp_avg);
    slots.load_compact(static_cast<const Moment*>(args.exp_avg_sq), exp_avg_sq);
    slots.load_params(dense, args.master);
    // While those are on their way.
    if (turn == 0 && threadIdx.x == 0) scalars = adamw_scalars(args, *args.lr, step);
    slots.load_gradients(args, table.companions[block.segment], g);
    if (turn == 0) __syncthreads();

    RandomWords random[kUnroll] = {};
    uint32_t exp_avg_random[kUnroll] = {}, exp_avg_sq_random[kUnroll] = {};
#pragma unroll
    for (int j = 0; j < kUnroll; ++j) {
      p[j] = slots.param_value(j, args.master);
      m[j] = to_float(exp_avg[j]);
      v[j] = to_float(exp_avg_sq[j]);
      adamw_element(scalars, g[j], p[j], m[j], v[j]);
      if (Stochastic) random[j] = random_words(args.seed, slots.slot(j), static_cast<uint32_t>(step));
      exp_avg_random[j] = random[j].exp_avg;
      exp_avg_sq_random[j] = random[j].exp_avg_sq;
    }
    slots.template store_state<Stochastic>(static_cast<Moment*>(args.exp_avg), m, exp_avg_random);
    slots.template store_state<Stochastic>(static_cast<Moment*>(args.exp_avg_sq), v, exp_avg_sq_random);
    slots.template store_params<Stochastic>(p, random, dense, args.master);
  }
}

template <typename Layout, typename Param, typename Moment, bool Stochastic>
void launch(const AdamWArguments& args, cudaStream_t stream) {
  for_each_table(args.segments, args.dense_grads, kSlots * Layout::kTurns,
                 [&]<int Capacity>(const SegmentTable<Capacity>& table, unsigned blocks) {
                   if (blocks == 0) return;
                   indexed_adamw_kernel<Layout, Param, Moment, Stochastic>
                       <<<blocks, kThreads, 0, stream>>>(table, args);
                   check_launch("indexed_adamw_");
                 });
}

}  // namespace

void indexed_adamw(const AdamWArguments& args, cudaStream_t stream) {
  dispatch_step(args, [&]<typename Layout, typename Param, typename Moment, bool Stochastic>() {
    launch<Layout, Param, Moment, Stochastic>(args, stream);
  });
}

}  // namespace sparse_opt::cuda
