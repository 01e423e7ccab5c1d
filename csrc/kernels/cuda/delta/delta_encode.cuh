// delta_encode in one pass. A block takes one tile of both tensors after the other, puts a tile's changes in order in
// shared memory and says how many they are. One warp of the grid adds these counts up, in order. The block writes the
// changes to where they belong some tiles later, while the tile that follows is on its way from memory.
//
// Read are both tensors once, 2 * element size bytes per element; written are 4 bytes (8 with wide indices) and the
// element for each change. That is the floor; a tile's count and its sum, 12 bytes, stay in the L2 cache. Only of a
// tile of which more than a quarter changed the new tensor is read again, where it changed.
//
// With decoupled look-back (Merrill and Garland, NVIDIA NVR-2016-002) each tile would add up the counts before it, 32
// to a reading, and memory would wait for that chain: the copy rate of an H200 is 130 tiles of 2 * 16 KiB in a
// microsecond, four readings that wait for each other. (A kernel that did so took 1.4 ms there for 2^30 bf16 of which
// 1 % changed, and 1.0 ms without the chain.) Here one warp reads all counts, as many at a time as keep it ahead of
// memory, and no block waits for a sum before its next loads are in flight.
#pragma once

#include <cuda/atomic>

#include "compare.cuh"

namespace sparse_opt::cuda {

// On an H200, 2^30 bf16 of which 1, 2.5 and 10 % changed, the sample and all, in ms: 1.03, 1.06, 1.19 (98.8, 98.6 and
// 97.3 % of the copy rate); with four blocks to a multiprocessor 1.04, 1.07, 1.19; with half the vectors in flight and
// five blocks 1.17, 1.19, 1.29; with one turn between a tile's count and its writing 1.23, 1.23, 1.29.
constexpr int kEncodeThreads = 256;
constexpr int kEncodeBlocks = 3;    // that a multiprocessor holds
constexpr int kEncodeVectors = 4;   // of 16 bytes, of each tensor, in flight for a thread
constexpr int kEncodeDeferred = 2;  // turns between a tile's count and its writing
constexpr int kEncodeSummed = 8;    // times 32 counts that are read at a time

// A tile of a tensor. Warp w has the vectors [w, w + 1) * 32 * kVectors, a lane every 32nd of them.
template <typename Word>
struct EncodeShape {
  static constexpr int kElements = 16 / sizeof(Word);  // of a vector
  // A thread has one bit for each of its elements.
  static constexpr int kVectors = kEncodeVectors * kElements <= 32 ? kEncodeVectors : 32 / kElements;
  static constexpr uint32_t kElementMask = (1u << kElements) - 1;
  static constexpr int kTile = kEncodeThreads * kVectors * kElements;
  static constexpr int kRoom = kTile / 4;  // changes that are kept of a tile
  static constexpr int kWarps = kEncodeThreads / 32;
  static_assert(kTile <= 65536, "positions have 16 bits");

  static __device__ __forceinline__ int vector_of(int j) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    return (warp * kVectors + j) * 32 + lane;
  }
};

// What blocks tell each other, within args.progress, which is 0 at first. Counts and sums are 1 more than they say; 0
// is nothing yet.
struct DeltaProgress {
  unsigned long long* sampled;  // the changes that delta_sample has seen
  uint64_t* total;              // of the tables that are done
  uint64_t* sums;               // [tiles], the changes before each
  uint32_t* counts;             // [tiles]
  uint32_t* turns;              // [tables], how many blocks and tiles of the table have been handed out

  __host__ __device__ DeltaProgress(void* memory, int64_t tiles)
      : sampled(static_cast<unsigned long long*>(memory)),
        total(static_cast<uint64_t*>(memory) + 1),
        sums(total + 1),
        counts(reinterpret_cast<uint32_t*>(sums + tiles)),
        turns(counts + tiles) {}
  static int64_t bytes(int64_t tiles, int64_t tables) { return 16 + 12 * tiles + 4 * tables; }
};

