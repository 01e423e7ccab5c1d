#include "blocks.h"

#include <cstdlib>
#include <cstring>

#include "multiversion.h"
#include "rounding.h"

// Defined if the compiler can compile functions for AVX-512.
#if defined(__x86_64__) && defined(__GNUC__)
#define SPARSE_OPT_AVX512
#endif

#ifdef SPARSE_OPT_AVX512
#include <immintrin.h>
#endif

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

#ifdef SPARSE_OPT_AVX512
// Whether the machine has AVX-512, and ATEN_CPU_CAPABILITY, which torch reads too, does not exclude it.
bool has_avx512() {
  static const bool has = [] {
    const char* limit = std::getenv("ATEN_CPU_CAPABILITY");
    const bool less = limit != nullptr && (std::strcmp(limit, "avx2") == 0 || std::strcmp(limit, "default") == 0);
    return !less && __builtin_cpu_supports("avx512f");
  }();
  return has;
}

[[gnu::target("avx512f")]] void gather_avx512(const uint32_t* dense, const int32_t* indices, int64_t n, uint32_t* out) {
  for (int64_t k = 0; k < n; k += 16) {
    const auto lanes = static_cast<__mmask16>(n - k >= 16 ? 0xffff : (1 << (n - k)) - 1);
    const __m512i at = _mm512_maskz_loadu_epi32(lanes, indices + k);
    _mm512_mask_storeu_epi32(out + k, lanes, _mm512_mask_i32gather_epi32(_mm512_setzero_si512(), lanes, at, dense, 4));
  }
}

[[gnu::target("avx512f")]] void scatter_avx512(uint32_t* dense, const int32_t* indices, int64_t n,
                                               const uint32_t* values) {
  for (int64_t k = 0; k < n; k += 16) {
    const auto lanes = static_cast<__mmask16>(n - k >= 16 ? 0xffff : (1 << (n - k)) - 1);
    const __m512i at = _mm512_maskz_loadu_epi32(lanes, indices + k);
    _mm512_mask_i32scatter_epi32(dense, lanes, at, _mm512_maskz_loadu_epi32(lanes, values + k), 4);
  }
}
#endif

}  // namespace

void gather_words(const uint32_t* dense, const int32_t* indices, int64_t n, uint32_t* out) {
#ifdef SPARSE_OPT_AVX512
  if (has_avx512()) return gather_avx512(dense, indices, n, out);
#endif
  gather_words<uint32_t, int32_t>(dense, indices, n, out);
}

void scatter_words(uint32_t* dense, const int32_t* indices, int64_t n, const uint32_t* values) {
#ifdef SPARSE_OPT_AVX512
  if (has_avx512()) return scatter_avx512(dense, indices, n, values);
#endif
  scatter_words<uint32_t, int32_t>(dense, indices, n, values);
}

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

void gather_halves(DType dtype, const void* dense, const BlockIndices& block, float* out) {
  alignas(64) uint16_t words[kBlock];
  block.gather<uint16_t>(dense, words);
  convert_to_float(dtype, words, block.size, out);
}

void scatter_halves(DType dtype, const float* values, const uint32_t* random, const BlockIndices& block, void* dense) {
  alignas(64) uint16_t words[kBlock];
  if (random != nullptr) {
    round_stochastically(dtype, values, random, block.size, words);
  } else {
    convert_from_float(dtype, values, block.size, words);
  }
  block.scatter<uint16_t>(dense, words);
}

}  // namespace sparse_opt::cpu
