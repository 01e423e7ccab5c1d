// The slots of a thread, their positions in the dense tensor, and loads and stores of both. ElementSlots, for masks of
// single elements: kUnroll slots, every kThreads-th of a block. RunSlots, for masks of runs: kUnroll consecutive slots,
// moved as one vector. ElementVectors, for kernels that write few dense elements and read none: the same for single
// elements.
#pragma once

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "dispatch.cuh"
#include "segment_table.cuh"

namespace sparse_opt::cuda {

// The type of a position if indices are stored as Index.
template <typename Index>
using PositionOf = std::conditional_t<std::is_same_v<Index, int64_t>, int64_t, int32_t>;

// The position of `slot`, in segment `number` of the call. The slots of a warp are in one frame, so that one load
// fetches its base.
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

// Unroll slots for each of Threads threads.
template <typename Index, int Threads = kThreads, int Unroll = kUnroll>
struct ElementSlots {
  static constexpr int kThreads = Threads, kUnroll = Unroll;
  static constexpr bool kReadsDense = true;
  static constexpr int kBlocks = 4096 / (Threads * Unroll);  // that a multiprocessor should hold: about 4096 slots

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

  // The loaded elements, one word for each slot; 0 outside of the range.
  template <typename T>
  struct Held {
    uint32_t words[kUnroll] = {};

    __device__ __forceinline__ T operator[](int j) const {
      T value;
      memcpy(&value, &words[j], sizeof(value));
      return value;
    }
    __device__ __forceinline__ void set(int j, T value) { memcpy(&words[j], &value, sizeof(value)); }
    __device__ __forceinline__ void set_all(const T (&values)[kUnroll]) {
#pragma unroll
      for (int j = 0; j < kUnroll; ++j) set(j, values[j]);
    }
  };

  template <typename T>
  __device__ __forceinline__ Held<T> load_compact(const T* compact) const {
    Held<T> held;
#pragma unroll
    for (int j = 0; j < kUnroll; ++j) {
      if (in_range[j]) held.set(j, load_once(compact + slot(j)));
    }
    return held;
  }

  template <typename T>
  __device__ __forceinline__ void store_compact(T* compact, const T (&values)[kUnroll]) const {
#pragma unroll
    for (int j = 0; j < kUnroll; ++j) {
      if (in_range[j]) store_once(compact + slot(j), values[j]);
    }
  }

  template <typename T>
  __device__ __forceinline__ void store_changed(T* compact, const T (&values)[kUnroll],
                                                const bool (&changed)[kUnroll]) const {
#pragma unroll
    for (int j = 0; j < kUnroll; ++j) {
      if (changed[j]) store_once(compact + slot(j), values[j]);
    }
  }

