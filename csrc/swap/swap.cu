// Bytes per active element of a swap: index 2 or 4, or 4 a run, the compact element read and written; and 64 read and
// 64 written for each 64-byte granule of the dense tensors that the mask touches. Elements that are equal in both are
// not written.
#include "swap.h"

#include "common/rounding.h"
#include "common/slots.cuh"

namespace sparse_opt::cuda {
namespace {

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
bool is_scattered(const MoveArguments& args) {
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

// indexed_replace_. Bytes per active element: the two compact elements, and the index, 2, 4 or 8, or 4 or 8 a run, of
// those that change; and 64 written for each 64-byte granule of the dense tensors in which an element changes.

// The elements of one of the compact buffers, in one of the members. No instruction waits for them before rounded().
template <typename Layout, typename Dense>
struct Compact {
  typename Layout::template Held<Dense> own;
  typename Layout::template Held<float> wide;

  // The branch is the same for a whole launch.
  __device__ __forceinline__ void load(const Layout& slots, const void* compact, bool is_wide) {
    if (is_wide) {
      wide = slots.load_compact(static_cast<const float*>(compact));
    } else {
      own = slots.load_compact(static_cast<const Dense*>(compact));
    }
  }
  __device__ __forceinline__ Dense rounded(int j, bool is_wide) const {
    return is_wide ? from_float<Dense>(wide[j]) : own[j];
  }
};

template <typename Layout, typename Dense, int Capacity>
__global__ void __launch_bounds__(Layout::kThreads, Layout::kBlocks)
    indexed_replace_kernel(const __grid_constant__ SegmentTable<Capacity> table,
                           const __grid_constant__ ReplaceArguments args) {
  constexpr int kUnroll = Layout::kUnroll;
  constexpr bool kNarrow = sizeof(Dense) < sizeof(float);
  const bool wide_before = kNarrow && args.before_dtype == DType::kFloat32;
  const bool wide_after = kNarrow && args.after_dtype == DType::kFloat32;
  const BlockRange range = block_range(table, Layout::kThreads * kUnroll);
  Layout slots;
  slots.find(args.segments, range);
  Compact<Layout, Dense> before, after;
  before.load(slots, args.before, wide_before);
  after.load(slots, args.after, wide_after);
  Dense values[kUnroll];
  bool changed[kUnroll];
#pragma unroll
  for (int j = 0; j < kUnroll; ++j) {
    values[j] = after.rounded(j, wide_after);
    changed[j] = slots.active(j) && !same_bits(values[j], before.rounded(j, wide_before));
  }
  slots.store_dense(static_cast<Dense*>(table.dense[range.segment]), values, changed);
}

}  // namespace

void indexed_swap(const MoveArguments& args, cudaStream_t stream) {
  move<Move::kSwap>("indexed_swap_", args, stream);
}

void indexed_take(const MoveArguments& args, cudaStream_t stream) {
  move<Move::kToCompact>("indexed_take_", args, stream);
}

void delta_apply(const MoveArguments& args, cudaStream_t stream) {
  move<Move::kToDense>("delta_apply_", args, stream);
}

// The elements of a thread that moves vectors of single elements. On an H100 eight took 0.258 ms where four took 0.336.
constexpr int kReplaceUnroll = 8;

void indexed_replace(const ReplaceArguments& args, cudaStream_t stream) {
  const auto fits = [&](int unroll) {
    return fits_vectors(args.before, element_size(args.before_dtype), unroll) &&
           fits_vectors(args.after, element_size(args.after_dtype), unroll);
  };
  dispatch_dtype(args.dense_dtype, [&]<typename Dense>() {
    const auto launch = [&]<typename Layout>() {
      for_each_table(args.segments, nullptr, int64_t{Layout::kThreads} * Layout::kUnroll,
                     [&]<int Capacity>(const SegmentTable<Capacity>& table, unsigned blocks) {
                       if (blocks == 0) return;
                       constexpr auto kKernel = indexed_replace_kernel<Layout, Dense, Capacity>;
                       kKernel<<<blocks, Layout::kThreads, 0, stream>>>(table, args);
                       check_launch("indexed_replace_");
                     });
    };
    if (fits(kReplaceUnroll) && has_element_vectors(args.segments, kReplaceUnroll)) {
      dispatch_index(args.segments.index_type, [&]<typename Index>() {
        launch.template operator()<ElementVectors<Index, 128, kReplaceUnroll>>();
      });
    } else {
      dispatch_layout(args.segments, fits(kUnroll) && has_runs_of_vectors(args.segments), launch);
    }
  });
}

}  // namespace sparse_opt::cuda
