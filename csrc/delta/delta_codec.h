// The launchers of delta_encode, and of the digests of tensors on a GPU.
#pragma once

#include <algorithm>

#include "common/arguments.h"

namespace sparse_opt {

// Elements of a block, all of one tensor. A CPU marks and counts the changes of each block, then writes them at
// the running sum of the counts; a GPU samples blocks.
constexpr int64_t kDeltaBlock = 8192;
constexpr int64_t kDeltaBlockBytes = kDeltaBlock / 8;

struct DeltaArguments {
  int64_t count = 0;
  void* const* old_tensors = nullptr;    // [count], the list in host memory
  void* const* new_tensors = nullptr;    // [count], the list in host memory
  const int64_t* numels = nullptr;       // [count], in host memory
  const int64_t* first_block = nullptr;  // [count + 1], in host memory: tensor i has blocks [first[i], first[i + 1])
  int element_size = 0;                  // 1, 2, 4 or 8
  bool wide_indices = false;
  int64_t capacity = 0;      // of indices and values
  bool speculative = false;  // capacity was chosen before the sample was known (GPU)
  void* indices = nullptr;   // [capacity] int32, or int64 if wide_indices
  void* values = nullptr;    // [capacity]

  // Scratch memory of a CPU. `changed` has one bit for each element: element k of a block is bit k % 8 of byte k / 8.
  // Elements past a tensor's end count as unchanged.
  uint8_t* changed = nullptr;             // [blocks * kDeltaBlockBytes]
  int64_t* block_counts = nullptr;        // [blocks]
  const int64_t* running_sums = nullptr;  // [blocks], of block_counts, inclusive

  void* progress = nullptr;  // scratch memory of a GPU, of delta_progress_bytes()
  // In pinned memory of the host, which the GPU writes, so that no copy is needed between kernels.
  int64_t* bounds = nullptr;  // [count], the running sum at each tensor's end
  int64_t sample_stride = 1;
  int* sampled = nullptr;  // [blocks / sample_stride + tables], changes of every sample_stride-th block of a table
};

constexpr int64_t kDigestChunk = 65536;  // bytes; a tensor's last chunk may be shorter
constexpr int64_t kDigestBytes = 16;

// The chunks of all tensors are numbered one after the other.
struct ChunkDigestArguments {
  int64_t count = 0;
  void* const* tensors = nullptr;  // [count], the list in host memory; only read, of any alignment
  const int64_t* sizes = nullptr;  // [count], bytes, in host memory
  uint8_t* digests = nullptr;      // [chunks, kDigestBytes], big-endian; aligned to 16
};

namespace cpu {

// The tensor, first element and size of part `number` of a list, at most `length` elements of one tensor. Tensor i has
// parts [first[i], first[i + 1]).
struct TensorPart {
  int64_t tensor, begin, size;
};

inline TensorPart part_at(const int64_t* first, int64_t count, const int64_t* numels, int64_t length, int64_t number) {
  const int64_t tensor = std::upper_bound(first, first + count + 1, number) - first - 1;
  const int64_t begin = (number - first[tensor]) * length;
  return {tensor, begin, std::min(length, numels[tensor] - begin)};
}

// Sets bit k % 64 of bits[k / 64] if word k changed, and clears it otherwise, also from n to the next multiple of 64.
// Returns the number of changes.
int64_t mark_changes(int element_size, const void* old_words, const void* new_words, int64_t n, uint64_t* bits);

void delta_mark(const DeltaArguments& args, ParallelFor parallel_for);
void delta_collect(const DeltaArguments& args, ParallelFor parallel_for);

}  // namespace cpu

namespace cuda {

// Writes args.sampled and returns the number of its elements. Called between delta_prepare and delta_encode.
int64_t delta_sample(const DeltaArguments& args, cudaStream_t stream);
// The size of args.progress, which delta_prepare initializes for one delta_encode.
int64_t delta_progress_bytes(const DeltaArguments& args);
void delta_prepare(const DeltaArguments& args, cudaStream_t stream);
// Writes args.bounds of the tensors that are not empty, and all changes if args.capacity is sufficient. If
// args.speculative, does nothing if sample_stride times the changes that delta_sample counted exceeds args.capacity.
void delta_encode(const DeltaArguments& args, cudaStream_t stream);

// XXH3 of every chunk of a list of tensors.
void chunk_digests(const ChunkDigestArguments& args, cudaStream_t stream);

}  // namespace cuda

}  // namespace sparse_opt
