// delta_encode in one pass. A block processes one tile of both tensors after the other: it compares the tile, collects
// its changes in order in shared memory, and publishes their count. One warp of the grid computes the running sums of
// all counts. The block writes the changes at their sum kEncodeDeferred tiles later, while the next tile is being
// loaded.
//
// Reads both tensors once, 2 * element size bytes per element; writes 4 bytes (8 with wide indices) and the element for
// each change, which is the bandwidth bound. A tile's count and sum, 12 bytes, stay in the L2 cache. If more than a
// quarter of a tile changed, the changed elements of the new tensor are read again.
//
// With decoupled look-back (Merrill and Garland, NVIDIA NVR-2016-002) each tile would add up the counts before it, 32
// at a time, and this chain would limit the bandwidth: an H200 copies 130 tiles of 2 * 16 KiB in a microsecond, which
// requires four dependent reads of counts in that time. (Such a kernel took 1.4 ms there for 2^30 bf16, 1 % of them
// changed, and 1.0 ms without the chain.) Here one warp reads all counts, enough at a time to keep ahead of memory, and
// every block has its next loads in flight before it waits for a sum.
#include <cuda/atomic>

#include "common/block_sum.cuh"
#include "common/dispatch.cuh"
#include "common/segment_table.cuh"
#include "delta_codec.h"

namespace sparse_opt::cuda {
namespace {

// Chosen on an H200: "Tuning tables" in docs/dev/notebook.md. `sparse-opt bench kernels` times delta_encode.
constexpr int kEncodeThreads = 256;
constexpr int kEncodeBlocks = 3;  // on a multiprocessor, 44 KiB of shared memory each
constexpr int kEncodeBlocksUntuned = 2;
constexpr int kEncodeVectors = 4;   // 16-byte vectors of each tensor that a thread has in flight
constexpr int kEncodeDeferred = 2;  // steps between the count of a tile and the write of its changes
constexpr int kEncodeSummed = 8;    // groups of 32 counts that are read at a time

// A tile of a tensor. Warp w compares the vectors [w, w + 1) * 32 * kVectors, each lane every 32nd of them.
template <typename Word>
struct EncodeShape {
  static constexpr int kElements = 16 / sizeof(Word);  // of a vector
  // A thread has one bit for each of its elements.
  static constexpr int kVectors = kEncodeVectors * kElements <= 32 ? kEncodeVectors : 32 / kElements;
  static constexpr uint32_t kElementMask = (1u << kElements) - 1;
  static constexpr int kTile = kEncodeThreads * kVectors * kElements;
  static constexpr int kCapacity = kTile / 4;  // changes of a tile that fit into shared memory
  static constexpr int kWarps = kEncodeThreads / 32;
  static_assert(kTile <= 65536, "positions have 16 bits");

  static __device__ __forceinline__ int vector_of(int j) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    return (warp * kVectors + j) * 32 + lane;
  }
};

// Communication between blocks, in args.progress, which is initially 0. Counts and sums are stored plus 1: 0 means that
// the value is not known yet.
struct DeltaProgress {
  unsigned long long* sampled;  // the changes that delta_sample counted
  uint64_t* total;              // the changes in the tables before this one
  uint64_t* sums;               // [tiles], the changes before each
  uint32_t* counts;             // [tiles]
  uint32_t* turns;              // [tables], the number of assigned turns: one for the sums, one for each tile

