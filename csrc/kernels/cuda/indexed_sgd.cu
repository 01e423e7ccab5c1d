// Bytes per active element: index 2 or 4, fp32 momentum 4 read and 4 written, compact gradient 2 or 4; parameter and
// dense gradient by 64-byte granules, as in indexed_adamw.cu.
#include "kernels.h"
#include "step.cuh"

namespace sparse_opt::cuda {
namespace {

template <typename Layout, typename Param, typename Moment, bool Stochastic, int Capacity>
__global__ void __launch_bounds__(kThreads) indexed_sgd_kernel(const __grid_constant__ SegmentTable<Capacity> table,
                                                               const __grid_constant__ SgdArguments args) {
  if (args.found_inf != nullptr && *args.found_inf != 0.0f) return;
  const BlockRange block = block_range(table, kSlots * Layout::kTurns);
  const int64_t step = static_cast<int64_t>(args.steps[table.segment_offset + block.segment]);
  const SgdScalars scalars = sgd_scalars(args, *args.lr, step);
  void* dense = table.dense[block.segment];
#pragma unroll 1
  for (int turn = 0; turn < Layout::kTurns; ++turn) {
    const BlockRange range = turn_of(block, turn);
    if (range.begin >= range.end) break;
    StepSlots<Layout, Param> slots;
    Moment momentum_buffer[kUnroll] = {};
    float g[kUnroll], p[kUnroll], b[kUnroll];
    slots.find(args.segments, range);
    if (scalars.has_momentum) slots.load_compact(static_cast<const Moment*>(args.momentum_buffer), momentum_buffer);
    slots.load_params(dense, args.master);
    slots.load_gradients(args, table.companions[block.segment], g);
    __syncthreads();  // reads before writes, see move.cuh

    RandomWords random[kUnroll] = {};
    uint32_t momentum_random[kUnroll] = {};
#pragma unroll
    for (int j = 0; j < kUnroll; ++j) {
      p[j] = slots.param_value(j, args.master);
      b[j] = to_float(momentum_buffer[j]);
      sgd_element(scalars, g[j], p[j], b[j]);
      if (Stochastic) random[j] = random_words(args.seed, slots.slot(j), static_cast<uint32_t>(step));
      momentum_random[j] = random[j].exp_avg;
    }
    if (scalars.has_momentum) {
      slots.template store_state<Stochastic>(static_cast<Moment*>(args.momentum_buffer), b, momentum_random);
    }
    slots.template store_params<Stochastic>(p, random, dense, args.master);
  }
}

template <typename Layout, typename Param, typename Moment, bool Stochastic>
void launch(const SgdArguments& args, cudaStream_t stream) {
  for_each_table(args.segments, args.dense_grads, kSlots * Layout::kTurns,
                 [&]<int Capacity>(const SegmentTable<Capacity>& table, unsigned blocks) {
                   if (blocks == 0) return;
                   indexed_sgd_kernel<Layout, Param, Moment, Stochastic><<<blocks, kThreads, 0, stream>>>(table, args);
                   check_launch("indexed_sgd_");
                 });
}

}  // namespace

void indexed_sgd(const SgdArguments& args, cudaStream_t stream) {
  dispatch_step(args, [&]<typename Layout, typename Param, typename Moment, bool Stochastic>() {
    launch<Layout, Param, Moment, Stochastic>(args, stream);
  });
}

}  // namespace sparse_opt::cuda
