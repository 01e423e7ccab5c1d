// bf16 and fp16 as 16-bit words, and their conversions from and to fp32: to nearest even unless stated otherwise, with
// the bits of torch's own casts on the same device, NaN included. Branch-free, so that loops over them vectorise.
#pragma once

#include <cstdint>
#include <cstring>

#ifdef __CUDACC__
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#endif

#include "arguments.h"

namespace sparse_opt {

struct bfloat16 {
  uint16_t bits;
};

struct float16 {
  uint16_t bits;
};

SPARSE_OPT_HOST_DEVICE uint32_t float_bits(float x) {
#ifdef __CUDA_ARCH__
  return __float_as_uint(x);
#else
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  return bits;
#endif
}

SPARSE_OPT_HOST_DEVICE float bits_float(uint32_t bits) {
#ifdef __CUDA_ARCH__
  return __uint_as_float(bits);
#else
  float x;
  std::memcpy(&x, &bits, sizeof(x));
  return x;
#endif
}

SPARSE_OPT_HOST_DEVICE bool same_bits(float a, float b) {
  return float_bits(a) == float_bits(b);
}

SPARSE_OPT_HOST_DEVICE bool same_bits(bfloat16 a, bfloat16 b) {
  return a.bits == b.bits;
}

SPARSE_OPT_HOST_DEVICE bool same_bits(float16 a, float16 b) {
  return a.bits == b.bits;
}

SPARSE_OPT_HOST_DEVICE float to_float(float x) {
  return x;
}

SPARSE_OPT_HOST_DEVICE float to_float(bfloat16 x) {
  return bits_float(static_cast<uint32_t>(x.bits) << 16);
}

SPARSE_OPT_HOST_DEVICE float to_float(float16 x) {
#ifdef __CUDA_ARCH__
  return __half2float(__ushort_as_half(x.bits));
#else
  const uint32_t magnitude = static_cast<uint32_t>(x.bits & 0x7fff) << 13;
  const uint32_t normal = magnitude + (112u << 23);
  // 2^-14 + x has x's subnormal steps in its last places; taking 2^-14 away again is exact.
  const uint32_t subnormal = float_bits(bits_float(magnitude + (113u << 23)) - bits_float(113u << 23));
  const uint32_t quiet = magnitude > 0x0f800000u ? 0x00400000u : 0u;
  const uint32_t not_finite = (magnitude + (224u << 23)) | quiet;
  const uint32_t bits = magnitude < 0x00800000u ? subnormal : magnitude >= 0x0f800000u ? not_finite : normal;
  return bits_float(bits | static_cast<uint32_t>(x.bits & 0x8000) << 16);
#endif
}

template <typename T>
SPARSE_OPT_HOST_DEVICE T from_float(float x);

template <>
SPARSE_OPT_HOST_DEVICE float from_float<float>(float x) {
  return x;
}

template <>
SPARSE_OPT_HOST_DEVICE bfloat16 from_float<bfloat16>(float x) {
#ifdef __CUDA_ARCH__
  return {__bfloat16_as_ushort(__float2bfloat16_rn(x))};
#else
  const uint32_t bits = float_bits(x);
  const uint32_t rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
  return {static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? 0xffffu : rounded)};
#endif
}

template <>
SPARSE_OPT_HOST_DEVICE float16 from_float<float16>(float x) {
#ifdef __CUDA_ARCH__
  return {__half_as_ushort(__float2half_rn(x))};
#else
  const uint32_t bits = float_bits(x);
  const uint32_t magnitude = bits & 0x7fffffffu;
  const uint32_t normal = (magnitude - (112u << 23) + 0xfffu + (magnitude >> 13 & 1u)) >> 13;
  // The last place of 0.5 is fp16's smallest step, 2^-24: adding 0.5 rounds to it.
  const uint32_t subnormal = float_bits(bits_float(magnitude) + 0.5f) - float_bits(0.5f);
  const uint32_t nan = 0x7e00u | (magnitude >> 13 & 0x1ffu);
  const uint32_t finite = magnitude < 0x38800000u ? subnormal : normal;
  const uint32_t result = magnitude > 0x7f800000u ? nan : magnitude >= 0x477ff000u ? 0x7c00u : finite;
  return {static_cast<uint16_t>(result | (bits >> 16 & 0x8000u))};
#endif
}

// Rounded towards zero: no finite value becomes infinite.
SPARSE_OPT_HOST_DEVICE bfloat16 truncate_to_bfloat16(float x) {
#ifdef __CUDA_ARCH__
  return {__bfloat16_as_ushort(__float2bfloat16_rz(x))};
#else
  const uint32_t bits = float_bits(x);
  return {static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? 0xffffu : bits >> 16)};
#endif
}

}  // namespace sparse_opt
