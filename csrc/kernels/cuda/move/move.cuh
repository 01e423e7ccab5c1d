// The loop of the kernels that move bits between dense[indices] and a compact buffer.
#pragma once

#include "../common/slots.cuh"

namespace sparse_opt::cuda {

// The two are exchanged, or one is written to the other. What a swap would not change is not stored: base weights
// differ from the model's in few bits for much of a run (step.cuh says what a store costs).
enum class Move { kSwap, kToDense, kToCompact };

constexpr int kMoveThreads = 1024;

// Unroll elements of each thread. A block reads all of its elements before it writes the first: swapping 10 % of 2^31
// bf16 on an H200 took 3.0 ms so with 256 threads, 3.4 ms without the barrier.
template <typename Word, typename Index, Move Way, int Unroll, int Capacity>
__global__ void __launch_bounds__(kMoveThreads)
    move_kernel(const __grid_constant__ SegmentTable<Capacity> table, const __grid_constant__ MoveArguments args) {
  constexpr int kUnroll = Unroll;
  const BlockRange range = block_range(table, int64_t{kMoveThreads} * kUnroll);
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

template <Move Way, int Unroll>
void move_by(const char* op, const MoveArguments& args, cudaStream_t stream) {
  dispatch_word(args.element_size, [&]<typename Word>() {
    dispatch_index(args.segments.index_type, [&]<typename Index>() {
      for_each_table(args.segments, nullptr, int64_t{kMoveThreads} * Unroll,
                     [&]<int Capacity>(const SegmentTable<Capacity>& table, unsigned blocks) {
                       if (blocks == 0) return;
                       constexpr auto kKernel = move_kernel<Word, Index, Way, Unroll, Capacity>;
                       if (Way == Move::kSwap && Unroll == 1) prefer_shared_memory<kKernel>();
                       kKernel<<<blocks, kMoveThreads, 0, stream>>>(table, args);
                       check_launch(op);
                     });
    });
  });
}

// Little is held of each element, so that many can be on their way: swapping 10 % of 2^31 bf16 on an H200 took 2.6 ms
// with eight of a thread, 5.2 ms with four of each of 256 threads. Where nothing is read one of a thread is faster, at
// any density, and where elements that are swapped lie far apart too: 2.35 ms at 2.5 % of 3.2 B bf16 where eight take
// 2.66. There the L1 cache only gets in the way: with all of its size 2.53.
template <Move Way>
void move(const char* op, const MoveArguments& args, cudaStream_t stream) {
  if constexpr (Way == Move::kToDense) {
    move_by<Way, 1>(op, args, stream);
  } else if constexpr (Way == Move::kToCompact) {
    move_by<Way, 8>(op, args, stream);
  } else {
    is_scattered(args.segments, args.element_size) ? move_by<Way, 1>(op, args, stream)
                                                   : move_by<Way, 8>(op, args, stream);
  }
}

}  // namespace sparse_opt::cuda
