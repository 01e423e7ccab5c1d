// Bytes per active element: index 2 or 4, or 4 a run, out written (and read, to accumulate); and 64 read for each
// 64-byte granule of the dense tensors that the mask touches. Each block leaves one partial sum of squares, and a
// second kernel adds those of a tensor in a fixed order: no atomics, so the same bits on every run. Gradient hooks
// gather one tensor at a time, and run the second kernel once.
#include "common/block_sum.cuh"
#include "common/slots.cuh"
#include "gather.h"

namespace sparse_opt::cuda {
namespace {

// The companions of the list are the arrays for the partial sums of each tensor.
template <int Capacity>
struct GatherTable {
  SegmentTable<Capacity> list;
  int32_t numbers[Capacity];  // the number of each segment in index_bases
};

template <typename Layout, typename Dense, typename Out, int Capacity>
__global__ void __launch_bounds__(kThreads)
    masked_grad_gather_kernel(const __grid_constant__ GatherTable<Capacity> table,
                              const __grid_constant__ GatherArguments args) {
  BlockRange range = block_range(table.list, kSlots);
  range.number = table.numbers[range.segment];
  Out* out = static_cast<Out*>(args.out);
  float sum = 0.0f;
  bool not_finite = false;

  Layout slots;
  typename Layout::template Held<Out> held;
  Out stored[kUnroll];
  slots.find(args.segments, range);
  if (args.accumulate) held = slots.load_compact(static_cast<const Out*>(out));
  const auto raw = slots.load_dense(static_cast<const Dense*>(table.list.dense[range.segment]));
#pragma unroll
  for (int j = 0; j < kUnroll; ++j) {
    float g = to_float(raw[j]);
    if (args.scale != nullptr) g = g * *args.scale;
    if (args.accumulate) g = to_float(held[j]) + g;
    stored[j] = from_float<Out>(g);
    if (!slots.active(j)) continue;
    const float value = to_float(stored[j]);
    sum += value * value;
    not_finite = not_finite || (float_bits(value) & 0x7f800000u) == 0x7f800000u;
  }
  slots.store_compact(out, stored);
  if (args.found_inf != nullptr && __syncthreads_or(not_finite) && threadIdx.x == 0) {
    *args.found_inf = __int_as_float(0x7f800000);
  }
  if (const void* partial_sums = table.list.companions[range.segment]; partial_sums != nullptr) {
    const float total = block_sum_in_first_thread<kThreads>(sum);
    const int block = static_cast<int>(blockIdx.x) - table.list.first_block[range.segment];
    if (threadIdx.x == 0) static_cast<float*>(const_cast<void*>(partial_sums))[block] = total;
  }
}

// The last of `blocks` blocks to call this adds up the sums of squares, in their order: [blocks].
__device__ __forceinline__ void clip_in_last_block(const ClipArguments& clip, const float* sum_sq, uint32_t blocks) {
  __shared__ bool is_last;
  __threadfence();  // this block's sum, before its number is counted
  if (threadIdx.x == 0) is_last = atomicAdd(clip.finished, 1u) == blocks - 1;
  __syncthreads();
  if (!is_last) return;
  __threadfence();
  double sum = 0.0;
  for (uint32_t i = threadIdx.x; i < blocks; i += kThreads) sum += static_cast<double>(__ldcg(sum_sq + i));
  const double total = block_sum_in_first_thread<kThreads>(sum);
  if (threadIdx.x != 0) return;
  const float norm = sqrtf(static_cast<float>(total));
  const float coefficient = (1.0f / (norm + 1e-6f)) * clip.max_norm;
  *clip.norm = norm;
  *clip.coefficient = coefficient > 1.0f ? 1.0f : coefficient;  // a NaN stays
  *clip.finished = 0;
}

// One block for each segment. The sum of an empty one is 0.
template <int Capacity>
__global__ void __launch_bounds__(kThreads)
    sum_partials_kernel(const __grid_constant__ SegmentTable<Capacity> table, const float* partial_sums, float* sum_sq,
                        const __grid_constant__ ClipArguments clip, uint32_t blocks) {
  const float* partials = partial_sums + table.block_offset;
  double sum = 0.0;
  for (int block = table.first_block[blockIdx.x] + threadIdx.x; block < table.first_block[blockIdx.x + 1];
       block += kThreads) {
    sum += static_cast<double>(partials[block]);
  }
  const double total = block_sum_in_first_thread<kThreads>(sum);
  if (threadIdx.x == 0) sum_sq[table.segment_offset + blockIdx.x] = static_cast<float>(total);
  if (clip.finished != nullptr) clip_in_last_block(clip, sum_sq, blocks);
}

template <typename Layout, typename Dense, typename Out>
void launch(const GatherArguments& args, const void* const* partial_sums, const int64_t* numbers, cudaStream_t stream) {
  for_each_table(args.segments, partial_sums, kSlots,
                 [&]<int Capacity>(const SegmentTable<Capacity>& list, unsigned blocks) {
                   if (blocks == 0) return;
                   GatherTable<Capacity> table{list, {}};
                   for (int i = 0; i < list.count; ++i) {
                     const int64_t segment = list.segment_offset + i;
                     table.numbers[i] = static_cast<int32_t>(numbers != nullptr ? numbers[segment] : segment);
                   }
                   masked_grad_gather_kernel<Layout, Dense, Out><<<blocks, kThreads, 0, stream>>>(table, args);
                   check_launch("masked_grad_gather_");
                 });
}

}  // namespace

void masked_grad_gather(const GatherArguments& args, const void* const* partial_sums, const int64_t* numbers,
                        cudaStream_t stream) {
  dispatch_dtype(args.dense_dtype, [&]<typename Dense>() {
    dispatch_dtype(args.out_dtype, [&]<typename Out>() {
      const bool vectors = has_runs_of_vectors(args.segments) && fits_vectors(args.out, sizeof(Out));
      dispatch_layout(args.segments, vectors,
                      [&]<typename Layout>() { launch<Layout, Dense, Out>(args, partial_sums, numbers, stream); });
    });
  });
}

void sum_partials(const Segments& segments, const float* partial_sums, float* sum_sq, const ClipArguments& clip,
                  cudaStream_t stream) {
  static_assert(kSlots == kGatherBlock, "callers allocate one partial sum for each kGatherBlock slots");
  for_each_table(segments, nullptr, kSlots, [&]<int Capacity>(const SegmentTable<Capacity>& table, unsigned) {
    sum_partials_kernel<<<table.count, kThreads, 0, stream>>>(table, partial_sums, sum_sq, clip,
                                                              static_cast<uint32_t>(segments.count));
    check_launch("masked_grad_gather_");
  });
}

}  // namespace sparse_opt::cuda