// One word that others wait for, and that nothing else goes with: no order is asked for.
template <typename T>
__device__ __forceinline__ T look(T* at) {
  return ::cuda::atomic_ref<T, ::cuda::thread_scope_device>(*at).load(::cuda::std::memory_order_relaxed);
}
template <::cuda::thread_scope Scope = ::cuda::thread_scope_device, typename T>
__device__ __forceinline__ void tell(T* at, T value) {
  ::cuda::atomic_ref<T, Scope>(*at).store(value, ::cuda::std::memory_order_relaxed);
}

// The sums before each of a table's tiles, in order, as their counts come in. Called by one whole warp.
__device__ __forceinline__ void sum_counts(uint32_t* counts, uint64_t* sums, int tiles, uint64_t* total) {
  const int lane = threadIdx.x % 32;
  uint64_t before = *total;
  for (int next = 0; next < tiles;) {
    uint32_t found[kEncodeSummed], sum[kEncodeSummed];
    int known[kEncodeSummed];
#pragma unroll
    for (int i = 0; i < kEncodeSummed; ++i) {
      const int tile = next + 32 * i + lane;
      found[i] = tile < tiles ? look(counts + tile) : 0;
    }
    bool all = true;
#pragma unroll
    for (int i = 0; i < kEncodeSummed; ++i) {
      const uint32_t missing = ~__ballot_sync(0xffffffffu, found[i] != 0);
      known[i] = !all ? 0 : missing == 0 ? 32 : __ffs(static_cast<int>(missing)) - 1;
      all = all && missing == 0;
      if (lane >= known[i]) found[i] = 1;  // nothing
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
      if (lane < known[i]) tell(sums + next + lane, before + sum[i] - (found[i] - 1) + 1);
      before += __shfl_sync(0xffffffffu, sum[i], 31);
      next += known[i];
    }
  }
  if (lane == 0) *total = before;
}

// 16 bytes from element `at` on, 0 for what is past `size`.
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

// The part of a tile that a thread compares.
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

// How many of a warp's changes come before those of each of a thread's vectors, and how many there are.
template <typename Word>
struct WarpRanks {
  using Shape = EncodeShape<Word>;
  int first[Shape::kVectors];
  int total;

