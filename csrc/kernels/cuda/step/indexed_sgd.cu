// Bytes per active element: index 2 or 4, fp32 momentum 4 read and 4 written, compact gradient 2 or 4; parameter and
// dense gradient by 64-byte granules, as in indexed_adamw.cu.
#include "../kernels.h"
#include "step.cuh"

namespace sparse_opt::cuda {
namespace {

template <typename Layout, typename Param, typename Moment>
struct SgdSlots : StepSlots<Layout, Param> {
  typename Layout::template Held<Moment> momentum_buffer;

  __device__ __forceinline__ void load(const SgdArguments& args, const BlockRange& range, const void* dense,
                                       const void* dense_grad) {
    this->find(args.segments, range);
    if (args.momentum_buffer != nullptr) {
      momentum_buffer = this->load_compact(static_cast<const Moment*>(args.momentum_buffer));
    }
    this->load_params(dense, args.master);
    this->load_gradient(args, dense_grad);
  }
};

template <typename Layout, typename Param, typename Moment, bool Stochastic, int Capacity>
__global__ void __launch_bounds__(Layout::kThreads, Layout::kBlocks)
    indexed_sgd_kernel(const __grid_constant__ SegmentTable<Capacity> table,
                       const __grid_constant__ SgdArguments args) {
  if (args.found_inf != nullptr && *args.found_inf != 0.0f) return;
  constexpr int kUnroll = Layout::kUnroll;
  const BlockRange range = block_range(table, Layout::kThreads * kUnroll);
  void* dense = table.dense[range.segment];
  SgdSlots<Layout, Param, Moment> slots;
  slots.load(args, range, dense, table.companions[range.segment]);
  const int64_t step = static_cast<int64_t>(args.steps[table.segment_offset + range.segment]);
  const SgdScalars scalars = sgd_scalars(args, *args.lr, step);
  __syncthreads();  // reads before writes, see move.cuh

  float g[kUnroll], p[kUnroll], b[kUnroll];
  RandomWords random[kUnroll] = {};
  uint32_t momentum_random[kUnroll] = {};
  slots.gradient_values(args, g);
#pragma unroll
  for (int j = 0; j < kUnroll; ++j) {
    p[j] = slots.param_value(j, args.master);
    b[j] = to_float(slots.momentum_buffer[j]);
    sgd_element(scalars, g[j], p[j], b[j]);
    if (Stochastic) random[j] = random_words(args.seed, slots.slot(j), static_cast<uint32_t>(step));
    momentum_random[j] = random[j].exp_avg;
  }
  if (scalars.has_momentum) {
    slots.template store_state<Stochastic>(static_cast<Moment*>(args.momentum_buffer), b, momentum_random);
  }
  slots.template store_params<Stochastic>(p, random, dense, args.master);
}

template <typename Layout, typename Param, typename Moment, bool Stochastic>
void launch(const SgdArguments& args, cudaStream_t stream) {
  for_each_table(args.segments, args.dense_grads, int64_t{Layout::kThreads} * Layout::kUnroll,
                 [&]<int Capacity>(const SegmentTable<Capacity>& table, unsigned blocks) {
                   if (blocks == 0) return;
                   constexpr auto kKernel = indexed_sgd_kernel<Layout, Param, Moment, Stochastic, Capacity>;
                   const size_t unused = unused_shared_memory<Layout, kKernel>();
                   kKernel<<<blocks, Layout::kThreads, unused, stream>>>(table, args);
                   check_launch("indexed_sgd_");
                 });
}

}  // namespace

void indexed_sgd(const SgdArguments& args, cudaStream_t stream) {
  dispatch_step(args, {args.momentum_buffer}, [&]<typename Layout, typename Param, typename Moment, bool Stochastic>() {
    launch<Layout, Param, Moment, Stochastic>(args, stream);
  });
}

}  // namespace sparse_opt::cuda
