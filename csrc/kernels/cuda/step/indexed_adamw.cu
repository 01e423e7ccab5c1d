// Bytes per active element: index 2 or 4, or 4 a run, fp32 moments 8 read and 8 written, compact gradient 2 or 4.
// Memory is fetched by 64-byte granules, so the parameter costs 64 read and, where bits change, 64 written, and a dense
// gradient 64 read, for each granule that the mask touches: 1 - (1 - d)^32 of them in bf16 at density d. The floor is
// the sum over the copy rate.
#include "../kernels.h"
#include "step.cuh"

namespace sparse_opt::cuda {
namespace {

template <typename Layout, typename Param, typename Moment>
struct AdamWSlots : StepSlots<Layout, Param> {
  typename Layout::template Held<Moment> exp_avg, exp_avg_sq;

  __device__ __forceinline__ void load(const AdamWArguments& args, const BlockRange& range, const void* dense,
                                       const void* dense_grad) {
    this->find(args.segments, range);
    exp_avg = this->load_compact(static_cast<const Moment*>(args.exp_avg));
    exp_avg_sq = this->load_compact(static_cast<const Moment*>(args.exp_avg_sq));
    this->load_params(dense, args.master);
    this->load_gradient(args, dense_grad);
  }
};

// By one thread for each tensor, once: in fp64, with powers whose number of factors grows with the step, they would be
// what every block of a step begins by waiting for. It counts the step first where it is asked to.
__global__ void __launch_bounds__(kThreads)
    adamw_scalars_kernel(const __grid_constant__ AdamWArguments args, AdamWFactors factors, TensorScalars* tensors) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= args.segments.count) return;
  float step = args.steps[i];
  if (args.uncounted_steps != nullptr) {
    if (args.found_inf != nullptr && *args.found_inf != 0.0f) return;
    args.uncounted_steps[i] = step += 1.0f;
  }
  const AdamWScalars s = adamw_scalars(args, factors, *args.lr, static_cast<int64_t>(step));
  tensors[i] = {s.decay, s.sqrt_bias_correction2, s.step_size};
}

template <typename Layout, typename Param, typename Moment, bool Stochastic, int Capacity>
__global__ void __launch_bounds__(Layout::kThreads, Layout::kBlocks)
    indexed_adamw_kernel(const __grid_constant__ SegmentTable<Capacity> table,
                         const __grid_constant__ AdamWArguments args, const __grid_constant__ AdamWFactors factors,
                         const TensorScalars* tensors) {
  if (args.found_inf != nullptr && *args.found_inf != 0.0f) return;
  constexpr int kUnroll = Layout::kUnroll;
  const BlockRange range = block_range(table, Layout::kThreads * kUnroll);
  void* dense = table.dense[range.segment];
  AdamWSlots<Layout, Param, Moment> slots;
  slots.load(args, range, dense, table.companions[range.segment]);
  const int64_t tensor = table.segment_offset + range.segment;
  const TensorScalars found = tensors[tensor];
  const AdamWScalars scalars{factors, found.decay, found.sqrt_bias_correction2, found.step_size};
  RandomWords random[kUnroll] = {};
  if (Stochastic) {  // while the loads are on their way
    const auto step = static_cast<uint32_t>(static_cast<int64_t>(args.steps[tensor]));
#pragma unroll
    for (int j = 0; j < kUnroll; ++j) random[j] = random_words(args.seed, slots.slot(j), step);
  }
  __syncthreads();  // reads before writes, see move.cuh

  const bool from_gradient = factors.lerps_from_gradient();
  float g[kUnroll], p[kUnroll], m[kUnroll], v[kUnroll];
  uint32_t exp_avg_random[kUnroll] = {}, exp_avg_sq_random[kUnroll] = {};
  slots.gradient_values(args, g);
#pragma unroll
  for (int j = 0; j < kUnroll; ++j) {
    p[j] = slots.param_value(j, args.master);
    m[j] = to_float(slots.exp_avg[j]);
    v[j] = to_float(slots.exp_avg_sq[j]);
    adamw_element(scalars, from_gradient, g[j], p[j], m[j], v[j]);
    exp_avg_random[j] = random[j].exp_avg;
    exp_avg_sq_random[j] = random[j].exp_avg_sq;
  }
  slots.template store_state<Stochastic>(static_cast<Moment*>(args.exp_avg), m, exp_avg_random);
  slots.template store_state<Stochastic>(static_cast<Moment*>(args.exp_avg_sq), v, exp_avg_sq_random);
  slots.template store_params<Stochastic>(p, random, dense, args.master);
}

template <typename Layout, typename Param, typename Moment, bool Stochastic>
void launch(const AdamWArguments& args, const AdamWFactors& factors, const TensorScalars* tensors,
            cudaStream_t stream) {
  for_each_table(args.segments, args.dense_grads, int64_t{Layout::kThreads} * Layout::kUnroll,
                 [&]<int Capacity>(const SegmentTable<Capacity>& table, unsigned blocks) {
                   if (blocks == 0) return;
                   constexpr auto kKernel = indexed_adamw_kernel<Layout, Param, Moment, Stochastic, Capacity>;
                   const size_t unused = unused_shared_memory<Layout, kKernel>();
                   kKernel<<<blocks, Layout::kThreads, unused, stream>>>(table, args, factors, tensors);
                   check_launch("indexed_adamw_");
                 });
}

}  // namespace

void indexed_adamw(const AdamWArguments& args, TensorScalars* tensors, cudaStream_t stream) {
  const auto count = static_cast<unsigned>(args.segments.count);
  if (count == 0) return;
  const AdamWFactors factors = adamw_factors(args);
  adamw_scalars_kernel<<<(count + kThreads - 1) / kThreads, kThreads, 0, stream>>>(args, factors, tensors);
  check_launch("indexed_adamw_");
  dispatch_step(args, {args.exp_avg, args.exp_avg_sq},
                [&]<typename Layout, typename Param, typename Moment, bool Stochastic>() {
                  launch<Layout, Param, Moment, Stochastic>(args, factors, tensors, stream);
                });
}

}  // namespace sparse_opt::cuda
