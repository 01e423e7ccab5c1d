// The table of a list of tensors, passed to a kernel by value, in its parameters. No table is kept on the device,
// nothing is copied apart from the launch, and a captured graph holds its own copy.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <stdexcept>
#include <string>

#include "arguments.h"

namespace sparse_opt::cuda {

constexpr int kThreads = 256;
constexpr int kUnroll = 4;
// Slots of one block of a gather, and of a step on runs. A warp handles 32 consecutive slots at a time: accesses to
// compact data are coalesced whatever the segment's first slot, and neighbours in a dense tensor are fetched and stored
// by one instruction. Each thread has kUnroll independent elements in flight, and no others.
constexpr int64_t kSlots = kThreads * kUnroll;

// Every launch copies its parameters, so there are two sizes: for the few gradients of a hook, and for the tensors of a
// model of 8 B parameters (Llama's has 291). Longer lists take several launches. Parameters may take 32764 bytes from
// CUDA 12.1 on (sm_70 and later), 4096 before.
constexpr int kSmallTable = 8;
#if CUDART_VERSION >= 12010
constexpr int kLargeTable = 320;
#else
constexpr int kLargeTable = 64;
#endif

// A block finds its segment by bisection from search_hints[block >> hint_shift] to the next hint, because every block
// waits for it. With bisection of the whole list, of 197 tensors, a step of 2.5 % in tiles of 64 took 0.51 ms instead
// of 0.495 on an H200, and one of single weights, few of which change, 2.16 ms instead of 2.02 (in blocks of 512).
template <int Capacity>
struct SegmentTable {
  static constexpr int kSearchHints = Capacity > kSmallTable ? 256 : 1;

  void* dense[Capacity];
  const void* companions[Capacity];  // dense gradients, the old tensors of a delta, or where sums of squares go
  int64_t starts[Capacity];
  int64_t ends[Capacity];
  int32_t first_block[Capacity + 1];  // of each segment, in this launch
  int32_t count;
  int32_t hint_shift;
  uint16_t search_hints[kSearchHints + 1];
  int64_t segment_offset;  // this launch's first segment and block within the call
  int64_t block_offset;
};

// Blocks begin at multiples of 32 slots, so that a warp's loads do not straddle sectors.
__host__ __device__ inline int64_t aligned_start(int64_t start) {
  return start & ~int64_t{31};
}

// The slots of a block: [begin, end) of segment `segment` of the table, which is segment `number` of the call. Slots
// are assigned to threads from `origin` on.
struct BlockRange {
  int segment;
  int64_t number;
  int64_t origin, begin, end;
};

template <int Capacity>
__device__ __forceinline__ BlockRange block_range(const SegmentTable<Capacity>& table, int64_t slots_per_block,
                                                  int block) {
  int low = 0, high = table.count;  // first_block[low] <= block < first_block[high]
  if constexpr (SegmentTable<Capacity>::kSearchHints > 1) {
    const int search_hint = block >> table.hint_shift;
    low = table.search_hints[search_hint];
    high = table.search_hints[search_hint + 1] + 1;
  }
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (table.first_block[middle] <= block) {
      low = middle;
    } else {
      high = middle;
    }
  }
  const int64_t start = table.starts[low], end = table.ends[low];
  const int64_t origin = aligned_start(start) + (block - table.first_block[low]) * slots_per_block;
  const int64_t last = origin + slots_per_block;
  return {low, table.segment_offset + low, origin, origin < start ? start : origin, last < end ? last : end};
}

template <int Capacity>
__device__ __forceinline__ BlockRange block_range(const SegmentTable<Capacity>& table, int64_t slots_per_block) {
  return block_range(table, slots_per_block, static_cast<int>(blockIdx.x));
}

inline int64_t blocks_of(int64_t start, int64_t end, int64_t slots_per_block) {
  return end > start ? (end - aligned_start(start) + slots_per_block - 1) / slots_per_block : 0;
}

// Whether the current device has compute capability 9.x, whose launch sizes were tuned: "Tuning tables" in
// docs/dev/notebook.md. A size that depends on it changes no bit of any result.
inline bool has_tuned_sizes() {
  int device = 0, major = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  return major == 9;
}