  template <typename T>
  __device__ __forceinline__ Held<T> load_dense(const T* dense) const {
    Held<T> held;
#pragma unroll
    for (int j = 0; j < kUnroll; ++j) {
      if (in_range[j]) held.set(j, dense[position[j]]);
    }
    return held;
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

template <int N>
__device__ __forceinline__ bool any_of(const bool (&flags)[N]) {
  bool any = false;
#pragma unroll
  for (int j = 0; j < N; ++j) any = any || flags[j];
  return any;
}

// Whether no run ends inside a vector.
inline bool has_runs_of_vectors(const Segments& segments) {
  return segments.run_length % kUnroll == 0;
}

// Whether `unroll` elements of so many bytes, both powers of two, can be moved as vectors of 16 bytes at most, from any
// multiple of `unroll` on.
inline bool fits_vectors(const void* buffer, int size, int unroll = kUnroll) {
  return (reinterpret_cast<uintptr_t>(buffer) & (std::min(unroll * size, 16) - 1)) == 0;
}

// Runs are a multiple of kUnroll long, and segments, blocks and threads begin at multiples of it: the slots of a thread
// are all in one run, or all outside of the segment. Compact buffers must satisfy fits_vectors(); dense tensors may
// have any alignment.
struct RunSlots {
  static constexpr int kThreads = cuda::kThreads, kUnroll = cuda::kUnroll, kBlocks = 6;
  static constexpr bool kReadsDense = true;

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

  // The loaded elements, packed as in memory, so that no instruction waits for them before they are used; 0 outside of
  // the range.
  template <typename T>
  struct Held {
    uint32_t words[kUnroll * sizeof(T) / 4] = {};

    __device__ __forceinline__ T operator[](int j) const {
      T values[kUnroll];
      memcpy(values, words, sizeof(words));
      return values[j];
    }
    __device__ __forceinline__ void set_all(const T (&values)[kUnroll]) { memcpy(words, values, sizeof(words)); }
  };

  template <typename T>
  using Vector = typename VectorOf<kUnroll * sizeof(T)>::Type;

  // The same for nearly all threads.
  template <typename T>
  __device__ __forceinline__ static bool is_vector(const T* at) {
    return reinterpret_cast<uintptr_t>(at) % sizeof(Vector<T>) == 0;
  }

  template <typename T>
  __device__ __forceinline__ Held<T> load_compact(const T* compact) const {
    Held<T> held;
    if (in_range) {
      const Vector<T> vector = __ldcs(reinterpret_cast<const Vector<T>*>(compact + first));
      memcpy(held.words, &vector, sizeof(vector));
    }
    return held;
  }

  template <typename T>
  __device__ __forceinline__ void store_compact(T* compact, const T (&values)[kUnroll]) const {
    if (!in_range) return;
    Vector<T> vector;
    memcpy(&vector, values, sizeof(vector));
    __stcs(reinterpret_cast<Vector<T>*>(compact + first), vector);
  }

  // All of them if one changed.
  template <typename T>
  __device__ __forceinline__ void store_changed(T* compact, const T (&values)[kUnroll],
                                                const bool (&changed)[kUnroll]) const {
    if (any_of(changed)) store_compact(compact, values);
  }

  template <typename T>
  __device__ __forceinline__ Held<T> load_dense(const T* dense) const {
    Held<T> held;
    if (!in_range) return held;
    const T* from = dense + position;
    if (is_vector(from)) {
      const Vector<T> vector = *reinterpret_cast<const Vector<T>*>(from);
      memcpy(held.words, &vector, sizeof(vector));
    } else {
      T values[kUnroll];
#pragma unroll
      for (int j = 0; j < kUnroll; ++j) values[j] = from[j];
      memcpy(held.words, values, sizeof(values));
    }
    return held;
  }

  // All of them if one changed: they are this thread's alone.
  template <typename T>
  __device__ __forceinline__ void store_dense(T* dense, const T (&values)[kUnroll],
                                              const bool (&changed)[kUnroll]) const {
    if (!any_of(changed)) return;
    T* to = dense + position;
    if (is_vector(to)) {
      Vector<T> vector;
      memcpy(&vector, values, sizeof(vector));
      *reinterpret_cast<Vector<T>*>(to) = vector;
    } else {
#pragma unroll
      for (int j = 0; j < kUnroll; ++j) to[j] = values[j];
    }
  }
};

// For kernels that read no dense tensor and write few of its single elements: a thread has Unroll consecutive slots,
// and compact buffers and indices, which must satisfy fits_vectors(), are moved as vectors. A segment may begin and end
// inside a vector: there elements are moved one by one. Indices are loaded only by threads whose elements change, when
// these are stored. The accesses have no cache hints: evict-first loads and stores took 3 % longer (the lab notebook).
template <typename Index, int Threads, int Unroll>
struct ElementVectors {
  static constexpr int kThreads = Threads, kUnroll = Unroll, kBlocks = 1536 / Threads;
  static constexpr bool kReadsDense = false;
  static constexpr uint32_t kAll = (1u << Unroll) - 1;

  const Segments* segments;
  int64_t number;     // of the segment in the call
  int64_t first;      // slot j is first + j
  uint32_t in_range;  // bit j: slot j

  // The loaded elements, packed as in memory; 0 outside of the range.
  template <typename T>
  struct Held {
    alignas(16) uint32_t words[kUnroll * sizeof(T) / 4] = {};

    __device__ __forceinline__ T operator[](int j) const {
      T values[kUnroll];
      memcpy(values, words, sizeof(words));
      return values[j];
    }
    __device__ __forceinline__ void set_all(const T (&values)[kUnroll]) { memcpy(words, values, sizeof(words)); }
  };

  __device__ __forceinline__ int64_t slot(int j) const { return first + j; }
  __device__ __forceinline__ bool active(int j) const { return (in_range >> j & 1) != 0; }

  __device__ __forceinline__ void find(const Segments& of, const BlockRange& range) {
    segments = &of;
    number = range.number;
    first = range.origin + static_cast<int64_t>(threadIdx.x) * Unroll;
    in_range = 0;
#pragma unroll
    for (int j = 0; j < Unroll; ++j) in_range |= uint32_t{slot(j) >= range.begin && slot(j) < range.end} << j;
  }

  template <typename T>
  __device__ __forceinline__ Held<T> load_compact(const T* compact) const {
    Held<T> held;
    if (in_range == kAll) {
      copy_vector<T>(held.words, compact + first);
      return held;
    }
    T values[kUnroll] = {};
#pragma unroll
    for (int j = 0; j < kUnroll; ++j) {
      if (active(j)) values[j] = compact[slot(j)];
    }
    held.set_all(values);
    return held;
  }

  template <typename T>
  __device__ __forceinline__ void store_compact(T* compact, const T (&values)[kUnroll]) const {
    if (in_range == kAll) {
      Held<T> held;
      held.set_all(values);
      copy_vector<T>(compact + first, held.words);
      return;
    }
#pragma unroll
    for (int j = 0; j < kUnroll; ++j) {
      if (active(j)) compact[slot(j)] = values[j];
    }
  }

  // The vectors of the sectors in which an element changes. Called by all threads of a warp. A part of a sector would
  // take longer than all of it.
  template <typename T>
  __device__ __forceinline__ void store_changed(T* compact, const T (&values)[kUnroll],
                                                const bool (&changed)[kUnroll]) const {
    constexpr int kSectorBytes = 32;
    constexpr int kNeighbours = kSectorBytes / (kUnroll * sizeof(T));  // threads with one sector
    static_assert(kNeighbours > 0);
    const int lane = static_cast<int>(threadIdx.x % 32);
    const uint32_t neighbours = ((1u << kNeighbours) - 1) << (lane / kNeighbours * kNeighbours);
    if ((__ballot_sync(0xffffffff, any_of(changed)) & neighbours) != 0) store_compact(compact, values);
  }

  template <typename T>
  __device__ __forceinline__ void store_dense(T* dense, const T (&values)[kUnroll],
                                              const bool (&changed)[kUnroll]) const {
    if (!any_of(changed)) return;
    if (in_range == kAll) {
      const auto indices = load_compact(static_cast<const Index*>(segments->indices));
      PositionOf<Index> base = 0;
      if constexpr (std::is_same_v<Index, uint16_t>) {
        base = __ldg(segments->index_bases + first / kIndexFrame + number);
      }
#pragma unroll
      for (int j = 0; j < kUnroll; ++j) {
        if (changed[j]) dense[base + indices[j]] = values[j];
      }
      return;
    }
#pragma unroll
    for (int j = 0; j < kUnroll; ++j) {
      if (changed[j]) dense[position_at<Index>(*segments, number, slot(j))] = values[j];
    }
  }

 private:
  // The words of a vector, from or to memory.
  template <typename T>
  __device__ __forceinline__ static void copy_vector(void* to, const void* from) {
    constexpr int kBytes = kUnroll * sizeof(T), kAccessBytes = kBytes < 16 ? kBytes : 16;
    using Access = typename VectorOf<kAccessBytes>::Type;
#pragma unroll
    for (int i = 0; i < kBytes / kAccessBytes; ++i) static_cast<Access*>(to)[i] = static_cast<const Access*>(from)[i];
  }
};

// Whether single elements can be moved as ElementVectors of `unroll`, if the compact buffers can.
inline bool has_element_vectors(const Segments& segments, int unroll) {
  return segments.run_length == 1 && fits_vectors(segments.indices, index_size(segments.index_type), unroll);
}

// call.template operator()<Layout>(): RunSlots if `vectors`, otherwise ElementSlots, Unroll of each of Threads threads.
template <int Threads = kThreads, int Unroll = kUnroll, typename Call>
void dispatch_layout(const Segments& segments, bool vectors, Call call) {
  if (vectors) {
    call.template operator()<RunSlots>();
  } else {
    dispatch_index(segments.index_type,
                   [&]<typename Index>() { call.template operator()<ElementSlots<Index, Threads, Unroll>>(); });
  }
}

}  // namespace sparse_opt::cuda
