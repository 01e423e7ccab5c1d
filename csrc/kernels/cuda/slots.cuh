// Which slots a thread has, where they lie in the dense tensor, and how both are loaded and stored: kUnroll slots,
// every kThreads-th of a block, for masks that take elements one by one; kUnroll slots beside each other, moved as one
// vector, for masks that take runs.
#pragma once

#include <cstring>
#include <type_traits>

#include "dispatch.cuh"
#include "segment_table.cuh"

namespace sparse_opt::cuda {

// What a position is held in, where indices are stored as Index.
template <typename Index>
using PositionOf = std::conditional_t<std::is_same_v<Index, int64_t>, int64_t, int32_t>;

// Where `slot` of the call's segment `number` lies. A warp's slots are in one frame, so that its bases are one load.
template <typename Index>
__device__ __forceinline__ PositionOf<Index> position_at(const Segments& segments, int64_t number, int64_t slot) {
  const Index* indices = static_cast<const Index*>(segments.indices);
  if constexpr (std::is_same_v<Index, uint16_t>) {
    return __ldg(segments.index_bases + slot / kIndexFrame + number) + load_once(indices + slot);
  } else {
    const int shift = __ffs(segments.run_length) - 1;
    return load_once(indices + (slot >> shift)) + static_cast<Index>(slot & (segments.run_length - 1));
  }
}

template <typename Index>
struct ElementSlots {
  static constexpr int kTurns = 1;   // of kSlots slots that a step's block takes: see segment_table.cuh
  static constexpr int kBlocks = 4;  // that a multiprocessor should hold

  int64_t first;  // slot j is first + j * kThreads
  bool in_range[kUnroll];
  PositionOf<Index> position[kUnroll];

  __device__ __forceinline__ int64_t slot(int j) const { return first + j * kThreads; }
  __device__ __forceinline__ bool active(int j) const { return in_range[j]; }

  __device__ __forceinline__ void find(const Segments& segments, const BlockRange& range) {
    first = range.origin + threadIdx.x;
#pragma unroll
    for (int j = 0; j < kUnroll; ++j) {
      in_range[j] = slot(j) >= range.begin && slot(j) < range.end;
      if (in_range[j]) position[j] = position_at<Index>(segments, range.number, slot(j));
    }
  }

  template <typename T>
  __device__ __forceinline__ void load_compact(const T* compact, T (&values)[kUnroll]) const {
#pragma unroll
    for (int j = 0; j < kUnroll; ++j) {
      if (in_range[j]) values[j] = load_once(compact + slot(j));
    }
  }

  template <typename T>
  __device__ __forceinline__ void store_compact(T* compact, const T (&values)[kUnroll]) const {
#pragma unroll
    for (int j = 0; j < kUnroll; ++j) {
      if (in_range[j]) store_once(compact + slot(j), values[j]);
    }
  }

  template <typename T>
  __device__ __forceinline__ void load_dense(const T* dense, T (&values)[kUnroll]) const {
#pragma unroll
    for (int j = 0; j < kUnroll; ++j) {
      if (in_range[j]) values[j] = dense[position[j]];
    }
  }

