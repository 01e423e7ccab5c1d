// One pass: a block compares its elements, learns from the blocks before it how many changes they found, and writes its
// own behind theirs. Both tensors are read once, 2 * element size bytes per element, which is the floor, and 4 bytes (8
// with wide indices) and the element are written for each change, coalesced: positions are put in order in shared memory
// first. Writing them from where they are found doubles the time at 10 %.
//
// The running sum is Merrill and Garland's decoupled look-back ("Single-pass parallel prefix scan with decoupled
// look-back", NVIDIA NVR-2016-002). As in CUB's scan, a block waits for blocks of lower index only, which the hardware
// starts first.
#include <type_traits>
#include <vector>

#include "kernels.h"
#include "move.cuh"

namespace sparse_opt::cuda {
namespace {

constexpr int kWarps = kThreads / 32;

// Bit k is set if element k of 16 bytes differs.
template <typename Word>
__device__ __forceinline__ uint32_t differing(const uint4& a, const uint4& b) {
  const uint32_t x[4] = {a.x ^ b.x, a.y ^ b.y, a.z ^ b.z, a.w ^ b.w};
  uint32_t bits = 0;
  if constexpr (sizeof(Word) == 8) {
    bits = ((x[0] | x[1]) != 0 ? 1u : 0u) | ((x[2] | x[3]) != 0 ? 2u : 0u);
  } else {
    constexpr int kPerRegister = 4 / sizeof(Word);
    constexpr uint32_t kMask = sizeof(Word) == 4 ? 0xffffffffu : (1u << (8 * sizeof(Word) % 32)) - 1u;
#pragma unroll
    for (int i = 0; i < 4 * kPerRegister; ++i) {
      const uint32_t word = x[i / kPerRegister] >> (i % kPerRegister * 8 * static_cast<int>(sizeof(Word)));
      if ((word & kMask) != 0) bits |= 1u << i;
    }
  }
  return bits;
}

// Each thread compares a whole number of 16-byte vectors that fills a byte of the bitmap (two for 1-byte elements).
template <typename Word>
struct CompareShape {
  using Bits = std::conditional_t<sizeof(Word) == 1, uint16_t, uint8_t>;
  static constexpr int kElements = 8 * sizeof(Bits);
  static constexpr int kVectors = kElements * sizeof(Word) / 16;
  static constexpr int kPasses = kDeltaBlock / (kThreads * kElements);
  // Passes whose loads are in flight together: 64 bytes of each tensor.
  static constexpr int kTogether = kPasses * kVectors <= 4 ? kPasses : 4 / kVectors;
};

// The new tensor's elements stay in the caches: those that changed are read again, when their number is known.
template <typename Word>
__device__ __forceinline__ void compare_full_block(const Word* old_words, const Word* new_words,
                                                   typename CompareShape<Word>::Bits* changed) {
  using Shape = CompareShape<Word>;
  const uint4* a = reinterpret_cast<const uint4*>(old_words);
  const uint4* b = reinterpret_cast<const uint4*>(new_words);
#pragma unroll 1
  for (int pass = 0; pass < Shape::kPasses; pass += Shape::kTogether) {
    uint4 x[Shape::kTogether][Shape::kVectors], y[Shape::kTogether][Shape::kVectors];
#pragma unroll
    for (int i = 0; i < Shape::kTogether; ++i) {
#pragma unroll
      for (int j = 0; j < Shape::kVectors; ++j) {
        const int at = ((pass + i) * kThreads + static_cast<int>(threadIdx.x)) * Shape::kVectors + j;
        x[i][j] = __ldcs(a + at);
        y[i][j] = b[at];
      }
    }
#pragma unroll
    for (int i = 0; i < Shape::kTogether; ++i) {
      uint32_t bits = 0;
#pragma unroll
      for (int j = 0; j < Shape::kVectors; ++j) {
        bits |= differing<Word>(x[i][j], y[i][j]) << (j * 16 / static_cast<int>(sizeof(Word)));
      }
      changed[(pass + i) * kThreads + threadIdx.x] = static_cast<typename Shape::Bits>(bits);
    }
  }
}

// A tensor's last block, and views that are not aligned to 16 bytes.
template <typename Word>
__device__ __forceinline__ void compare_any_block(const Word* old_words, const Word* new_words, int size,
                                                  typename CompareShape<Word>::Bits* changed) {
  using Shape = CompareShape<Word>;
  for (int group = threadIdx.x; group < kDeltaBlock / Shape::kElements; group += kThreads) {
    uint32_t bits = 0;
    for (int k = 0; k < Shape::kElements; ++k) {
      const int at = group * Shape::kElements + k;
      if (at < size && old_words[at] != new_words[at]) bits |= 1u << k;
    }
    changed[group] = static_cast<typename Shape::Bits>(bits);
  }
}

// One bit for each element of the block, element k at bit k % 32 of word k / 32.
struct ChangedBits {
  uint32_t words[kDeltaBlock / 32];

