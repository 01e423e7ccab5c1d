// Launchers of delta_encode (delta_encode.cuh) and delta_sample, which runs before it and counts the changes in every
// args.sample_stride-th block. The caller allocates by this count, or delta_encode finds that a speculative capacity is
// too low.
#include "delta_codec.h"
#include "delta_encode.cuh"
#include "swap/move.cuh"

namespace sparse_opt::cuda {
namespace {

// The number of changes in every args.sample_stride-th block.
template <typename Word, int Capacity>
__global__ void __launch_bounds__(kThreads) delta_sample_kernel(const __grid_constant__ SegmentTable<Capacity> table,
                                                                const __grid_constant__ DeltaArguments args) {
  __shared__ ChangedBits changed;
  const BlockRange range = block_range(table, kDeltaBlock, static_cast<int>(blockIdx.x * args.sample_stride));
  changed.compare(static_cast<const Word*>(table.companions[range.segment]) + range.begin,
                  static_cast<const Word*>(table.dense[range.segment]) + range.begin,
                  static_cast<int>(range.end - range.begin));
  int total;
  block_rank(__popc(changed.words[threadIdx.x]), total);
  if (threadIdx.x == 0) {
    atomicAdd(DeltaProgress(args.progress, 0).sampled, static_cast<unsigned long long>(total));
    store_relaxed<::cuda::thread_scope_system>(args.sampled + blockIdx.x, total);
  }
}

template <typename Launch>
void for_each_delta_table(const DeltaArguments& args, int64_t block, Launch launch) {
  for_each_whole_table(args.count, args.new_tensors, args.old_tensors, args.numels, block,
                       [&]<int Capacity>(const SegmentTable<Capacity>& table, unsigned blocks) {
                         launch(table, blocks);
                         check_launch("delta_encode");
                       });
}

template <typename Word>
int64_t encode_tiles(const DeltaArguments& args) {
  int64_t tiles = 0;
  for (int64_t i = 0; i < args.count; ++i) tiles += blocks_of(0, args.numels[i], EncodeShape<Word>::kTile);
  return tiles;
}

}  // namespace

int64_t delta_sample(const DeltaArguments& args, cudaStream_t stream) {
  DeltaArguments rest = args;
  dispatch_word(args.element_size, [&]<typename Word>() {
    for_each_delta_table(args, kDeltaBlock, [&]<int Capacity>(const SegmentTable<Capacity>& table, unsigned blocks) {
      const auto sampled = static_cast<unsigned>((blocks + args.sample_stride - 1) / args.sample_stride);
      delta_sample_kernel<Word><<<sampled, kThreads, 0, stream>>>(table, rest);
      rest.sampled += sampled;
    });
  });
  return rest.sampled - args.sampled;
}

int64_t delta_progress_bytes(const DeltaArguments& args) {
  int64_t bytes = 0;
  dispatch_word(args.element_size,
                [&]<typename Word>() { bytes = DeltaProgress::bytes(encode_tiles<Word>(args), args.count); });
  return bytes;
}

void delta_prepare(const DeltaArguments& args, cudaStream_t stream) {
  const cudaError_t error = cudaMemsetAsync(args.progress, 0, delta_progress_bytes(args), stream);
  if (error != cudaSuccess)
    throw std::runtime_error(std::string("delta_encode: clearing its memory failed: ") + cudaGetErrorString(error));
}

void delta_encode(const DeltaArguments& args, cudaStream_t stream) {
  int device = 0, multiprocessors = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  const auto most = static_cast<unsigned>(multiprocessors * (has_tuned_sizes() ? kEncodeBlocks : kEncodeBlocksUntuned));
  dispatch_word(args.element_size, [&]<typename Word>() {
    const int64_t all_tiles = encode_tiles<Word>(args);
    const auto encode = [&]<typename Index>() {
      for_each_delta_table(args, EncodeShape<Word>::kTile,
                           [&]<int Capacity>(const SegmentTable<Capacity>& table, unsigned tiles) {
                             delta_encode_kernel<Word, Index>
                                 <<<std::min(tiles + 1, most), kEncodeThreads, 0, stream>>>(table, args, all_tiles);
                           });
    };
    args.wide_indices ? encode.template operator()<int64_t>() : encode.template operator()<int32_t>();
  });
}

void delta_apply(const MoveArguments& args, cudaStream_t stream) {
  move<Move::kToDense>("delta_apply_", args, stream);
}

}  // namespace sparse_opt::cuda