  template <typename T>
  __device__ __forceinline__ void store_dense(T* dense, const T (&values)[kUnroll],
                                              const bool (&changed)[kUnroll]) const {
#pragma unroll
    for (int j = 0; j < kUnroll; ++j) {
      if (changed[j]) dense[position[j]] = values[j];
    }
  }
};

template <int Bytes>
struct VectorOf;
template <>
struct VectorOf<4> {
  using Type = uint32_t;
};
template <>
struct VectorOf<8> {
  using Type = uint2;
};
template <>
struct VectorOf<16> {
  using Type = uint4;
};

// kUnroll values beside each other: one access where the address allows it, which is the same for nearly all threads.
template <bool Once, typename T>
__device__ __forceinline__ void load_vector(const T* from, T (&values)[kUnroll]) {
  using Vector = typename VectorOf<sizeof(values)>::Type;
  if (reinterpret_cast<uintptr_t>(from) % sizeof(Vector) == 0) {
    const Vector* at = reinterpret_cast<const Vector*>(from);
    const Vector vector = Once ? __ldcs(at) : *at;
    memcpy(values, &vector, sizeof(vector));
  } else {
#pragma unroll
    for (int j = 0; j < kUnroll; ++j) values[j] = from[j];
  }
}

template <bool Once, typename T>
__device__ __forceinline__ void store_vector(T* to, const T (&values)[kUnroll]) {
  using Vector = typename VectorOf<sizeof(values)>::Type;
  if (reinterpret_cast<uintptr_t>(to) % sizeof(Vector) == 0) {
    Vector vector;
    memcpy(&vector, values, sizeof(vector));
    Vector* at = reinterpret_cast<Vector*>(to);
    if (Once) {
      __stcs(at, vector);
    } else {
      *at = vector;
    }
  } else {
#pragma unroll
    for (int j = 0; j < kUnroll; ++j) to[j] = values[j];
  }
}

// Runs are a multiple of kUnroll long, and segments, blocks and threads begin at multiples of it: a thread's slots lie
// in one run, or outside of the segment.
struct RunSlots {
  // What a step's block computes first takes as long as a turn's loads: on an H200 (3.21 B bf16 weights, 2.5 % active
  // in tiles of 64) AdamW took 0.53 ms with four turns, 0.66 ms with one, and 0.56 ms with eight whose positions were
  // loaded a turn ahead.
  static constexpr int kTurns = 4;
  static constexpr int kBlocks = 5;

  int64_t first;  // slot j is first + j
  int64_t position;
  bool in_range;

  __device__ __forceinline__ int64_t slot(int j) const { return first + j; }
  __device__ __forceinline__ bool active(int) const { return in_range; }

  __device__ __forceinline__ void find(const Segments& segments, const BlockRange& range) {
    first = range.origin + static_cast<int64_t>(threadIdx.x) * kUnroll;
    in_range = first >= range.begin && first < range.end;
    if (!in_range) return;
    const int64_t run = first >> (__ffs(segments.run_length) - 1);
    const int64_t start = segments.index_type == IndexType::kInt64 ? static_cast<const int64_t*>(segments.indices)[run]
                                                                   : static_cast<const int32_t*>(segments.indices)[run];
    position = start + (first & (segments.run_length - 1));
  }

  template <typename T>
  __device__ __forceinline__ void load_compact(const T* compact, T (&values)[kUnroll]) const {
    if (in_range) load_vector<true>(compact + first, values);
  }

  template <typename T>
  __device__ __forceinline__ void store_compact(T* compact, const T (&values)[kUnroll]) const {
    if (in_range) store_vector<true>(compact + first, values);
  }

  template <typename T>
  __device__ __forceinline__ void load_dense(const T* dense, T (&values)[kUnroll]) const {
    if (in_range) load_vector<false>(dense + position, values);
  }

  // All of them if one changed: they are this thread's alone.
  template <typename T>
  __device__ __forceinline__ void store_dense(T* dense, const T (&values)[kUnroll],
                                              const bool (&changed)[kUnroll]) const {
    bool any = false;
#pragma unroll
    for (int j = 0; j < kUnroll; ++j) any = any || changed[j];
    if (any) store_vector<false>(dense + position, values);
  }
};

// call.template operator()<Layout>(): vectors where no run ends inside one.
template <typename Call>
void dispatch_layout(const Segments& segments, Call call) {
  if (segments.run_length % kUnroll == 0) {
    call.template operator()<RunSlots>();
  } else {
    dispatch_index(segments.index_type, [&]<typename Index>() { call.template operator()<ElementSlots<Index>>(); });
  }
}

}  // namespace sparse_opt::cuda