  __host__ __device__ DeltaProgress(void* memory, int64_t tiles)
      : sampled(static_cast<unsigned long long*>(memory)),
        total(static_cast<uint64_t*>(memory) + 1),
        sums(total + 1),
        counts(reinterpret_cast<uint32_t*>(sums + tiles)),
        turns(counts + tiles) {}
  static int64_t bytes(int64_t tiles, int64_t tables) { return 16 + 12 * tiles + 4 * tables; }
};

// Accesses to a word that other blocks, or the host, wait for. The word is the whole message, so relaxed order
// suffices.
template <typename T>
__device__ __forceinline__ T load_relaxed(T* at) {
  return ::cuda::atomic_ref<T, ::cuda::thread_scope_device>(*at).load(::cuda::std::memory_order_relaxed);
}
template <::cuda::thread_scope Scope = ::cuda::thread_scope_device, typename T>
__device__ __forceinline__ void store_relaxed(T* at, T value) {
  ::cuda::atomic_ref<T, Scope>(*at).store(value, ::cuda::std::memory_order_relaxed);
}

// Computes the sum of the counts before each of a table's tiles, in order, as the counts are published. Called by one
// whole warp.
__device__ __forceinline__ void sum_counts(uint32_t* counts, uint64_t* sums, int tiles, uint64_t* total) {
  const int lane = threadIdx.x % 32;
  uint64_t before = *total;
  for (int next = 0; next < tiles;) {
    uint32_t found[kEncodeSummed], sum[kEncodeSummed];
    int known[kEncodeSummed];
#pragma unroll
    for (int i = 0; i < kEncodeSummed; ++i) {
      const int tile = next + 32 * i + lane;
      found[i] = tile < tiles ? load_relaxed(counts + tile) : 0;
    }
    bool all = true;
#pragma unroll
    for (int i = 0; i < kEncodeSummed; ++i) {
      const uint32_t missing = ~__ballot_sync(0xffffffffu, found[i] != 0);
      known[i] = !all ? 0 : missing == 0 ? 32 : __ffs(static_cast<int>(missing)) - 1;
      all = all && missing == 0;
      if (lane >= known[i]) found[i] = 1;  // a count of 0
      sum[i] = found[i] - 1;
    }
#pragma unroll
    for (int offset = 1; offset < 32; offset *= 2) {
#pragma unroll
      for (int i = 0; i < kEncodeSummed; ++i) {
        const uint32_t below = __shfl_up_sync(0xffffffffu, sum[i], offset);
        if (lane >= offset) sum[i] += below;
      }
    }
#pragma unroll
    for (int i = 0; i < kEncodeSummed; ++i) {
      if (lane < known[i]) store_relaxed(sums + next + lane, before + sum[i] - (found[i] - 1) + 1);
      before += __shfl_sync(0xffffffffu, sum[i], 31);
      next += known[i];
    }
  }
  if (lane == 0) *total = before;
}

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

// 16 bytes from element `at` on, with 0 past `size`.
template <typename Word>
__device__ __forceinline__ uint4 load_part(const Word* words, int at, int size) {
  uint32_t part[4] = {};
#pragma unroll
  for (int i = 0; i < EncodeShape<Word>::kElements; ++i) {
    const Word word = at + i < size ? words[at + i] : Word{0};
    if constexpr (sizeof(Word) == 8) {
      part[2 * i] = static_cast<uint32_t>(word), part[2 * i + 1] = static_cast<uint32_t>(word >> 32);
    } else {
      constexpr int kPerRegister = 4 / sizeof(Word);
      part[i / kPerRegister] |= static_cast<uint32_t>(word) << (i % kPerRegister * 8 * static_cast<int>(sizeof(Word)));
    }
  }
  return {part[0], part[1], part[2], part[3]};
}

// A thread's part of a tile.
template <typename Word>
struct ThreadTile {
  using Shape = EncodeShape<Word>;
  uint4 old_vectors[Shape::kVectors], new_vectors[Shape::kVectors];

  __device__ __forceinline__ void load(const Word* old_words, const Word* new_words, int size) {
    const bool aligned =
        (reinterpret_cast<uintptr_t>(old_words) | reinterpret_cast<uintptr_t>(new_words)) % sizeof(uint4) == 0;
    if (aligned && size == Shape::kTile) {
      const uint4* a = reinterpret_cast<const uint4*>(old_words) + Shape::vector_of(0);
      const uint4* b = reinterpret_cast<const uint4*>(new_words) + Shape::vector_of(0);
#pragma unroll
      for (int j = 0; j < Shape::kVectors; ++j) {
        old_vectors[j] = __ldcs(a + 32 * j);
        new_vectors[j] = __ldcs(b + 32 * j);
      }
    } else {
#pragma unroll
      for (int j = 0; j < Shape::kVectors; ++j) {
        const int at = Shape::vector_of(j) * Shape::kElements;
        old_vectors[j] = load_part(old_words, at, size);
        new_vectors[j] = load_part(new_words, at, size);
      }
    }
  }