  template <typename Word>
  __device__ __forceinline__ void compare(const Word* old_words, const Word* new_words, int size) {
    auto* bits = reinterpret_cast<typename CompareShape<Word>::Bits*>(words);
    const bool aligned =
        (reinterpret_cast<uintptr_t>(old_words) | reinterpret_cast<uintptr_t>(new_words)) % sizeof(uint4) == 0;
    if (aligned && size == kDeltaBlock) {
      compare_full_block(old_words, new_words, bits);
    } else {
      compare_any_block(old_words, new_words, size, bits);
    }
    __syncthreads();
  }
};

// What a block has told the later ones, in one word that is written at once: the number of its own changes, or of all
// changes up to its last. 0 is nothing yet.
constexpr uint64_t kOwn = uint64_t{1} << 62, kRunning = uint64_t{2} << 62, kCount = kOwn - 1;

// The number of changes before `block`. Called by one whole warp; every lane gets it.
__device__ __forceinline__ uint64_t changes_before(const volatile uint64_t* progress, int64_t block) {
  const int lane = threadIdx.x % 32;
  uint64_t before = 0;
  for (int64_t nearest = block - 1;; nearest -= 32) {
    const int64_t looked_at = nearest - lane;
    uint64_t found = looked_at < 0 ? kRunning : 0;
    do {
      if (found == 0) found = progress[looked_at];
    } while (__any_sync(0xffffffffu, found == 0));
    const uint32_t running = __ballot_sync(0xffffffffu, (found & kRunning) != 0);
    const int last = running == 0 ? 31 : __ffs(static_cast<int>(running)) - 1;
    uint64_t count = lane <= last ? found & kCount : 0;
    for (int offset = 16; offset > 0; offset /= 2) count += __shfl_xor_sync(0xffffffffu, count, offset);
    before += count;
    if (running != 0) return before;
  }
}

constexpr int kHeld = 4;  // changes of one thread whose values are on their way while the block waits for its turn

template <typename Word, typename Index, int Capacity>
__global__ void __launch_bounds__(kThreads) delta_encode_kernel(const __grid_constant__ SegmentTable<Capacity> table,
                                                                const __grid_constant__ DeltaArguments args) {
  static_assert(kThreads * 32 == kDeltaBlock, "one word of the bitmap for each thread");
  __shared__ ChangedBits changed;
  __shared__ uint16_t positions[kDeltaBlock];
  __shared__ int warp_counts[kWarps];
  __shared__ uint64_t shared_before;
  const BlockRange range = block_range(table, kDeltaBlock);
  const int64_t block = table.block_offset + blockIdx.x;
  const Word* new_words = static_cast<const Word*>(table.dense[range.segment]) + range.begin;
  changed.compare(static_cast<const Word*>(table.companions[range.segment]) + range.begin, new_words,
                  static_cast<int>(range.end - range.begin));

  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  uint32_t bits = changed.words[threadIdx.x];
  const int count = __popc(bits);
  int rank = count;  // inclusive over the warp, then exclusive over the block
  for (int offset = 1; offset < 32; offset *= 2) {
    const int below = __shfl_up_sync(0xffffffffu, rank, offset);
    if (lane >= offset) rank += below;
  }
  if (lane == 31) warp_counts[warp] = rank;
  __syncthreads();
  rank -= count;
  int total = 0;
#pragma unroll
  for (int other = 0; other < kWarps; ++other) {
    rank += other < warp ? warp_counts[other] : 0;
    total += warp_counts[other];
  }
  volatile uint64_t* progress = args.progress;
  if (threadIdx.x == 0) progress[block] = (block == 0 ? kRunning : kOwn) | static_cast<uint64_t>(total);
  for (; bits != 0; bits &= bits - 1) {
    positions[rank++] = static_cast<uint16_t>(threadIdx.x * 32 + __ffs(static_cast<int>(bits)) - 1);
  }
  __syncthreads();

  Word held[kHeld];
#pragma unroll
  for (int j = 0; j < kHeld; ++j) {
    const int k = j * kThreads + static_cast<int>(threadIdx.x);
    if (k < total) held[j] = new_words[positions[k]];
  }
  if (warp == 0) {
    const uint64_t before = block == 0 ? 0 : changes_before(progress, block);
    if (lane == 0) {
      const uint64_t until = before + static_cast<uint64_t>(total);
      if (block != 0) progress[block] = kRunning | until;
      if (static_cast<int>(blockIdx.x) + 1 == table.first_block[range.segment + 1]) {
        args.bounds[table.segment_offset + range.segment] = static_cast<int64_t>(until);
      }
      shared_before = before;
    }
  }
  __syncthreads();
  const auto before = static_cast<int64_t>(shared_before);
  if (before + total > args.room) return;  // the caller sees the sum of all, and calls again

  Index* indices = static_cast<Index*>(args.indices) + before;
  Word* values = static_cast<Word*>(args.values) + before;
#pragma unroll
  for (int j = 0; j < kHeld; ++j) {
    const int k = j * kThreads + static_cast<int>(threadIdx.x);
    if (k >= total) continue;
    __stcs(indices + k, static_cast<Index>(range.begin + positions[k]));
    __stcs(values + k, held[j]);
  }
  for (int k = kHeld * kThreads + static_cast<int>(threadIdx.x); k < total; k += kThreads) {
    __stcs(indices + k, static_cast<Index>(range.begin + positions[k]));
    __stcs(values + k, new_words[positions[k]]);
  }
}

// Adds up the changes of every args.sample_stride-th block.
template <typename Word, int Capacity>
__global__ void __launch_bounds__(kThreads) delta_sample_kernel(const __grid_constant__ SegmentTable<Capacity> table,
                                                                const __grid_constant__ DeltaArguments args) {
  __shared__ ChangedBits changed;
  const BlockRange range = block_range(table, kDeltaBlock, static_cast<int>(blockIdx.x * args.sample_stride));
  changed.compare(static_cast<const Word*>(table.companions[range.segment]) + range.begin,
                  static_cast<const Word*>(table.dense[range.segment]) + range.begin,
                  static_cast<int>(range.end - range.begin));
  const int count = __reduce_add_sync(0xffffffffu, __popc(changed.words[threadIdx.x]));
  if (threadIdx.x % 32 == 0 && count != 0) {
    atomicAdd(reinterpret_cast<unsigned long long*>(args.sampled), static_cast<unsigned long long>(count));
  }
}

// A tensor is one segment from its first element to its last.
template <typename Launch>
void for_each_delta_table(const DeltaArguments& args, Launch launch) {
  const std::vector<int64_t> starts(args.count, 0);
  Segments whole;
  whole.count = args.count;
  whole.dense = args.new_tensors;
  whole.starts = starts.data();
  whole.ends = args.numels;
  for_each_table(whole, args.old_tensors, kDeltaBlock, launch);
}

}  // namespace

void delta_sample(const DeltaArguments& args, cudaStream_t stream) {
  dispatch_word(args.element_size, [&]<typename Word>() {
    for_each_delta_table(args, [&]<int Capacity>(const SegmentTable<Capacity>& table, unsigned blocks) {
      if (blocks == 0) return;
      const auto sampled = static_cast<unsigned>((blocks + args.sample_stride - 1) / args.sample_stride);
      delta_sample_kernel<Word><<<sampled, kThreads, 0, stream>>>(table, args);
      check_launch("delta_encode");
    });
  });
}

void delta_encode(const DeltaArguments& args, cudaStream_t stream) {
  dispatch_word(args.element_size, [&]<typename Word>() {
    dispatch_index(args.wide_indices, [&]<typename Index>() {
      for_each_delta_table(args, [&]<int Capacity>(const SegmentTable<Capacity>& table, unsigned blocks) {
        if (blocks == 0) return;
        delta_encode_kernel<Word, Index><<<blocks, kThreads, 0, stream>>>(table, args);
        check_launch("delta_encode");
      });
    });
  });
}

void delta_apply(const MoveArguments& args, cudaStream_t stream) {
  move<false>("delta_apply_", args, stream);
}

}  // namespace sparse_opt::cuda