inline void check_launch(const char* op) {
  const cudaError_t error = cudaGetLastError();
  if (error != cudaSuccess) {
    throw std::runtime_error(std::string(op) + ": the CUDA launch failed: " + cudaGetErrorString(error));
  }
}

// Sets the driver's preference while kKernel runs: a multiprocessor's memory as shared memory instead of L1 cache. Set
// only once for each device, because the call takes as long as a launch.
template <auto kKernel>
void prefer_shared_memory() {
  static std::atomic<uint64_t> devices{0};
  int device = 0;
  cudaGetDevice(&device);
  const uint64_t bit = uint64_t{1} << (device % 64);
  if ((devices.load(std::memory_order_relaxed) & bit) != 0) return;
  if (cudaFuncSetAttribute(kKernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared) !=
      cudaSuccess) {
    cudaGetLastError();  // only a preference: the kernel runs without it
  }
  devices.fetch_or(bit, std::memory_order_relaxed);
}

template <int Capacity>
void set_search_hints(SegmentTable<Capacity>& table) {
  const int blocks = table.first_block[table.count];
  table.hint_shift = 0;
  while ((blocks - 1) >> table.hint_shift >= table.kSearchHints) ++table.hint_shift;
  int search_hint = 0;
  for (int segment = 0; int64_t{search_hint} << table.hint_shift < blocks; ++search_hint) {
    while (table.first_block[segment + 1] <= search_hint << table.hint_shift) ++segment;
    table.search_hints[search_hint] = static_cast<uint16_t>(segment);
  }
  table.search_hints[search_hint] = static_cast<uint16_t>(table.count - 1);
}

template <int Capacity, typename Launch>
void launch_tables(const Segments& segments, const void* const* companions, int64_t slots_per_block, Launch& launch) {
  SegmentTable<Capacity> table;
  table.block_offset = 0;
  for (int64_t first = 0; first < segments.count; first += Capacity) {
    table.count = static_cast<int32_t>(std::min<int64_t>(Capacity, segments.count - first));
    table.segment_offset = first;
    table.first_block[0] = 0;
    for (int i = 0; i < table.count; ++i) {
      table.dense[i] = segments.dense != nullptr ? segments.dense[first + i] : nullptr;
      table.companions[i] = companions != nullptr ? companions[first + i] : nullptr;
      table.starts[i] = segments.starts != nullptr ? segments.starts[first + i] : 0;
      table.ends[i] = segments.ends[first + i];
      const int64_t blocks = blocks_of(table.starts[i], table.ends[i], slots_per_block);
      table.first_block[i + 1] = table.first_block[i] + static_cast<int32_t>(blocks);
    }
    if constexpr (SegmentTable<Capacity>::kSearchHints > 1) set_search_hints(table);
    launch(table, static_cast<unsigned>(table.first_block[table.count]));
    table.block_offset += table.first_block[table.count];
  }
}

// Calls launch(table, blocks) for as many tables as the list needs. The kernel does not read tensors that are not
// given, and segments without starts start at 0.
template <typename Launch>
void for_each_table(const Segments& segments, const void* const* companions, int64_t slots_per_block, Launch launch) {
  if (segments.count <= kSmallTable) {
    launch_tables<kSmallTable>(segments, companions, slots_per_block, launch);
  } else {
    launch_tables<kLargeTable>(segments, companions, slots_per_block, launch);
  }
}

// Calls launch(table, blocks) for the tables of a list of tensors. Each tensor is one segment with all of its
// elements. Tables without elements are left out.
template <typename Launch>
void for_each_whole_table(int64_t count, void* const* tensors, const void* const* companions, const int64_t* numels,
                          int64_t block, Launch launch) {
  Segments whole;
  whole.count = count;
  whole.dense = tensors;
  whole.ends = numels;
  for_each_table(whole, companions, block, [&]<int Capacity>(const SegmentTable<Capacity>& table, unsigned blocks) {
    if (blocks != 0) launch(table, blocks);
  });
}

}  // namespace sparse_opt::cuda
