#include "blocks.h"

#include <cstring>

#include "../rounding.h"
#include "multiversion.h"

namespace sparse_opt::cpu {
namespace {

template <typename T>
inline void to_float_loop(const void* values, int64_t n, float* __restrict out) {
  const T* __restrict source = static_cast<const T*>(values);
  for (int64_t k = 0; k < n; ++k) out[k] = to_float(source[k]);
}

template <typename T>
inline void from_float_loop(const float* __restrict values, int64_t n, void* out) {
  T* __restrict target = static_cast<T*>(out);
  for (int64_t k = 0; k < n; ++k) target[k] = from_float<T>(values[k]);
}

template <typename T>
inline void stochastic_loop(const float* __restrict values, const uint32_t* __restrict random, int64_t n, void* out) {
  T* __restrict target = static_cast<T*>(out);
  for (int64_t k = 0; k < n; ++k) target[k] = stochastic_round<T>(values[k], random[k]);
}

}  // namespace

SPARSE_OPT_MULTIVERSION
void widen(const Segments& segments, int64_t segment, int64_t begin, int64_t size, int32_t* __restrict positions) {
  const uint16_t* __restrict offsets = static_cast<const uint16_t*>(segments.indices) + begin;
  for (int64_t k = 0; k < size;) {
    const int64_t frame = (begin + k) / kIndexFrame;
    const int64_t last = std::min(size, (frame + 1) * kIndexFrame - begin);
    const int32_t base = segments.index_bases[frame + segment];
    for (; k < last; ++k) positions[k] = base + offsets[k];
  }
}

SPARSE_OPT_MULTIVERSION
void convert_to_float(DType dtype, const void* values, int64_t n, float* out) {
  switch (dtype) {
    case DType::kFloat32:
      std::memcpy(out, values, n * sizeof(float));
      break;
    case DType::kBFloat16:
      to_float_loop<bfloat16>(values, n, out);
      break;
    case DType::kFloat16:
      to_float_loop<float16>(values, n, out);
      break;
  }
}

SPARSE_OPT_MULTIVERSION
void convert_from_float(DType dtype, const float* values, int64_t n, void* out) {
  switch (dtype) {
    case DType::kFloat32:
      std::memcpy(out, values, n * sizeof(float));
      break;
    case DType::kBFloat16:
      from_float_loop<bfloat16>(values, n, out);
      break;
    case DType::kFloat16:
      from_float_loop<float16>(values, n, out);
      break;
  }
}

SPARSE_OPT_MULTIVERSION
void round_stochastically(DType dtype, const float* values, const uint32_t* random, int64_t n, void* out) {
  switch (dtype) {
    case DType::kFloat32:
      std::memcpy(out, values, n * sizeof(float));
      break;
    case DType::kBFloat16:
      stochastic_loop<bfloat16>(values, random, n, out);
      break;
    case DType::kFloat16:
      stochastic_loop<float16>(values, random, n, out);
      break;
  }
}

void prefetch(DType dtype, const void* dense, const BlockIndices& block) {
  if (dtype == DType::kFloat32) {
    block.prefetch<uint32_t>(dense);
  } else {
    block.prefetch<uint16_t>(dense);
  }
}

void gather_as_float(DType dtype, const void* dense, const BlockIndices& block, float* out) {
  if (dtype == DType::kFloat32) {
    block.gather<uint32_t>(dense, out);
    return;
  }
  alignas(64) uint16_t words[kBlock];
  block.gather<uint16_t>(dense, words);
  convert_to_float(dtype, words, block.size, out);
}

void scatter_from_float(DType dtype, const float* values, const uint32_t* random, const BlockIndices& block,
                        void* dense) {
  if (dtype == DType::kFloat32) {
    block.scatter<uint32_t>(dense, values);
    return;
  }
  alignas(64) uint16_t words[kBlock];
  if (random != nullptr) {
    round_stochastically(dtype, values, random, block.size, words);
  } else {
    convert_from_float(dtype, values, block.size, words);
  }
  block.scatter<uint16_t>(dense, words);
}

}  // namespace sparse_opt::cpu
