// The kernel that moves bits between dense[indices] and a compact buffer.
#pragma once

#include "common/slots.cuh"
#include "swap.h"

namespace sparse_opt::cuda {

// Exchanges the two, or writes one to the other. A swap does not store elements that are equal in both: base weights
// differ from the model's in few bits for much of a run (step.cuh has the cost of a store).
enum class Move { kSwap, kToDense, kToCompact };

constexpr int kMoveThreads = 1024;

// Each thread moves Unroll elements. A block reads all of its elements before it writes the first (the lab notebook,
// "Tuning tables").
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

// Whether active elements are single elements, and each has 32 bytes or more of the dense tensors. Fewer of them in
// flight are faster then, because the writes to neighbouring elements leave the caches together (docs/dev/notebook.md).
inline bool is_scattered(const MoveArguments& args) {
  int64_t active = 0;
  for (int64_t i = 0; i < args.segments.count; ++i) active += args.segments.ends[i] - args.segments.starts[i];
  return args.segments.run_length == 1 && args.segments.numel * args.element_size >= 32 * active;
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

// An element needs few registers, so a thread can have eight in flight. One is faster on an H200 if the dense elements
// are only written, and if they are scattered, where a small L1 cache is faster too: "Tuning tables" in
// docs/dev/notebook.md. `sparse-opt bench kernels` times the swaps.
template <Move Way>
void move(const char* op, const MoveArguments& args, cudaStream_t stream) {
  if constexpr (Way == Move::kToDense) {
    move_by<Way, 1>(op, args, stream);
  } else if constexpr (Way == Move::kToCompact) {
    move_by<Way, 8>(op, args, stream);
  } else {
    has_tuned_sizes() && is_scattered(args) ? move_by<Way, 1>(op, args, stream) : move_by<Way, 8>(op, args, stream);
  }
}

}  // namespace sparse_opt::cuda
