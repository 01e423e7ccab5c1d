// The loop of the kernels that move bits between dense[indices] and a compact buffer.
#pragma once

#include "slots.cuh"

namespace sparse_opt::cuda {

// The two are exchanged, or one is written to the other. What a swap would not change is not stored: base weights
// differ from the model's in few bits for much of a run (step.cuh says what a store costs).
enum class Move { kSwap, kToDense, kToCompact };

// Elements of a thread. Little is held of each here, so that many can be in flight, and a block reads all of its
// elements before it writes the first: swapping 10 % of 2^31 bf16 on an H200 took 2.6 ms so, 3.0 ms with 256
// threads, 3.4 ms without the barrier, and 5.2 ms with four elements of each of 256 threads and no barrier. Where
// nothing is read, few should be on their way at a time, so that what the writes of neighbours touch leaves the caches
// together: 1, 2.5 and 10 % of 2^30 bf16 were written in 0.41, 0.62 and 1.03 ms with one element a thread, and in 0.45,
// 0.69 and 1.18 with eight.
constexpr int kMoveThreads = 1024;
template <Move Way>
constexpr int kMoveUnroll = Way == Move::kToDense ? 1 : 8;
template <Move Way>
constexpr int64_t kMoveSlots = kMoveThreads * kMoveUnroll<Way>;

template <typename Word, typename Index, Move Way, int Capacity>
__global__ void __launch_bounds__(kMoveThreads)
    move_kernel(const __grid_constant__ SegmentTable<Capacity> table, const __grid_constant__ MoveArguments args) {
  constexpr int kUnroll = kMoveUnroll<Way>;
  const BlockRange range = block_range(table, kMoveSlots<Way>);
  Word* dense = static_cast<Word*>(table.dense[range.segment]);
  Word* compact = static_cast<Word*>(args.compact);
  const int64_t first = range.origin + threadIdx.x;
  PositionOf<Index> position[kUnroll];
  Word held[kUnroll], value[kUnroll];
  bool active[kUnroll];
#pragma unroll
  for (int j = 0; j < kUnroll; ++j) {
    const int64_t slot = first + j * kMoveThreads;
    active[j] = slot >= range.begin && slot < range.end;
    if (!active[j]) continue;
    position[j] = position_at<Index>(args.segments, range.number, slot);
    if (Way != Move::kToCompact) value[j] = compact[slot];
  }
  if (Way != Move::kToDense) {
#pragma unroll
    for (int j = 0; j < kUnroll; ++j) {
      if (active[j]) held[j] = dense[position[j]];
    }
    if (Way == Move::kSwap) __syncthreads();
  }
#pragma unroll
  for (int j = 0; j < kUnroll; ++j) {
    if (!active[j] || (Way == Move::kSwap && held[j] == value[j])) continue;
    if (Way != Move::kToCompact) dense[position[j]] = value[j];
    if (Way != Move::kToDense) compact[first + j * kMoveThreads] = held[j];
  }
}

template <Move Way>
void move(const char* op, const MoveArguments& args, cudaStream_t stream) {
  dispatch_word(args.element_size, [&]<typename Word>() {
    dispatch_index(args.segments.index_type, [&]<typename Index>() {
      for_each_table(args.segments, nullptr, kMoveSlots<Way>,
                     [&]<int Capacity>(const SegmentTable<Capacity>& table, unsigned blocks) {
                       if (blocks == 0) return;
                       move_kernel<Word, Index, Way><<<blocks, kMoveThreads, 0, stream>>>(table, args);
                       check_launch(op);
                     });
    });
  });
}

}  // namespace sparse_opt::cuda
