// What the launchers of all ops take: raw pointers and sizes, already checked.
//
// The launchers of a CPU cut their work into pieces whose size does not depend on the number of threads, so neither do
// results. Those of a GPU launch on `stream` of the current device, do not allocate or synchronize, and can be captured
// in a graph. If a launch fails they throw std::runtime_error, which names the op.
#pragma once

#include <cstdint>
#include <functional>

// Of functions for both devices.
#ifdef __CUDACC__
#define SPARSE_OPT_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define SPARSE_OPT_HOST_DEVICE inline
#endif

using cudaStream_t = struct CUstream_st*;  // as in cuda_runtime_api.h, which a build without CUDA does not have

namespace sparse_opt {

enum class DType : int { kFloat32, kBFloat16, kFloat16 };

inline int element_size(DType dtype) {
  return dtype == DType::kFloat32 ? 4 : 2;
}

// call.template operator()<Word>() with the unsigned type of this size: 1, 2, 4 or 8 bytes.
template <typename Call>
decltype(auto) dispatch_word(int element_size, Call call) {
  switch (element_size) {
    case 1:
      return call.template operator()<uint8_t>();
    case 2:
      return call.template operator()<uint16_t>();
    case 4:
      return call.template operator()<uint32_t>();
    default:
      return call.template operator()<uint64_t>();
  }
}

enum class IndexType : int { kInt32, kInt64, kOffset16 };

inline int index_size(IndexType type) {
  return type == IndexType::kInt64 ? 8 : type == IndexType::kInt32 ? 4 : 2;
}

constexpr int64_t kIndexFrame = 256;  // slots that share a base

// Segment i, the compact slots [starts[i], ends[i]), belongs to dense tensor i. The position of slot s in it is
// indices[s / run_length] + s % run_length, where starts and ends are multiples of run_length, a power of two; or, with
// index_bases and a run_length of 1, index_bases[s / kIndexFrame + i] + indices[s]. Positions may have any alignment.
// The lists are in host memory.
struct Segments {
  int64_t count = 0;
  int64_t numel = 0;                // of all dense tensors
  void* const* dense = nullptr;     // [count]
  const int64_t* starts = nullptr;  // [count]
  const int64_t* ends = nullptr;    // [count]
  const void* indices = nullptr;    // [nnz / run_length] of index_type
  IndexType index_type = IndexType::kInt32;
  int run_length = 1;
  const int32_t* index_bases = nullptr;  // [nnz / kIndexFrame + count], with kOffset16
};

namespace cpu {

// Runs body(begin, end) over parts of [0, count) on the caller's thread pool, and returns when all are done.
using ParallelFor = void (*)(int64_t count, const std::function<void(int64_t, int64_t)>& body);

}  // namespace cpu

}  // namespace sparse_opt