  // Called by the whole warp. One scan for all vectors, each of which has a field of the sum.
  __device__ __forceinline__ explicit WarpRanks(uint32_t bits) {
    constexpr int kField = 32 / Shape::kVectors, kElements = Shape::kElements;
    constexpr uint32_t kFieldMask = static_cast<uint32_t>((uint64_t{1} << kField) - 1);
    static_assert(31 * kElements <= kFieldMask, "31 lanes' changes of a vector fit a field");
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

// A tile between its count and its writing: its changes in order, or, where they are too many, its bits.
template <typename Word>
struct EncodeSlot {
  using Shape = EncodeShape<Word>;
  Word values[Shape::kRoom];
  uint32_t bits[kEncodeThreads];
  int warp_first[Shape::kWarps];  // changes before each warp's
  uint16_t positions[Shape::kRoom];
  int tile, segment, total;

  // Keeps this thread's changes, of which `ranks` and `before` say where they come, from rank `low` on, as far as there
  // is room.
  template <bool Some>
  __device__ __forceinline__ void keep(uint32_t changed, const WarpRanks<Word>& ranks, int before, int low,
                                       const Word* new_words) {
#pragma unroll
    for (int j = 0; j < Shape::kVectors; ++j) {
      const int first = Shape::vector_of(j) * Shape::kElements;
      int rank = before + ranks.first[j] - low;
      for (uint32_t rest = changed >> (j * Shape::kElements) & Shape::kElementMask; rest != 0; rest &= rest - 1) {
        const int position = first + __ffs(static_cast<int>(rest)) - 1;
        if (!Some || static_cast<unsigned>(rank) < static_cast<unsigned>(Shape::kRoom)) {
          positions[rank] = static_cast<uint16_t>(position);
          values[rank] = new_words[position];
        }
        ++rank;
      }
    }
  }

  // The first `count` changes that are kept, of a tile that begins at element `begin`, to results[at] on. Threads begin
  // at a multiple of 32 of the results, so that a warp's stores fill sectors.
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

  // All changes of a tile that keeps its bits, part by part. Called by the whole block.
  template <typename Index>
  __device__ __forceinline__ void write_by_bits(const DeltaArguments& args, int64_t begin, int64_t at,
                                                const Word* new_words) {
    const uint32_t own = bits[threadIdx.x];
    const WarpRanks<Word> ranks(own);
    for (int low = 0; low < total; low += Shape::kRoom) {
      keep<true>(own, ranks, warp_first[threadIdx.x / 32], low, new_words);
      __syncthreads();
      write<Index>(args, begin, at + low, min(total - low, Shape::kRoom));
      __syncthreads();
    }
  }
};

// The first turn of a table is not a tile's: the block that takes it adds up the counts. It runs then, as do all blocks
// that have a tile, so that every wait ends, whatever blocks have yet to start.
template <typename Word, typename Index, int Capacity>
__global__ void __launch_bounds__(kEncodeThreads, kEncodeBlocks)
    delta_encode_kernel(const __grid_constant__ SegmentTable<Capacity> table,
                        const __grid_constant__ DeltaArguments args, int64_t all_tiles) {
  using Shape = EncodeShape<Word>;
  __shared__ EncodeSlot<Word> slots[kEncodeDeferred + 1];
  __shared__ uint4 new_vectors[Shape::kTile / Shape::kElements];  // each thread's own, so that it can load the next
  __shared__ int warp_counts[Shape::kWarps];
  __shared__ int shared_turns[2];
  __shared__ uint64_t shared_before;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const DeltaProgress progress(args.progress, all_tiles);
  if (args.speculative && static_cast<int64_t>(*progress.sampled) * args.sample_stride > args.room) return;
  uint32_t* counts = progress.counts + table.block_offset;
  uint64_t* sums = progress.sums + table.block_offset;
  uint32_t* turns = progress.turns + table.segment_offset / Capacity;
  const int tiles = table.first_block[table.count];

  // Thread 0 asks for turns and sums a step before they are needed.
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
  int found = 0;  // this block's tiles so far
  for (int step = 0;; ++step) {
    // What is shared is written on one side of a barrier and read on the other; the slot that is filled was written out
    // before the first barrier.
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
        tell(counts + tile, static_cast<uint32_t>(total) + 1);
        slot.tile = tile;
        slot.segment = of;
        slot.total = total;
        turn = atomicAdd(turns, 1u);
      }
      if (total > Shape::kRoom) {
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
      while (sum == 0) sum = look(sums + slot.tile);
      shared_before = sum - 1;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      const bool soon = kEncodeDeferred > 1 && due + 1 >= 0 && due + 1 < found;
      sum = soon ? look(sums + slots[(step + 2) % (kEncodeDeferred + 1)].tile) : 0;
    }
    if (has_due) {
      const auto at = static_cast<int64_t>(shared_before);
      const int total = slot.total, from = slot.segment;
      const int64_t begin = int64_t{slot.tile - table.first_block[from]} * Shape::kTile;
      if (threadIdx.x == 0 && slot.tile + 1 == table.first_block[from + 1]) {
        tell<::cuda::thread_scope_system>(args.bounds + table.segment_offset + from, at + total);
      }
      if (at + total > args.room) {
        // The caller sees the sum of all, and calls again.
      } else if (total > Shape::kRoom) {
        slot.template write_by_bits<Index>(args, begin, at, static_cast<const Word*>(table.dense[from]) + begin);
      } else {
        slot.template write<Index>(args, begin, at, total);
      }
    }
    if (tile >= tiles && due + 1 >= found) return;
  }
}

}  // namespace sparse_opt::cuda
