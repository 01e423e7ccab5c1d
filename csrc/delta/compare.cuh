// Comparison of two tensors, a block of kDeltaBlock elements at a time, to one bit for each element.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "common/segment_table.cuh"
#include "delta_codec.h"

namespace sparse_opt::cuda {

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

// In one pass a thread compares whole 16-byte vectors whose bits fill a byte of the bitmap (two, for 1-byte elements).
template <typename Word>
struct CompareShape {
  using Bits = std::conditional_t<sizeof(Word) == 1, uint16_t, uint8_t>;
  static constexpr int kElements = 8 * sizeof(Bits);
  static constexpr int kVectors = kElements * sizeof(Word) / 16;
  static constexpr int kPasses = kDeltaBlock / (kThreads * kElements);
  // Passes whose loads are in flight together: 64 bytes of each tensor.
  static constexpr int kTogether = kPasses * kVectors <= 4 ? kPasses : 4 / kVectors;
};

// The new tensor is loaded with the default cache policy: its changed elements are read again, once their order is
// known.
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

// For a tensor's last block, and views that are not aligned to 16 bytes.
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

// Exclusive sum of `count` over the block's threads, and the total. Called by the whole block, with a barrier between
// two calls.
template <typename Count>
__device__ __forceinline__ Count block_rank(Count count, Count& total) {
  __shared__ Count warp_counts[kWarps];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  Count rank = count;
  for (int offset = 1; offset < 32; offset *= 2) {
    const Count below = __shfl_up_sync(0xffffffffu, rank, offset);
    if (lane >= offset) rank += below;
  }
  if (lane == 31) warp_counts[warp] = rank;
  __syncthreads();
  rank -= count;
  total = 0;
#pragma unroll
  for (int other = 0; other < kWarps; ++other) {
    rank += other < warp ? warp_counts[other] : 0;
    total += warp_counts[other];
  }
  return rank;
}

// Returns the sum of `value` over the block's threads to all of them. Called by the whole block, once.
template <typename Value>
__device__ __forceinline__ Value block_sum_in_all_threads(Value value) {
  __shared__ Value warp_sums[kWarps];
  for (int offset = 16; offset > 0; offset /= 2) value += __shfl_xor_sync(0xffffffffu, value, offset);
  if (threadIdx.x % 32 == 0) warp_sums[threadIdx.x / 32] = value;
  __syncthreads();
  value = 0;
#pragma unroll
  for (int warp = 0; warp < kWarps; ++warp) value += warp_sums[warp];
  return value;
}

}  // namespace sparse_opt::cuda
