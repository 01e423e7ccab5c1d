// From runtime types to template arguments, and loads and stores of the kernels' element types.
#pragma once

#include <cstdint>

#include "arguments.h"
#include "scalar_types.h"

namespace sparse_opt::cuda {

// call.template operator()<T>()
template <typename Call>
void dispatch_dtype(DType dtype, Call call) {
  switch (dtype) {
    case DType::kFloat32:
      call.template operator()<float>();
      break;
    case DType::kBFloat16:
      call.template operator()<bfloat16>();
      break;
    case DType::kFloat16:
      call.template operator()<float16>();
      break;
  }
}

// call.template operator()<Index>(): the type that the indices are stored in.
template <typename Call>
void dispatch_index(IndexType type, Call call) {
  switch (type) {
    case IndexType::kInt32:
      call.template operator()<int32_t>();
      break;
    case IndexType::kInt64:
      call.template operator()<int64_t>();
      break;
    case IndexType::kOffset16:
      call.template operator()<uint16_t>();
      break;
  }
}

// Compact data is read and written once: in kernels that access dense tensors too, it should not evict the lines that
// neighbours share from the caches.
__device__ __forceinline__ float load_once(const float* p) {
  return __ldcs(p);
}
__device__ __forceinline__ uint16_t load_once(const uint16_t* p) {
  return __ldcs(p);
}
__device__ __forceinline__ int32_t load_once(const int32_t* p) {
  return __ldcs(p);
}
__device__ __forceinline__ int64_t load_once(const int64_t* p) {
  return __ldcs(reinterpret_cast<const long long*>(p));
}
__device__ __forceinline__ bfloat16 load_once(const bfloat16* p) {
  return {__ldcs(&p->bits)};
}
__device__ __forceinline__ float16 load_once(const float16* p) {
  return {__ldcs(&p->bits)};
}

__device__ __forceinline__ void store_once(float* p, float x) {
  __stcs(p, x);
}
__device__ __forceinline__ void store_once(bfloat16* p, bfloat16 x) {
  __stcs(&p->bits, x.bits);
}
__device__ __forceinline__ void store_once(float16* p, float16 x) {
  __stcs(&p->bits, x.bits);
}

}  // namespace sparse_opt::cuda