  // Bit j * kElements + i is set if element i of vector j differs.
  __device__ __forceinline__ uint32_t compare() const {
    uint32_t bits = 0;
#pragma unroll
    for (int j = 0; j < Shape::kVectors; ++j) {
      bits |= differing<Word>(old_vectors[j], new_vectors[j]) << (j * Shape::kElements);
    }
    return bits;
  }
};

// The number of the warp's changes before those of each of this thread's vectors, and their total.
template <typename Word>
struct WarpRanks {
  using Shape = EncodeShape<Word>;
  int first[Shape::kVectors];
  int total;

  // Called by the whole warp. One scan for all vectors: each has a field of bits in the scanned number.
  __device__ __forceinline__ explicit WarpRanks(uint32_t bits) {
    constexpr int kField = 32 / Shape::kVectors, kElements = Shape::kElements;
    constexpr uint32_t kFieldMask = static_cast<uint32_t>((uint64_t{1} << kField) - 1);
    static_assert(31 * kElements <= kFieldMask, "31 lanes' changes of a vector fit into a field");
    const int lane = threadIdx.x % 32;
    uint32_t own = 0;
#pragma unroll
    for (int j = 0; j < Shape::kVectors; ++j) {
      own |= static_cast<uint32_t>(__popc(bits >> (j * kElements) & Shape::kElementMask)) << (j * kField % 32);
    }
    uint32_t before = __shfl_up_sync(0xffffffffu, own, 1);
    if (lane == 0) before = 0;
#pragma unroll
    for (int offset = 1; offset < 32; offset *= 2) {
      const uint32_t below = __shfl_up_sync(0xffffffffu, before, offset);
      if (lane >= offset) before += below;
    }
    const uint32_t last_before = __shfl_sync(0xffffffffu, before, 31), last = __shfl_sync(0xffffffffu, own, 31);
    total = 0;
#pragma unroll
    for (int j = 0; j < Shape::kVectors; ++j) {
      const int shift = j * kField % 32;
      first[j] = total + static_cast<int>(before >> shift & kFieldMask);
      total += static_cast<int>((last_before >> shift & kFieldMask) + (last >> shift & kFieldMask));
    }
  }
};

// A tile whose count is published and whose changes are not written yet: its changes in order, or, if they are more
// than kCapacity, its bits.
template <typename Word>
struct EncodeSlot {
  using Shape = EncodeShape<Word>;
  Word values[Shape::kCapacity];
  uint32_t bits[kEncodeThreads];
  int warp_first[Shape::kWarps];  // changes before each warp's
  uint16_t positions[Shape::kCapacity];
  int tile, segment, total;

  // Stores this thread's changes, whose ranks follow from `ranks` and `before`, at their rank minus `low`. With Some,
  // only those of ranks [low, low + kCapacity).
  template <bool Some>
  __device__ __forceinline__ void keep(uint32_t changed, const WarpRanks<Word>& ranks, int before, int low,
                                       const Word* new_words) {
#pragma unroll
    for (int j = 0; j < Shape::kVectors; ++j) {
      const int first = Shape::vector_of(j) * Shape::kElements;
      int rank = before + ranks.first[j] - low;
      for (uint32_t rest = changed >> (j * Shape::kElements) & Shape::kElementMask; rest != 0; rest &= rest - 1) {
        const int position = first + __ffs(static_cast<int>(rest)) - 1;
        if (!Some || static_cast<unsigned>(rank) < static_cast<unsigned>(Shape::kCapacity)) {
          positions[rank] = static_cast<uint16_t>(position);
          values[rank] = new_words[position];
        }
        ++rank;
      }
    }
  }

  // Writes the first `count` stored changes of a tile that begins at element `begin` to the results from `at` on. Warps
  // begin at multiples of 32 results, so that their stores fill sectors.
  template <typename Index>
  __device__ __forceinline__ void write(const DeltaArguments& args, int64_t begin, int64_t at, int count) const {
    const Index first = static_cast<Index>(begin);
    Index* to_indices = static_cast<Index*>(args.indices) + at;
    Word* to_values = static_cast<Word*>(args.values) + at;
    for (int k = static_cast<int>(threadIdx.x) - static_cast<int>(at % 32); k < count; k += kEncodeThreads) {
      if (k < 0) continue;
      __stcs(to_indices + k, first + static_cast<Index>(positions[k]));
      __stcs(to_values + k, values[k]);
    }
  }

  // Writes all changes of a tile whose bits were kept, kCapacity at a time. Called by the whole block.
  template <typename Index>
  __device__ __forceinline__ void write_by_bits(const DeltaArguments& args, int64_t begin, int64_t at,
                                                const Word* new_words) {
    const uint32_t own = bits[threadIdx.x];
    const WarpRanks<Word> ranks(own);
    for (int low = 0; low < total; low += Shape::kCapacity) {
      keep<true>(own, ranks, warp_first[threadIdx.x / 32], low, new_words);
      __syncthreads();
      write<Index>(args, begin, at + low, min(total - low, Shape::kCapacity));
      __syncthreads();
    }
  }
};

// The first turn of a table is not a tile: the block that takes it computes the sums. Turns are taken by running
// blocks, so neither the sums nor any tile waits for a block that has not started.
template <typename Word, typename Index, int Capacity>
__global__ void __launch_bounds__(kEncodeThreads, kEncodeBlocks)
    delta_encode_kernel(const __grid_constant__ SegmentTable<Capacity> table,
                        const __grid_constant__ DeltaArguments args, int64_t all_tiles) {
  using Shape = EncodeShape<Word>;
  __shared__ EncodeSlot<Word> slots[kEncodeDeferred + 1];
  __shared__ uint4 new_vectors[Shape::kTile / Shape::kElements];  // frees the registers for the next tile's loads
  __shared__ int warp_counts[Shape::kWarps];
  __shared__ int shared_turns[2];
  __shared__ uint64_t shared_before;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const DeltaProgress progress(args.progress, all_tiles);
  if (args.speculative && static_cast<int64_t>(*progress.sampled) * args.sample_stride > args.capacity) return;
  uint32_t* counts = progress.counts + table.block_offset;
  uint64_t* sums = progress.sums + table.block_offset;
  uint32_t* turns = progress.turns + table.segment_offset / Capacity;
  const int tiles = table.first_block[table.count];

  // Thread 0 requests turns and sums one step before they are needed.
  uint32_t turn = 0;
  uint64_t sum = 0;
  if (threadIdx.x == 0) {
    shared_turns[0] = static_cast<int>(atomicAdd(turns, 1u));
    if (shared_turns[0] != 0) {
      shared_turns[1] = static_cast<int>(atomicAdd(turns, 1u));
      turn = atomicAdd(turns, 1u);
    }
  }
  __syncthreads();
  int tile = shared_turns[0] - 1, next = shared_turns[1] - 1;
  __syncthreads();
  if (tile < 0) {
    if (warp == 0) sum_counts(counts, sums, tiles, progress.total);
    return;
  }

  int segment = 0;
  ThreadTile<Word> held;
  const auto load = [&](int which) {
    const BlockRange range = block_range(table, Shape::kTile, which);
    segment = range.segment;
    held.load(static_cast<const Word*>(table.companions[segment]) + range.begin,
              static_cast<const Word*>(table.dense[segment]) + range.begin, static_cast<int>(range.end - range.begin));
  };
  if (tile < tiles) load(tile);
  int found = 0;  // the number of this block's tiles so far
  for (int step = 0;; ++step) {
    // Shared variables are written on one side of a barrier and read on the other. The slot that is filled here was
    // read by the previous step, before this step's first barrier.
    int after_next = tiles;
    if (tile < tiles) {
      ++found;
      EncodeSlot<Word>& slot = slots[step % (kEncodeDeferred + 1)];
      const int of = segment;
      const uint32_t bits = held.compare();
#pragma unroll
      for (int j = 0; j < Shape::kVectors; ++j) new_vectors[Shape::vector_of(j)] = held.new_vectors[j];
      if (next < tiles) load(next);
      const WarpRanks<Word> ranks(bits);
      if (threadIdx.x % 32 == 0) warp_counts[warp] = ranks.total;
      if (threadIdx.x == 0) shared_turns[0] = static_cast<int>(turn);
      __syncthreads();
      int before = 0, total = 0;
#pragma unroll
      for (int other = 0; other < Shape::kWarps; ++other) {
        before += other < warp ? warp_counts[other] : 0;
        total += warp_counts[other];
      }
      if (threadIdx.x == 0) {
        store_relaxed(counts + tile, static_cast<uint32_t>(total) + 1);
        slot.tile = tile;
        slot.segment = of;
        slot.total = total;
        turn = atomicAdd(turns, 1u);
      }
      if (total > Shape::kCapacity) {
        slot.bits[threadIdx.x] = bits;
        if (threadIdx.x % 32 == 0) slot.warp_first[warp] = before;
      } else {
        slot.template keep<false>(bits, ranks, before, 0, reinterpret_cast<const Word*>(new_vectors));
      }
      after_next = shared_turns[0] - 1;
    } else {
      __syncthreads();
    }
    tile = next;
    next = after_next;

    const int due = step - kEncodeDeferred;
    const bool has_due = due >= 0 && due < found;
    EncodeSlot<Word>& slot = slots[(step + 1) % (kEncodeDeferred + 1)];
    if (has_due && threadIdx.x == 0) {
      while (sum == 0) sum = load_relaxed(sums + slot.tile);
      shared_before = sum - 1;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      const bool soon = kEncodeDeferred > 1 && due + 1 >= 0 && due + 1 < found;
      sum = soon ? load_relaxed(sums + slots[(step + 2) % (kEncodeDeferred + 1)].tile) : 0;
    }
    if (has_due) {
      const auto at = static_cast<int64_t>(shared_before);
      const int total = slot.total, from = slot.segment;
      const int64_t begin = int64_t{slot.tile - table.first_block[from]} * Shape::kTile;
      if (threadIdx.x == 0 && slot.tile + 1 == table.first_block[from + 1]) {
        store_relaxed<::cuda::thread_scope_system>(args.bounds + table.segment_offset + from, at + total);
      }
      if (at + total > args.capacity) {
        // Nothing is written: the caller sees the total in args.bounds, and encodes again.
      } else if (total > Shape::kCapacity) {
        slot.template write_by_bits<Index>(args, begin, at, static_cast<const Word*>(table.dense[from]) + begin);
      } else {
        slot.template write<Index>(args, begin, at, total);
      }
    }
    if (tile >= tiles && due + 1 >= found) return;
  }
}

// The number of changes in every args.sample_stride-th block of kDeltaBlock elements, by which the caller allocates, or
// delta_encode finds that a speculative capacity is too low.
template <typename Word, int Capacity>
__global__ void __launch_bounds__(kEncodeThreads)
    delta_sample_kernel(const __grid_constant__ SegmentTable<Capacity> table,
                        const __grid_constant__ DeltaArguments args) {
  const BlockRange range = block_range(table, kDeltaBlock, static_cast<int>(blockIdx.x * args.sample_stride));
  const Word* old_words = static_cast<const Word*>(table.companions[range.segment]);
  const Word* new_words = static_cast<const Word*>(table.dense[range.segment]);
  int changed = 0;
  for (int64_t begin = range.begin; begin < range.end; begin += EncodeShape<Word>::kTile) {
    ThreadTile<Word> tile;
    tile.load(old_words + begin, new_words + begin,
              static_cast<int>(min(int64_t{EncodeShape<Word>::kTile}, range.end - begin)));
    changed += __popc(tile.compare());
  }
  const int total = block_sum_in_first_thread<kEncodeThreads>(changed);
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
      delta_sample_kernel<Word><<<sampled, kEncodeThreads, 0, stream>>>(table, rest);
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

}  // namespace sparse_opt::cuda
